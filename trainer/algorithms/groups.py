"""Advantages relative to a group, with or without division by its standard deviation.

Suffixes: V values (one a rollout, or one an action), R rollouts, N tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trace_fast.kernels.turn_credit import outcome_advantages
from trace_fast.kernels.turn_credit.segments import Groups
from trace_fast.trainer.batch import TrainingBatch

Std = Literal["population", "sample", "none"]


def group_advantages(values_V: Tensor, keys_V: Tensor, std: Std) -> Tensor:
    """``(V,)`` (value - mean) / std over the values that share a key; ``none`` leaves the division out.

    Groups of one and groups of equal values get exactly 0; what counts as equal is said in
    ``trace_fast.kernels.turn_credit.outcome_advantages``, whose errors are raised here too.
    """
    if std != "none":
        return outcome_advantages(values_V, keys_V, std)
    groups = Groups(keys_V)
    centred_V = values_V - groups.reduce(values_V, torch.add) / groups.size_N
    return torch.where(equal_values(values_V, keys_V), 0.0, centred_V)


def equal_values(values_V: Tensor, keys_V: Tensor) -> Tensor:
    """``(V,) bool`` True in groups without a difference to learn from: of one value, or of equal values."""
    size_V = outcome_advantages(values_V, keys_V).abs()
    return Groups(keys_V).reduce(size_V, torch.maximum) == 0


def to_tokens(values_R: Tensor, batch: TrainingBatch) -> Tensor:
    """``(N,)`` each rollout's value at its trained tokens, 0 elsewhere."""
    return torch.where(batch.loss_mask_N, values_R[batch.rollout_N], 0.0)
