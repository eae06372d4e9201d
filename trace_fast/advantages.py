"""From the credit of turns to the advantage of every token (TRACE, Eq. 11 and the answer-tail rule of A.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from trace_fast.config import AdvantageConfig
from trace_fast.credit import TurnCredit
from trace_fast.errors import RolloutError, TraceFastError
from trace_fast.kernels.turn_credit import token_advantages_flat
from trace_fast.rollout import Rollout

__all__ = ["token_advantages"]

_TOKENS_AT_ONCE = 4_000_000  # bounds the int64 temporaries of one pass to a few hundred MB


def token_advantages(
    rollouts: Sequence[Rollout], credit: Sequence[TurnCredit], config: AdvantageConfig | None = None
) -> list[np.ndarray]:
    """``(len(input_ids),) float32`` advantages of each rollout, in input order; 0 on prompt and observations.

    The rule of each token is that of ``trace_fast.kernels.turn_credit.token_advantages_flat``; which tokens the policy
    wrote is told by ``loss_mask`` alone, never guessed from ids. Computed in float64 and rounded once.

    An unknown outcome (``outcome_advantage`` is ``None``) contributes 0: tool turns keep their own term alpha_turn ·
    r_k, the answer gets 0. The answer's ``group_mean`` is over the rollouts of the group in this call, rewarded or not,
    that have answer tokens.

    Args:
        rollouts, credit: the same rollouts in the same order.
        config: the paper's values when ``None``.

    Raises:
        RolloutError: kind ``inexact`` when a rollout has no ``loss_mask``, or when its chat template rewrites history.
        TraceFastError: (a ``ValueError``) rollouts and credit differ in number, id, group or turns; it names the first
            difference.
    """
    config = config or AdvantageConfig()
    _check_pairs(rollouts, credit)
    advantages: list[np.ndarray] = [np.zeros(0, dtype=np.float32)] * len(rollouts)
    for members in _batches(rollouts):
        flat = _advantages([rollouts[i] for i in members], [credit[i] for i in members], config)
        for i, values in zip(members, flat, strict=True):
            advantages[i] = values
    return advantages


def _advantages(
    rollouts: Sequence[Rollout], credit: Sequence[TurnCredit], config: AdvantageConfig
) -> Iterator[np.ndarray]:
    numbers: dict[str, int] = {}
    lengths = [len(rollout.input_ids) for rollout in rollouts]
    advantages_N = token_advantages_flat(
        torch.from_numpy(np.concatenate([rollout.token_turns() for rollout in rollouts])),
        torch.from_numpy(np.concatenate([_loss_mask(rollout) for rollout in rollouts])),
        _offsets(lengths),
        torch.from_numpy(np.concatenate([c.rewards for c in credit], dtype=np.float64)),
        _offsets([c.n_turns for c in credit]),
        torch.tensor([c.outcome_advantage or 0.0 for c in credit], dtype=torch.float64),
        torch.tensor([numbers.setdefault(c.group, len(numbers)) for c in credit], dtype=torch.int64),
        config,
    )
    for values in torch.split(advantages_N.float(), lengths):
        yield values.numpy().copy()  # a copy, so that one rollout does not keep the whole batch alive


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))


def _loss_mask(rollout: Rollout) -> np.ndarray:
    if rollout.loss_mask is None:
        raise RolloutError(
            "inexact",
            "has no loss_mask, so which tokens the policy wrote is not known; expected loss_mask (tokens form) or "
            "messages to derive it from",
            rollout_id=rollout.id,
            source=rollout.source,
        )
    return rollout.loss_mask


def _batches(rollouts: Sequence[Rollout]) -> Iterator[list[int]]:
    """Indices of the rollouts, whole groups together, until a batch holds enough tokens."""
    groups: dict[str, list[int]] = {}
    for i, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group, []).append(i)
    batch: list[int] = []
    tokens = 0
    for members in groups.values():
        batch += members
        tokens += sum(len(rollouts[i].input_ids) for i in members)
        if tokens >= _TOKENS_AT_ONCE:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _check_pairs(rollouts: Sequence[Rollout], credit: Sequence[TurnCredit]) -> None:
    if len(rollouts) != len(credit):
        raise TraceFastError(
            f"rollouts and credit: expected the same number, got {len(rollouts)} rollouts and {len(credit)} credits"
        )
    for i, (rollout, turns) in enumerate(zip(rollouts, credit, strict=True)):
        for name in ("id", "group", "n_turns"):
            expected, got = getattr(rollout, name), getattr(turns, name)
            if expected != got:
                raise TraceFastError(
                    f"credit[{i}]: expected {name} {expected!r} of rollouts[{i}] ({rollout.id!r}), got {got!r}"
                )
        if turns.rewards.shape != (turns.n_turns,):
            raise TraceFastError(
                f"credit[{i}] ({turns.id!r}): expected {turns.n_turns} rewards (one a turn), "
                f"got shape {turns.rewards.shape}"
            )
