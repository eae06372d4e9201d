"""What a run logs, and what a resumed run keeps of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest
from training_rollouts import build_rollout

from trace_fast.errors import ConfigError, InputError
from trace_fast.trainer.boards import check_boards
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


def test_a_terminal_that_is_gone_takes_no_metrics_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(text: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("trace_fast.trainer.run_log.say", gone)
    log = RunLog(tmp_path, LoggingConfig(), begin=0, writes=True)
    log.step(0, {"reward": 0.5}, total=2)
    log.warn("stopping")
    log.step(1, {"reward": 0.75}, total=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward"]) for line in lines] == [(0, 0.5), (1, 0.75)]


def test_rollouts_of_every_nth_step_are_dumped(tmp_path: Path) -> None:
    log = RunLog(tmp_path, LoggingConfig(rollouts=2), begin=0, writes=True)
    for step in range(4):
        log.dump(step, [build_rollout(str(step), [], [4])], [])
    log.dump(3, [build_rollout("3", [], [4])], [], always=True)
    names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert names == ["step-000000.jsonl", "step-000002.jsonl", "step-000003.jsonl"]


class FakeWandb(ModuleType):
    """The calls of the package that are made, in the place of the package."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("wandb", None)
        self.__spec__ = ModuleSpec("wandb", None, origin="wandb/__init__.py")
        self.runs: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.exit_codes: list[int] = []
        self.drawn_against: list[tuple[str, str]] = []

    def init(self, **settings: Any) -> Self:
        if not settings["project"].strip():
            raise self.Error("no project")
        self.runs.append(settings)
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.drawn_against.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


def test_wandb_gets_every_metric_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    folder = tmp_path / "trace-seed0"
    folder.mkdir()
    config = LoggingConfig(wandb="docworld")
    check_boards(tensorboard=False, wandb="docworld")
    for begin in (0, 1, 0):
        log = RunLog(folder, config, begin=begin, writes=True, settings={"training": {"steps": 3}})
        log.evaluation(begin, {"reward": 0.25})
        log.step(begin, {"reward": 0.5}, total=3)
        log.close(failed=begin == 1)
    RunLog(folder, config, begin=0, writes=False).close()  # another process of the run
    assert wandb.logged[2:4] == [
        {"training_step": 1, "validation/reward": 0.25},
        {"training_step": 1, "reward": 0.5, "seconds/step": 0.0},
    ]
    assert wandb.drawn_against == [("*", "training_step")] * 3
    assert wandb.exit_codes == [0, 1, 0]
    first, second, third = wandb.runs
    assert first["id"] == second["id"] != third["id"]
    assert {run["resume"] for run in wandb.runs} == {"allow"}
    assert (first["project"], first["name"], first["dir"]) == ("docworld", "trace-seed0", str(folder))
    assert first["config"] == {"training": {"steps": 3}}
    with pytest.raises(ConfigError, match=r"logging\.wandb: cannot start a run of the project ' ': no project"):
        RunLog(folder, LoggingConfig(wandb=" "), begin=0, writes=True)


def test_a_folder_of_a_board_s_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match=r"logging\.wandb: needs the package wandb"):
        check_boards(tensorboard=False, wandb="docworld")


def test_a_board_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"logging\.tensorboard: needs the package tensorboard"):
        check_boards(tensorboard=True, wandb=None)
    with pytest.raises(ConfigError, match=r"logging\.wandb: needs the package wandb: pip install wandb"):
        check_boards(tensorboard=False, wandb="docworld")
    check_boards(tensorboard=False, wandb=None)
