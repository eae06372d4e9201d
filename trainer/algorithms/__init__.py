"""Training algorithms by name: each turns a batch into an advantage a token and says which objective trains it.

One file an algorithm, each with its typed settings and a function ``advantages(batch, config) -> (N,)``. ``prepare``
is what a training loop calls; everything is computed over the whole batch, before it is cut into micro-batches.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from trace_fast.errors import ConfigError
from trace_fast.trainer.algorithms import gigpo, grpo, gspo, trace
from trace_fast.trainer.algorithms.gigpo import GigpoConfig
from trace_fast.trainer.algorithms.grpo import GrpoConfig
from trace_fast.trainer.algorithms.gspo import GspoConfig
from trace_fast.trainer.algorithms.trace import TraceConfig
from trace_fast.trainer.batch import TrainingBatch

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AlgorithmConfig",
    "GigpoConfig",
    "GrpoConfig",
    "GspoConfig",
    "TraceConfig",
    "algorithm",
    "prepare",
]

# In a settings file, the key ``name`` says which.
AlgorithmConfig = Annotated[GrpoConfig | GspoConfig | GigpoConfig | TraceConfig, Field(discriminator="name")]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm of the registry.

    Args:
        config: class of its settings; ``config.loss`` is the objective.
        advantages: ``(batch, config) -> (N,)``.
        kept_rollouts: ``(batch, config) -> (R,) bool``, or ``None`` for all; ``None`` where it never drops any.
        needs_scores: whether the batch must hold the reference's scores.
    """

    config: type[GrpoConfig | GspoConfig | GigpoConfig | TraceConfig]
    advantages: Callable[[TrainingBatch, Any], Tensor]
    kept_rollouts: Callable[[TrainingBatch, Any], Tensor | None] | None = None
    needs_scores: bool = False


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(GrpoConfig, grpo.advantages, grpo.kept_rollouts),
    "gspo": Algorithm(GspoConfig, gspo.advantages),
    "gigpo": Algorithm(GigpoConfig, gigpo.advantages),
    "trace": Algorithm(TraceConfig, trace.advantages, needs_scores=True),
}


def algorithm(name: str) -> Algorithm:
    """The algorithm of that name; ``ConfigError`` lists the names and the nearest one."""
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"algorithm: expected one of {', '.join(ALGORITHMS)}, got {name!r}{hint}")
    return ALGORITHMS[name]


def prepare(batch: TrainingBatch, config: GrpoConfig | GspoConfig | GigpoConfig | TraceConfig) -> TrainingBatch:
    """The batch with its advantages, and without the rollouts that the algorithm drops."""
    chosen = algorithm(config.name)
    kept_R = chosen.kept_rollouts(batch, config) if chosen.kept_rollouts else None
    return batch.with_advantages(chosen.advantages(batch, config), kept_R)
