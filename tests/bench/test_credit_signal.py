"""``credit_signal.py``: which turns bring the answer, and what their steps of the value say of it, on written files."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
WORDS = ["where", "?", "search", "fog", "Basel", "Bern", "open", "end"]


class WordTokenizer:
    def decode(self, ids: list[int]) -> str:
        return " ".join(WORDS[i] for i in ids)


@pytest.fixture
def signal(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("credit_signal")


def write(folder: Path) -> Path:
    """Prompt, three turns (fog; Basel; Basel again) and a right answer; two turns of fog, the second of which asks for
    Basel itself, and a wrong answer."""
    (folder / "rollouts").mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {"id": "a", "input_ids": [0, 1, 2, 3, 2, 4, 6, 4, 4, 7], "boundaries": [2, 4, 6, 8, 10], "n_turns": 3},
        {"id": "b", "input_ids": [0, 1, 2, 3, 4, 3, 4, 7], "boundaries": [2, 4, 6, 8], "n_turns": 2},
    ]
    rows[0] |= {"loss_mask": [0, 0, 1, 0, 1, 0, 1, 0, 1, 1], "extra": {"correct": True, "hops": 1}}
    rows[1] |= {"loss_mask": [0, 0, 1, 0, 1, 0, 1, 1], "extra": {"correct": False, "hops": 2}}
    rows = [row | {"answer": ["Basel"]} for row in rows]
    scores = [{"id": "a", "deltas": [0.1, 2.0, 0.5, 9.0]}, {"id": "b", "deltas": [-0.1, 3.0, 9.0]}]
    path = folder / "rollouts" / "step-000010.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.with_suffix(".scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scores))
    return path


def test_turns_are_told_apart_by_their_observations(signal: ModuleType, tmp_path: Path) -> None:
    first, second = signal.readings(write(tmp_path), WordTokenizer())
    assert (first.bringing, first.without, first.found, first.right, first.hops) == ([2.0], [0.1], True, True, 1)
    assert (second.bringing, second.without) == ([], [-0.1, 3.0])
    assert (second.found, second.right, second.hops) == (False, False, 2)
    row = signal.row_of(10, [first, second])
    assert row["turns"] == {"bringing": 1, "without": 3}
    assert row["bringing"] == 2.0
    assert row["without"] == pytest.approx(1.0)
    assert row["area"] == pytest.approx(2 / 3)
    assert (row["found"], row["right_of_found"]) == (0.5, 1.0)
    assert row["found_by_hops"] == {1: 1.0, 2: 0.0}
    assert row["right_of_found_by_hops"] == {1: 1.0, 2: None}


def test_rollouts_without_scores_still_say_what_was_found(signal: ModuleType, tmp_path: Path) -> None:
    path = write(tmp_path)
    path.with_suffix(".scores.jsonl").unlink()
    row = signal.row_of(10, list(signal.readings(path, WordTokenizer())))
    assert (row["bringing"], row["area"], row["found"]) == (None, None, 0.5)


def test_the_area_counts_ties_half(signal: ModuleType) -> None:
    assert signal.area([1.0, 2.0], [1.0, 0.0]) == pytest.approx(3.5 / 4)
    assert signal.area([], [1.0]) is None


def test_a_folder_without_rollouts_is_refused(
    signal: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "load_tokenizer", lambda name: WordTokenizer())
    with pytest.raises(SystemExit) as caught:
        signal.main([str(tmp_path / "run"), "--tokenizer", "base"])
    assert caught.value.code == 2
    assert "expected rollouts/step-*.jsonl, found none" in capsys.readouterr().err
