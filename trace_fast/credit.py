"""From the scores of a rollout's states to the credit of its turns (TRACE, Sections 3.2-3.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from trace_fast.backends import fastest
from trace_fast.config import CreditConfig
from trace_fast.errors import RolloutError, TraceFastError
from trace_fast.kernels.turn_credit import outcome_advantages, turn_credit_flat
from trace_fast.rollout_score import RolloutScore

__all__ = ["TurnCredit", "group_outcome_advantages", "outcome_advantages", "turn_credit"]


@dataclass(frozen=True, slots=True, eq=False)
class TurnCredit:
    """Credit of one rollout, in nats. The arrays are read-only.

    Args:
        id, group, n_turns: as in the ``RolloutScore``; T turns, S = T+2 states when finished, T+1 when cut off.
        values: ``(S,) float64`` V_k of each state, 0 at the first.
        deltas: ``(S-1,) float64`` one-step credit delta_k. Entries 0..T-1 belong to the tool turns; a finished rollout
            has one more, which belongs to answer generation and to no turn.
        rewards: ``(T,) float64`` K-step reward r_k of each tool turn.
        outcome_advantage: A_out, or ``None`` where the rollout has no reward; no terminal term was added then.
        secured_at: first state whose mean log-probability reaches ``CreditConfig.secured_threshold``, or ``None``.
    """

    id: str
    group: str
    values: np.ndarray
    deltas: np.ndarray
    rewards: np.ndarray
    outcome_advantage: float | None
    secured_at: int | None
    n_turns: int


def turn_credit(
    scores: Sequence[RolloutScore],
    config: CreditConfig | None = None,
    *,
    outcome_advantages: Sequence[float | None] | None = None,
) -> list[TurnCredit]:
    """Values, one-step credit and K-step rewards of every rollout, in input order, computed in float64.

    The forms of credit and their values are those of ``trace_fast.kernels.turn_credit.turn_credit_flat``.

    Args:
        scores: any number of rollouts; those of a group need not be adjacent.
        config: the paper's values when ``None``.
        outcome_advantages: A_out of each rollout, ``None`` where it is unknown. By default they are computed from the
            scores' own rewards over the groups in ``scores``, among the rollouts that have a reward; so give whole
            groups, or give the advantages.

    Raises:
        RolloutError: kind ``boundary`` when the number of states does not fit T, ``format`` when a reward is NaN or
            infinite.
        TraceFastError: ``outcome_advantages`` has another length than ``scores`` or holds NaN or infinity; a
            log-probability is so large in magnitude that its credit could overflow.
    """
    config = config or CreditConfig()
    if not scores:
        if outcome_advantages:
            raise TraceFastError(f"outcome_advantages: expected 0 entries (one a score), got {len(outcome_advantages)}")
        return []
    n_turns_R = np.array([score.n_turns for score in scores], dtype=np.int64)
    n_states_R = np.array([len(score.mean_logprobs) for score in scores], dtype=np.int64)
    _check_states(scores, n_turns_R, n_states_R)
    cu_states = np.concatenate(([0], np.cumsum(n_states_R)))
    if cu_states[-1] > np.iinfo(np.int32).max:
        raise TraceFastError(f"scores: expected fewer than 2^31 states in one call, got {cu_states[-1]}")
    mean_logprobs_S = np.concatenate([score.mean_logprobs for score in scores], dtype=np.float64)
    if outcome_advantages is None:
        advantages = _from_own_rewards(scores, config.std)
    else:
        advantages = _checked_advantages(scores, outcome_advantages)

    credit = turn_credit_flat(
        torch.from_numpy(mean_logprobs_S),
        torch.from_numpy(cu_states.astype(np.int32)),
        torch.from_numpy(n_turns_R),
        torch.tensor([0.0 if a is None else a for a in advantages], dtype=torch.float64),
        config,
        backend=fastest("turn_credit", torch.device("cpu"), torch.float64),
        total_turns=int(n_turns_R.sum()),
    )
    values, deltas, rewards = credit.values_S.numpy(), credit.deltas_D.numpy(), credit.rewards_T.numpy()
    for array in (values, deltas, rewards):
        array.setflags(write=False)  # the rollouts' arrays are slices of these
    cu_deltas, cu_turns = credit.cu_deltas_R1.tolist(), credit.cu_turns_R1.tolist()
    cu = cu_states.tolist()
    secured = _first_secured(mean_logprobs_S, cu_states, config.secured_threshold)
    return [
        TurnCredit(
            score.id,
            score.group,
            values[cu[i] : cu[i + 1]],
            deltas[cu_deltas[i] : cu_deltas[i + 1]],
            rewards[cu_turns[i] : cu_turns[i + 1]],
            advantages[i],
            secured[i],
            score.n_turns,
        )
        for i, score in enumerate(scores)
    ]


def group_outcome_advantages(
    rewards: Sequence[float | None],
    groups: Sequence[str],
    std: Literal["population", "sample"] = "population",
) -> list[float | None]:
    """A_out of each rollout from rewards and group names; ``None`` in, ``None`` out.

    Mean and standard deviation of a group are over its members that have a reward. What counts as equal rewards, and
    what groups of one get, is said in ``trace_fast.kernels.turn_credit.outcome_advantages``.

    Raises:
        TraceFastError: the lengths differ, or a reward is NaN or infinite.
    """
    if len(rewards) != len(groups):
        raise TraceFastError(f"rewards and groups: expected equal lengths, got {len(rewards)} and {len(groups)}")
    present = [i for i, reward in enumerate(rewards) if reward is not None]
    numbers: dict[str, int] = {}
    group_ids = [numbers.setdefault(groups[i], len(numbers)) for i in present]
    computed = outcome_advantages(
        torch.tensor([rewards[i] for i in present], dtype=torch.float64),
        torch.tensor(group_ids, dtype=torch.int64),
        std,
    ).tolist()
    advantages: list[float | None] = [None] * len(rewards)
    for i, advantage in zip(present, computed, strict=True):
        advantages[i] = advantage
    return advantages


def _check_states(scores: Sequence[RolloutScore], n_turns_R: np.ndarray, n_states_R: np.ndarray) -> None:
    extra_R = n_states_R - n_turns_R
    bad = (n_turns_R < 0) | (extra_R < 1) | (extra_R > 2)
    if bad.any():
        i = int(bad.argmax())
        raise RolloutError(
            "boundary",
            f"mean_logprobs: expected T+1 or T+2 states for T = {n_turns_R[i]} turns, got {n_states_R[i]}",
            rollout_id=scores[i].id,
            source=scores[i].source,
        )


def _from_own_rewards(scores: Sequence[RolloutScore], std: Literal["population", "sample"]) -> list[float | None]:
    for score in scores:
        if score.reward is not None and not math.isfinite(score.reward):
            raise RolloutError(
                "format",
                f"reward: expected a finite number, got {score.reward}",
                rollout_id=score.id,
                source=score.source,
            )
    return group_outcome_advantages([score.reward for score in scores], [score.group for score in scores], std)


def _checked_advantages(
    scores: Sequence[RolloutScore], outcome_advantages: Sequence[float | None]
) -> list[float | None]:
    if len(outcome_advantages) != len(scores):
        raise TraceFastError(
            f"outcome_advantages: expected {len(scores)} entries (one a score), got {len(outcome_advantages)}"
        )
    advantages = [None if a is None else float(a) for a in outcome_advantages]
    for score, advantage in zip(scores, advantages, strict=True):
        if advantage is not None and not math.isfinite(advantage):
            raise TraceFastError(f"outcome_advantages: expected finite numbers, got {advantage} for {score.id!r}")
    return advantages


def _first_secured(mean_logprobs_S: np.ndarray, cu_states: np.ndarray, threshold: float) -> list[int | None]:
    """Index within each rollout of its first state at or above the threshold."""
    secured = np.append(np.flatnonzero(mean_logprobs_S >= threshold), len(mean_logprobs_S))
    first = secured[np.searchsorted(secured, cu_states[:-1])]
    within = (first - cu_states[:-1]).tolist()
    return [k if found else None for k, found in zip(within, (first < cu_states[1:]).tolist(), strict=True)]
