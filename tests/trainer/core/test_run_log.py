"""What a run logs, and what a resumed run keeps of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_rollouts import build_rollout

from trace_fast.errors import InputError
from trace_fast.trainer.config import LoggingConfig
from trace_fast.trainer.run_log import RunLog

LINES = ['{"step": 0, "reward": 0.5}', '{"step": 0, "validation/reward": 1.0}', '{"step": 1}', '{"step": 2}']


def resumed(folder: Path, begin: int, content: bytes) -> bytes:
    path = folder / "metrics.jsonl"
    path.write_bytes(content)
    RunLog(folder, LoggingConfig(), begin=begin, writes=True).close()
    return path.read_bytes()


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    whole = "".join(line + "\n" for line in LINES).encode()
    assert resumed(tmp_path, 1, whole) == "".join(line + "\n" for line in LINES[:2]).encode()
    assert resumed(tmp_path, 0, whole) == b""
    assert resumed(tmp_path, 3, whole) == whole


@pytest.mark.parametrize("torn", ['{"step": 2, "rew', '{"step": 2}', "\udcff", "{"])
def test_a_last_line_that_a_kill_cut_off_is_dropped(torn: str, tmp_path: Path) -> None:
    kept = (LINES[0] + "\n" + LINES[2] + "\n").encode()
    assert resumed(tmp_path, 3, kept + torn.encode("utf-8", "surrogateescape")) == kept


@pytest.mark.parametrize("line", ['{"step": 1, "rew', "[]", '{"step": "x"}', "{}", "\udcff", ""])
def test_a_damaged_line_within_is_named(line: str, tmp_path: Path) -> None:
    content = (LINES[0] + "\n" + line + "\n" + LINES[2] + "\n").encode("utf-8", "surrogateescape")
    with pytest.raises(InputError, match=r"metrics\.jsonl:2: expected the metrics of a step"):
        resumed(tmp_path, 1, content)


def test_only_one_process_writes(tmp_path: Path) -> None:
    log = RunLog(tmp_path, LoggingConfig(), begin=0, writes=False)
    log.step(0, {"reward": 1.0}, total=1)
    log.dump(0, [build_rollout("a", [], [4])], [], always=True)
    assert list(tmp_path.iterdir()) == []


def test_a_step_has_its_metrics_and_the_times_of_its_phases(tmp_path: Path) -> None:
    """An evaluation between two steps takes none of their phases away; a number that is none is left out."""
    log = RunLog(tmp_path, LoggingConfig(), begin=0, writes=True)
    for name in ("rollout", "rollout", "checkpoint"):
        with log.phase(name):
            pass
    log.evaluation(0, {"reward": 0.25})
    log.step(0, {"reward": 0.5, "ratio_max": float("nan")}, total=2)
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first == {"step": 0, "validation/reward": 0.25}
    assert set(second) == {"step", "reward", "seconds/rollout", "seconds/checkpoint", "seconds/step"}
    assert second["seconds/step"] == pytest.approx(second["seconds/rollout"] + second["seconds/checkpoint"])
    assert log.seconds == {}


def test_rollouts_of_every_nth_step_are_dumped(tmp_path: Path) -> None:
    log = RunLog(tmp_path, LoggingConfig(rollouts=2), begin=0, writes=True)
    for step in range(4):
        log.dump(step, [build_rollout(str(step), [], [4])], [])
    log.dump(3, [build_rollout("3", [], [4])], [], always=True)
    names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert names == ["step-000000.jsonl", "step-000002.jsonl", "step-000003.jsonl"]
