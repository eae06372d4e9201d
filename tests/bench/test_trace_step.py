"""``bench_trace_step.py``: two algorithms are compared on the same rollouts, or not at all."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench_trace_step")


def record(step: int, seconds: float, score: float) -> dict[str, Any]:
    same = {"step": step, "reward": 0.25 + step, "turns": 2.0 + step, "tokens": 300.0, "written_tokens": 40.0}
    return same | {"seconds/score": score, "seconds/step": seconds, "success": 0.1}


def found() -> dict[str, Any]:
    grpo = [record(step, seconds, 0.0) for step, seconds in ((1, 8.0), (2, 10.0), (3, 30.0))]
    trace = [record(step, *seconds) for step, seconds in ((1, (10.0, 2.0)), (2, (11.0, 1.1)), (3, (40.0, 6.0)))]
    return {"GRPO": grpo, "TRACE": trace}


def test_ratio_and_share_are_of_medians(bench: ModuleType) -> None:
    row = bench.compared(found())
    assert row["trace_over_grpo"] == pytest.approx(1.1)
    assert row["scoring_share"] == pytest.approx(0.15)
    assert row["seconds"] == {"GRPO": {"score": 0.0, "step": 10.0}, "TRACE": {"score": 2.0, "step": 11.0}}
    assert row["case"] == "docworld, 300 tokens and 4.0 turns a rollout, 3 steps"


@pytest.mark.parametrize("key", ["step", "reward", "turns", "tokens", "written_tokens"])
def test_other_rollouts_are_noticed(bench: ModuleType, key: str) -> None:
    runs = found()
    assert bench.differ(runs) is None
    before = runs["TRACE"][1][key]
    runs["TRACE"][1][key] = before + 1
    assert bench.differ(runs) == f"step 2: {key} is {before} for GRPO and {before + 1} for TRACE"


@pytest.mark.parametrize("options", [["--steps", "1"], ["--rounds", "0"]])
def test_options_that_leave_nothing_to_measure_are_refused(
    options: list[str], bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(["--work", str(tmp_path), *options])
    assert caught.value.code == 2
    assert "expected at least 2 and 1" in capsys.readouterr().err
