"""The equations of TRACE, one after the other, for one rollout: slow, plain, and what all the fast code must equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trace_fast.config import CreditConfig
from trace_fast.errors import TraceFastError

__all__ = ["ReferenceCredit", "reference_credit"]


class ReferenceCredit(NamedTuple):
    """``values (S,)``, ``deltas (S-1,)``, ``rewards (T,)``, all float64, in nats."""

    values: np.ndarray
    deltas: np.ndarray
    rewards: np.ndarray


def reference_credit(
    mean_logprobs: Sequence[float] | np.ndarray,
    n_turns: int,
    outcome_advantage: float | None = None,
    config: CreditConfig | None = None,
) -> ReferenceCredit:
    """Turn credit of one rollout by Eqs. 6-10 and Algorithm 1, with explicit loops.

    Args:
        mean_logprobs: ``(S,)`` score of each state (Eq. 5), nats, <= 0; S = T+1 (cut off) or T+2 (finished).
        n_turns: T.
        outcome_advantage: A_out; ``None`` leaves the terminal term out.
        config: the paper's values when ``None``.

    Raises:
        TraceFastError: (a ``ValueError``) S does not fit T, or a score is not a finite number <= 0.
    """
    config = config or CreditConfig()
    scores = [float(score) for score in mean_logprobs]
    states, eps = len(scores), config.gap_offset
    if n_turns < 0 or states not in (n_turns + 1, n_turns + 2):
        raise TraceFastError(f"mean_logprobs: expected T+1 or T+2 states for T = {n_turns}, got {states}")
    for k, score in enumerate(scores):
        if not (math.isfinite(score) and score <= 0):
            raise TraceFastError(f"mean_logprobs: expected finite numbers <= 0, got {score} at [{k}]")

    gaps = [-score + eps for score in scores]  # d_k

    deltas = np.zeros(states - 1)  # Eq. 7 and the other forms of Table 5
    for k in range(states - 1):
        if config.form == "log_ratio":
            deltas[k] = math.log(gaps[k] / gaps[k + 1])
        elif config.form == "raw":
            deltas[k] = scores[k + 1] - scores[k]
        else:
            deltas[k] = (scores[k + 1] - scores[k]) / gaps[k]

    values = np.zeros(states)  # Eq. 6; the linear form has no endpoint form, so its values are running sums
    for k in range(1, states):
        if config.form == "log_ratio":
            values[k] = math.log(gaps[0] / gaps[k])
        elif config.form == "raw":
            values[k] = scores[k] - scores[0]
        else:
            values[k] = values[k - 1] + deltas[k - 1]

    rewards = np.zeros(n_turns)
    last = n_turns - 1
    for k in range(n_turns):
        if config.horizon == 0:  # the dense backup is switched off; Eq. 9 is not defined there
            end, dense = k, 0.0
        else:
            end = min(k + config.horizon - 1, last)  # Eq. 8
            dense = sum(config.discount ** (u - k) * deltas[u] for u in range(k, end + 1))  # Eq. 9
            if config.normalize_window:
                dense /= sum(config.discount ** (u - k) for u in range(k, end + 1))
        rewards[k] = dense
        if end == last and outcome_advantage is not None:  # Eq. 10
            rewards[k] += config.terminal_scale * config.discount ** (n_turns - k) * outcome_advantage
    return ReferenceCredit(values, deltas, rewards)
