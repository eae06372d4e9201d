"""What the op suites share: a race between implementations, and a row a race in benchmarks/results/ops.jsonl."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from trace_fast.bench.about import about
from trace_fast.bench.measure import seconds_of, synchronize
from trace_fast.bench.rows import append_json

RESULTS = Path(__file__).resolve().parent / "results" / "ops.jsonl"

Call = Callable[[], object]
Race = Callable[..., dict[str, float]]


@pytest.fixture
def device() -> torch.device:
    """CUDA where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def race(benchmark: BenchmarkFixture, device: torch.device) -> Race:
    """``race(op, case, ("native", call), {"sdpa": call}, rounds=5, **figures)`` → median seconds by name.

    The others run before each timed call of ours, so that all of them meet the same machine. Numbers must have been
    checked before: a race is only about time.
    """

    def run(
        op: str, case: str, ours: tuple[str, Call], others: Mapping[str, Call], *, rounds: int = 5, **figures: Any
    ) -> dict[str, float]:
        name, call = ours
        times: dict[str, list[float]] = {other: [] for other in others}

        def others_first() -> None:
            for other, others_call in others.items():
                times[other].append(seconds_of(others_call, device))

        def timed() -> None:
            call()
            synchronize(device)

        benchmark.pedantic(timed, setup=others_first, rounds=rounds, warmup_rounds=1)
        medians = {name: benchmark.stats.stats.median} | {o: statistics.median(t[1:]) for o, t in times.items()}
        row = {**about(device), "op": op, "case": case, "numbers": "right", "implementation": name, "rounds": rounds}
        row |= {"seconds": medians[name], "others": {other: medians[other] for other in others}}
        row |= {"ratios": {other: medians[other] / medians[name] for other in others}, **figures}
        append_json(RESULTS, [json.dumps(row)])
        ratios = ", ".join(f"{medians[other] / medians[name]:.2f}x over {other}" for other in others)
        more = ", ".join(f"{key} {value:.3g}" for key, value in figures.items())
        print(f"\n{op} [{name}] {case}: {medians[name] * 1e3:.3f} ms; " + "; ".join(x for x in (ratios, more) if x))
        return medians

    return run
