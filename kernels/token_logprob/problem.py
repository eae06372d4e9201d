"""What the implementations of token_logprob are handed, and what they hand back."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Problem(NamedTuple):
    """Rows, head and targets, in the order of the custom ops' arguments.

    logits = softcap(logit_scale * (hidden weight^T + bias)) / temperature, softcap(x) = softcap tanh(x / softcap).
    """

    hidden_MH: torch.Tensor
    weight_VH: torch.Tensor
    targets_M: torch.Tensor
    bias_V: torch.Tensor | None
    softcap: float | None
    logit_scale: float
    temperature: float

    @property
    def needs_grad(self) -> bool:
        tensors = (self.hidden_MH, self.weight_VH, self.bias_V)
        return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


class Scored(NamedTuple):
    """Per row, and per segment where segments were given."""

    logprob_M: torch.Tensor
    entropy_M: torch.Tensor | None
    mean_S: torch.Tensor | None


class Parts(NamedTuple):
    """What one shard of the vocabulary knows of its rows; ``merge_parts`` puts shards together.

    The log-sum-exp over the shard is max + log(sum); target is the target's logit, 0 where another shard holds it, and
    held is 1 where this one does, else 0. All four are of one dtype, so that they travel together.
    """

    max_M: torch.Tensor
    sum_M: torch.Tensor
    target_M: torch.Tensor
    held_M: torch.Tensor


RowSums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of ``Parts``: max, sum, target


def accumulation_dtype(hidden_MH: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden_MH.dtype == torch.float64 else torch.float32


def safe_offsets(starts_S: torch.Tensor, rows: int) -> torch.Tensor:
    """int64 offsets that never leave the rows nor fall, whatever came: for calls whose values nobody checks."""
    return starts_S.long().clamp(0, rows).cummax(0).values
