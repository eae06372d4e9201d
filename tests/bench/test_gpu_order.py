"""What ``benchmarks/gpu.py`` runs, and in which order: nothing is timed that was not checked in the same run."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (["attention"], ["checks", "attention"]),
        (["flat", "scoring"], ["checks", "scoring", "flat"]),
        (["sanitizer"], ["sanitizer"]),
        (["checks"], ["checks"]),
        (None, ["checks", "attention", "token_logprob", "scoring", "flat", "sanitizer"]),
    ],
)
def test_the_checks_come_before_what_is_timed(gpu: Any, only: list[str] | None, expected: list[str]) -> None:
    assert gpu.sections(only) == expected


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_timed_where_the_checks_could_not_run(
    gpu: Any, fails: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []

    def section(name: str) -> Any:
        def act(run: Any) -> None:
            ran.append(name)
            if fails and name == "checks":
                raise RuntimeError("no device code")

        return act

    monkeypatch.setattr(gpu, "_section", section)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    made: list[Any] = []

    def on_the_cpu(device: torch.device, path: Path, deadline: float) -> Any:
        made.append(importlib.import_module("gpu_common").GpuRun(torch.device("cpu"), path, deadline))
        return made[0]

    monkeypatch.setattr(gpu, "GpuRun", on_the_cpu)
    code = gpu.main(["--only", "attention", "--out", str(tmp_path / "rows.jsonl"), "--minutes", "9"])
    assert ran == (["checks"] if fails else ["checks", "attention"])
    assert code == int(fails)
    refused = [(row["op"], row["numbers"]) for row in made[0].rows]
    assert refused == ([("checks", "failed"), ("attention", "absent")] if fails else [])
    assert time.monotonic() < made[0].deadline
