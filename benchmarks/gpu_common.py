"""What the sections of ``gpu.py`` share: the clock, rows, and timing with events on a cold L2 cache."""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trace_fast.bench.about import about
from trace_fast.bench.measure import gemm_rate, seconds_of
from trace_fast.bench.rows import append_json

Call = Callable[[], object]
L2_BYTES = 256 << 20  # more than any L2 holds


def kernel_failures() -> tuple[type[Exception], ...]:
    """What torch, its compiler and Triton (compilation, too much shared memory) raise where a kernel cannot run."""
    plain = (RuntimeError, ValueError, TypeError, AssertionError)
    if importlib.util.find_spec("triton") is None:
        return plain
    from triton.errors import TritonError

    return (*plain, TritonError)


def round_seconds(call: Call, device: torch.device) -> float:
    """Seconds of one call: by CUDA events, other data in the L2 cache before it; on the CPU by the clock."""
    if device.type != "cuda":
        return seconds_of(call, device)
    torch.empty(L2_BYTES, dtype=torch.int8, device=device).zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3


def interleaved_seconds(calls: Mapping[str, Call], device: torch.device, *, rounds: int) -> dict[str, list[float]]:
    """Rounds of calls that take turns, so that a clock that drops drops for all; two untimed ones before."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-2, rounds):
        for name, call in calls.items():
            seconds = round_seconds(call, device)
            times[name] += [seconds] if number >= 0 else []
    return times


@dataclass
class GpuRun:
    """Rows of one run, and the time that is left.

    Attributes:
        failed: lines for the end of the output; any makes the run fail.
        wrong: (op, implementation) whose small cases are wrong, and which so get no speed.
        unchecked: the small cases could not be run at all, so nothing gets one.
    """

    device: torch.device
    path: Path
    deadline: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: set[tuple[str, str]] = field(default_factory=set)
    unchecked: bool = False
    _rates: dict[torch.dtype, float] = field(default_factory=dict)

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of a large product, measured once in this run."""
        if dtype not in self._rates:
            self._rates[dtype] = gemm_rate(dtype, self.device, seconds=0.3)
        return self._rates[dtype]

    def speed(
        self, op: str, case: str, implementation: str, times: Sequence[float], dtype: torch.dtype, **figures: Any
    ) -> float:
        """Writes a row whose numbers have been checked; returns the median."""
        seconds = statistics.median(times)
        measured = {"seconds": seconds, "runs": [round(t, 6) for t in times]}
        if "flops" in figures:
            measured["tflops"] = round(figures["flops"] / seconds / 1e12, 1)
            measured["fraction_of_gemm_roofline"] = round(figures["flops"] / seconds / self.rate(dtype), 3)
        self._row(op, case, implementation, "right", dtype=str(dtype), **measured, **figures)
        return seconds

    def target(self, op: str, case: str, what: str, value: float, target: float) -> None:
        """A ratio or figure of the plan: ``value`` should be at least ``target``."""
        self._row(op, case, "trace_fast", "right", figure=what, value=value, target=target, met=value >= target)

    def refuse(self, op: str, case: str, implementation: str, numbers: str, reason: str) -> None:
        """A row without a speed: numbers ``differ``, or it ``failed``, or is ``absent``."""
        self._row(op, case, implementation, numbers, reason=reason)
        if numbers != "absent":
            self.failed.append(f"{op}, {case}, {implementation}: {numbers}: {reason}")

    def may_run(self, op: str, case: str, implementation: str, reason: str | None) -> bool:
        """Whether an implementation of ours is to be measured: it runs here (no ``reason``) and is right when small."""
        if reason is not None:
            self.refuse(op, case, implementation, "absent", reason)
        elif (op, implementation) in self.wrong:
            self.refuse(op, case, implementation, "differ", "its small cases are wrong")
        return reason is None and (op, implementation) not in self.wrong

    def check(self, op: str, case: str, implementation: str, error: float, allowed: float) -> bool:
        """Whether numbers are right; when they are not, a row says so and no speed follows."""
        if error <= allowed:  # NaN is not
            return True
        self.refuse(op, case, implementation, "differ", f"error {error:.3e}, allowed {allowed:.3e}")
        return False

    def _row(self, op: str, case: str, implementation: str, numbers: str, **figures: Any) -> None:
        row = {**about(self.device), "op": op, "case": case, "implementation": implementation, "numbers": numbers}
        self.rows.append(row | figures)
        append_json(self.path, [json.dumps(self.rows[-1])])
