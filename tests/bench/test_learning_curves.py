"""What the learning curves publish: of finished runs, under their own settings, and said of what was measured."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trace_fast.trainer.checkpoint import Progress

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SUCCESS = [0.1, 0.35, 0.2, 0.35, 0.45]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("learning_tables")


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("learning_curves")


def make_run(curves: ModuleType, work: Path, *, steps: int = 40, **written: Any) -> Any:
    """A finished run of GRPO in ``work``, as training leaves it."""
    (work / "base").mkdir(parents=True, exist_ok=True)
    (work / "base" / "validation.json").write_text('{"weights": "abc"}')
    (work / "world").mkdir(exist_ok=True)
    hops = [1, 2, 2, 3]
    questions = [{"question": f"q{i}", "answers": ["a"], "hops": h} for i, h in enumerate(hops)]
    (work / "world" / "questions.validation.jsonl").write_text("\n".join(map(json.dumps, questions)))
    job = curves.Job(curves.VARIANTS[0], 0, work, steps)
    lines = []
    for step in range(steps):
        lines.append({"step": step, "reward": step / 100, "turns": 2.0, "zero_std_groups": 0.5, "entropy": 1.0})
        lines[-1] |= {"seconds/step": 8.0, "seconds/score": 1.0, "seconds/rollout": 3.0}
    for place, success in enumerate(SUCCESS):
        step = place * steps // 4
        line = {"step": step, "validation/success": success, "validation/turns": 3.0, "validation/reward": 0.2}
        lines.append(line | {f"validation/success/hops={h}": success + h / 100 for h in (1, 2, 3)})
    lines.sort(key=lambda line: line["step"])
    folder = job.folder
    (folder / "checkpoints" / f"step-{steps:06d}").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    progress = Progress(steps, steps, "base@1", written.get("settings", job.config().deciding()))
    (folder / "checkpoints" / f"step-{steps:06d}" / "trainer.json").write_text(json.dumps(asdict(progress)))
    sources = [{"date": "2026-01-02T03:04:05", "machine": "cpu", "torch": "2", "commit": c} for c in ("aa", "bb")]
    base = written.get("base", "abc")
    (folder / "about.json").write_text("".join(json.dumps(s | {"base": base, "jobs": 2}) + "\n" for s in sources))
    return job


def test_a_run_of_these_settings_to_its_end_is_finished(curves: ModuleType, tmp_path: Path) -> None:
    assert curves.finished(make_run(curves, tmp_path))
    assert not curves.finished(curves.Job(curves.VARIANTS[1], 0, tmp_path, 40))
    assert not curves.finished(curves.Job(curves.VARIANTS[0], 0, tmp_path, 60))


def test_a_run_of_other_length_settings_or_base_is_not_taken_for_it(curves: ModuleType, tmp_path: Path) -> None:
    make_run(curves, tmp_path / "a")
    with pytest.raises(SystemExit, match="holds a run of 40 steps, expected 30"):
        curves.finished(curves.Job(curves.VARIANTS[0], 0, tmp_path / "a", 30))
    with pytest.raises(SystemExit, match=r"other settings than those of docworld.toml"):
        curves.finished(make_run(curves, tmp_path / "b", settings={"optimizer": {"lr": 1.0}}))
    with pytest.raises(SystemExit, match="from another base policy"):
        curves.finished(make_run(curves, tmp_path / "c", base="other"))


def test_a_row_holds_what_the_run_measured(curves: ModuleType, tmp_path: Path) -> None:
    row = curves.row_of(make_run(curves, tmp_path))
    assert (row["run"], row["seed"], row["steps"], row["commit"], row["jobs"]) == ("GRPO", 0, 40, "aa, bb", 2)
    assert row["evaluated"] == [0, 10, 20, 30, 40]
    assert row["success"] == SUCCESS
    assert row["success_by_hops"]["3"] == pytest.approx([s + 0.03 for s in SUCCESS])
    assert row["questions"] == 4
    assert row["questions_by_hops"] == {"1": 1, "2": 2, "3": 1}
    assert row["rollouts_a_step"] == row["rollouts_an_update"] == 128
    assert row["trained_reward"] == [step / 100 for step in range(40)]
    assert row["scoring_share"] == 0.125


def rows_of(curves: ModuleType, work: Path) -> list[dict[str, Any]]:
    row = curves.row_of(make_run(curves, work))
    lower = row | {"seed": 1, "success": [0.1, 0.2, 0.2, 0.2, 0.2]}
    trace = row | {"run": "TRACE", "success": [0.4, 0.1, 0.305, 0.31, 0.32], "figures": ["algorithms", "forms"]}
    return [row, lower, trace]


def test_the_table_says_what_was_measured(curves: ModuleType, tables: ModuleType, tmp_path: Path) -> None:
    text = tables.table(rows_of(curves, tmp_path))
    lines = text.splitlines()
    assert lines[-2].startswith("| GRPO | 2 | 0.100 | 0.300 | 0.200–0.400 | 0.410 / 0.420 / 0.430 | 30, never | 3.00 |")
    # One evaluation that reaches the target (0.3) does not count alone, and the start not at all.
    assert lines[-1].startswith("| TRACE | 1 | 0.400 | 0.315 | – |")
    assert " | 20 | " in lines[-1]
    assert "40 steps of 128 rollouts and one update" in text
    assert "each of 4 held-out questions (1 / 2 / 1 of 1 / 2 / 3 hops)" in text
    assert f"up to {math.sqrt(0.4 * 0.6 / 4):.3f}" in text
    assert "2026-01-02; cpu; torch 2; commit aa, bb." in text


def test_without_grpo_there_is_no_target(curves: ModuleType, tables: ModuleType, tmp_path: Path) -> None:
    (line,) = tables.table(rows_of(curves, tmp_path)[2:]).splitlines()[-1:]
    assert "never" not in line
    assert " | – | 3.00 | " in line


def test_new_rows_replace_their_own_and_no_others(curves: ModuleType, tables: ModuleType, tmp_path: Path) -> None:
    first, second, third = rows_of(curves, tmp_path)
    tables.add_rows([first, second], tmp_path)
    tables.add_rows([second | {"steps": 41}, third], tmp_path)
    written = [json.loads(line) for line in (tmp_path / tables.ROWS).read_text().splitlines()]
    assert [(row["run"], row["seed"], row["steps"]) for row in written] == [
        ("GRPO", 0, 40),
        ("GRPO", 1, 41),
        ("TRACE", 0, 40),
    ]
    tables.write_results(tmp_path)
    drawn = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert drawn == [f"learning_curves_{figure}.svg" for figure in ("algorithms", "answers", "forms")]
    assert (tmp_path / tables.TABLE).read_text() == tables.table(written)


@pytest.mark.parametrize("options", [["--jobs", "0"], ["--steps", "0"], ["--only", "PPO"]])
def test_options_that_cannot_be_are_refused_before_anything_runs(
    options: list[str], curves: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        curves.main(["--work", str(tmp_path), *options])
    assert caught.value.code == 2
    assert options[1] in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_whole_answers_have_the_weight_of_grpo(curves: ModuleType, tmp_path: Path) -> None:
    (variant,) = (v for v in curves.VARIANTS if v.name == "TRACE, whole answers")
    advantage = curves.Job(variant, 0, tmp_path, 40).config().algorithm.advantage
    assert (advantage.answer_tail, advantage.answer_tail_scale, advantage.alpha_out) == ("constant", 1.0, 1.0)


def test_two_updates_halve_the_batch_and_change_nothing_else(curves: ModuleType, tmp_path: Path) -> None:
    named = {v.name: curves.Job(v, 0, tmp_path, 40) for v in curves.VARIANTS}
    for name in ("GRPO", "GSPO"):
        one, two = named[name].config(), named[f"{name}, 2 updates"].config()
        assert (one.training.global_batch, two.training.global_batch) == (128, 64)
        same = two.training.model_copy(update={"global_batch": 128})
        assert two.model_copy(update={"training": same, "out": one.out}) == one
    assert named["GSPO, 2 updates"].folder.name == "gspo-2-updates-seed0"
