"""Groups of rollouts from questions, with those sampled again that the engine failed.

Only an engine's failure is repeated: a rollout that ran out of turns, context or time is the policy's own doing. What
is repeated gets a new seed and the same id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trace_fast.errors import ConfigError
from trace_fast.rollout import Rollout
from trace_fast.trainer.engines.engine import Engine
from trace_fast.trainer.harness import Harness, StopReason, Task

ATTEMPT_SEEDS = 7_919  # between the seeds of two attempts


@dataclass(frozen=True, slots=True)
class Failure:
    """A rollout that the engine failed in every attempt, and its last message."""

    id: str
    group: str
    error: str


@dataclass(frozen=True, slots=True)
class SampledGroups:
    """``rollouts``: by question, those of one question side by side. ``failures``: what is missing."""

    rollouts: list[Rollout]
    failures: list[Failure]


def sample_groups(
    tasks: Sequence[Task],
    harness: Harness,
    engine: Engine,
    *,
    seed: int,
    samples: int,
    attempts: int = 1,
    incomplete: Literal["keep", "drop"] = "keep",
    stop: Callable[[], bool] = lambda: False,
) -> SampledGroups:
    """Samples ``samples`` rollouts of every question.

    Args:
        attempts: at most, of one rollout. incomplete: what becomes of a group that still lacks rollouts: it stays
            smaller, or is left out as a whole.
        stop: asked between the turns of the rollouts; where it says so, nothing is sampled.

    Raises:
        ConfigError, RolloutError, TraceFastError: as ``Harness.run``.
    """
    if attempts < 1:
        raise ConfigError(f"attempts: expected at least 1, got {attempts}")
    if not tasks:
        return SampledGroups([], [])
    rollouts = harness.run(tasks, engine, seed=seed, samples=samples, stop=stop)
    by_id = {task.id: task for task in tasks}
    for attempt in range(1, attempts):
        failed = [i for i, rollout in enumerate(rollouts) if _failed(rollout)]
        if not failed:
            break
        lacking: dict[str, list[int]] = {}
        for i in failed:
            lacking.setdefault(rollouts[i].group, []).append(i)
        most = max(map(len, lacking.values()))
        again = harness.run(
            [by_id[group] for group in lacking], engine, seed=seed + attempt * ATTEMPT_SEEDS, samples=most, stop=stop
        )
        if not again:  # stopped
            return SampledGroups([], [])
        for number, places in enumerate(lacking.values()):
            for i, rollout in zip(places, again[number * most :], strict=False):
                rollouts[i] = replace(rollout, id=rollouts[i].id)
    failures = [Failure(r.id, r.group, str(r.extra.get("engine_error"))) for r in rollouts if _failed(r)]
    broken = {failure.group for failure in failures} if incomplete == "drop" else set()
    return SampledGroups([r for r in rollouts if not _failed(r) and r.group not in broken], failures)


def _failed(rollout: Rollout) -> bool:
    return bool(rollout.extra["stop_reason"] == StopReason.ENGINE_ERROR.value)
