"""How a token's loss is weighted: all three aggregations are one factor a rollout.

With n_r trained tokens in rollout r, n in total, and R rollouts that have any:

============== ====================
aggregation    factor of a token
============== ====================
rollout_mean   1 / (R · n_r)
token_mean     1 / n
constant       1 / (R · divisor)
============== ====================

R, n and n_r are those of the whole batch. Where a call sees a part of it, they must be given: any split then sums to
the loss and the gradient of the whole.

Suffixes: R rollouts of the call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trace_fast.errors import TraceFastError


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Denominators of the whole batch, for a call that sees a part of it; ``None`` takes the call's own.

    Args:
        n_tokens: trained tokens of the whole batch (``token_mean``).
        n_rollouts: rollouts of the whole batch that have trained tokens (``rollout_mean``, ``constant``).
        tokens_per_rollout_R: ``(R,)`` int32 or int64, trained tokens of each of the call's rollouts in the whole
            batch, where the call sees only some tokens of a rollout (``rollout_mean``). The sequence ratio needs whole
            rollouts.
    """

    n_tokens: int | Tensor | None = None
    n_rollouts: int | Tensor | None = None
    tokens_per_rollout_R: Tensor | None = None


def rollout_weights(
    n_tokens_R: Tensor,
    aggregation: str,
    divisor: float | None,
    n_tokens: Tensor | None,
    n_rollouts: Tensor | None,
    tokens_per_rollout_R: Tensor | None,
) -> Tensor:
    """``(R,) float64`` factor of each rollout's tokens; 0 for a rollout without trained tokens."""
    if aggregation == "token_mean":
        total = n_tokens_R.sum() if n_tokens is None else n_tokens
        weight_R = 1.0 / total.clamp(min=1).double().expand(n_tokens_R.shape)
    else:
        rollouts = (n_tokens_R > 0).sum() if n_rollouts is None else n_rollouts
        if aggregation == "rollout_mean":
            length_R = (n_tokens_R if tokens_per_rollout_R is None else tokens_per_rollout_R).clamp(min=1).double()
        else:
            assert divisor is not None, "PolicyLossConfig asks for it"
            length_R = torch.full_like(n_tokens_R, divisor, dtype=torch.float64)
        weight_R = 1.0 / (rollouts.clamp(min=1).double() * length_R)
    return torch.where(n_tokens_R > 0, weight_R, 0.0)


def check_counts(
    n_tokens_R: Tensor,
    n_tokens: Tensor | None,
    n_rollouts: Tensor | None,
    tokens_per_rollout_R: Tensor | None,
    ratio: str,
) -> None:
    """Refuses denominators that are smaller than what this call alone holds. For CPU tensors: it looks at contents."""
    own_tokens, own_rollouts = int(n_tokens_R.sum()), int((n_tokens_R > 0).sum())
    if n_tokens is not None and not int(n_tokens) >= own_tokens:
        raise TraceFastError(f"n_tokens: expected at least the {own_tokens} trained tokens here, got {int(n_tokens)}")
    if n_rollouts is not None and not int(n_rollouts) >= own_rollouts:
        raise TraceFastError(
            f"n_rollouts: expected at least the {own_rollouts} rollouts with trained tokens here, got {int(n_rollouts)}"
        )
    if tokens_per_rollout_R is None:
        return
    bad_R = tokens_per_rollout_R < n_tokens_R
    expected = "at least the rollout's trained tokens here"
    if ratio == "sequence":
        bad_R = tokens_per_rollout_R != n_tokens_R
        expected = "whole rollouts, whose sequence ratio can be known"
    if bad_R.any():
        r = int(bad_R.to(torch.uint8).argmax())
        raise TraceFastError(
            f"tokens_per_rollout_R: expected {expected}, got {int(tokens_per_rollout_R[r])} at [{r}], "
            f"where the rollout has {int(n_tokens_R[r])} here"
        )
