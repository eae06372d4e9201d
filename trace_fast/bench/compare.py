"""One rollout, all methods: numbers first, then interleaved rounds of those whose numbers are right.

Every method is called once untimed: its numbers are compared with float64, and what it compiles or allocates on a first
call is in ``first_seconds`` only. The rounds then go through the methods in turn, so that a machine that slows down
slows all of them; a ratio is of medians in one run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from trace_fast.bench import rule
from trace_fast.bench.measure import peak_extra_bytes, seconds_of
from trace_fast.bench.peers import BASELINE, SLOW, Peer
from trace_fast.model_spec import one_line
from trace_fast.rollout import Rollout
from trace_fast.scorer import Scorer

OURS = "trace_fast"
# What torch, its compiler, transformers and servers raise when they cannot do what they were asked.
PEER_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, OSError, AssertionError)

Say = Callable[[str], None]


class TraceFast(Peer):
    """The engine itself, as one of the methods."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def score(self, rollout: Rollout) -> np.ndarray:
        return self._scorer.score([rollout])[0].mean_logprobs


@dataclass
class Measured:
    """What is known of one method on one rollout; ``failure`` is why it has no numbers."""

    failure: str | None = None
    scores_S: np.ndarray | None = None
    first_seconds: float = 0.0
    runs: list[float] = field(default_factory=list)
    peak_extra_bytes: int | None = None
    right: bool = False

    @property
    def seconds(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.runs)


def compare(
    rollout: Rollout,
    methods: Mapping[str, Peer],
    truth_S: np.ndarray,
    *,
    rounds: int,
    device: torch.device,
    say: Say,
) -> dict[str, Measured]:
    """Measures every method; the baseline must be among them.

    Raises:
        Whatever our own method or the baseline raises: without them there is nothing to compare.
    """
    found = {name: _first_call(name, method, rollout, device) for name, method in methods.items()}
    errors = {name: np.abs(m.scores_S - truth_S) for name, m in found.items() if m.scores_S is not None}
    yardstick = errors[rule.yardstick_of(errors)]
    for name, measured in found.items():
        measured.right = name in errors and rule.right(errors[name], yardstick)
        say(f"{rollout.id}: {name}: {_verdict(measured)}")
    racing = {name: methods[name] for name, measured in found.items() if measured.right}
    for _ in range(rounds):
        for name, method in racing.items():
            if name in SLOW:
                continue  # minutes a call, and its ratio is far from any doubt: the first call is its round
            if found[name].failure is None:
                with _recorded(name, found[name]):
                    method.prepare()
                    found[name].runs.append(seconds_of(partial(method.score, rollout), device))
                    say(f"{rollout.id}: {name}: {found[name].runs[-1]:.3g} s")
    for name, method in racing.items():
        if name in SLOW:
            found[name].runs = [found[name].first_seconds]
        elif method.own_memory and found[name].failure is None:
            with _recorded(name, found[name]):
                method.prepare()
                found[name].peak_extra_bytes = peak_extra_bytes(partial(method.score, rollout), device)
    return found


@contextmanager
def _recorded(name: str, measured: Measured) -> Iterator[None]:
    """A peer's failure, in whichever call, is its own; without our method or the baseline there is nothing to say."""
    try:
        yield
    except PEER_FAILURES as error:
        if name in (OURS, BASELINE):
            raise
        measured.failure = f"{type(error).__name__}: {one_line(error, 200)}"
        measured.scores_S = None


def _first_call(name: str, method: Peer, rollout: Rollout, device: torch.device) -> Measured:
    measured = Measured()

    def call() -> None:
        measured.scores_S = method.score(rollout)

    with _recorded(name, measured):
        method.prepare()
        measured.first_seconds = seconds_of(call, device)
    return measured


def _verdict(measured: Measured) -> str:
    if measured.failure is not None:
        return f"failed: {measured.failure}"
    return "numbers right" if measured.right else "numbers differ"


def method_fields(name: str, found: Mapping[str, Measured], truth_S: np.ndarray, roof_seconds: float) -> dict[str, Any]:
    """The part of a row that belongs to one method.

    Args:
        roof_seconds: the rollout's FLOPs over the GEMM rate.
    """
    measured = found[name]
    if measured.scores_S is None:
        return {"method": name, "numbers": "failed", "reason": measured.failure}
    error = np.abs(measured.scores_S - truth_S)
    fields: dict[str, Any] = {"method": name, "numbers": "right" if measured.right else "differ"}
    fields["yardstick"] = rule.yardstick_of([n for n, m in found.items() if m.scores_S is not None])
    if np.isfinite(error).all():
        fields |= {"mean_abs_error": float(error.mean()), "max_abs_error": float(error.max())}
    if measured.right:
        fields |= {
            "first_seconds": round(measured.first_seconds, 4),
            "seconds": measured.seconds,
            "runs": [round(run, 4) for run in measured.runs],
            "speedup_over_kv_cache": found[BASELINE].seconds / measured.seconds if found[BASELINE].right else None,
            "peak_extra_bytes": measured.peak_extra_bytes,
            "fraction_of_gemm_roofline": roof_seconds / measured.seconds,
        }
    return fields
