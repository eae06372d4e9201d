"""Eager torch implementation of this op; any device, no Python loop over turns or rollouts.

Suffixes, all of the whole batch: R rollouts, R1 = R+1 offsets, S states, D = S - R transitions, T turns, N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.kernels.turn_credit.segments import Groups, offsets, prefix_sums, segment_index, window_sums

# Rewards that differ by no more than this many float32 roundings of the largest are the same reward (see
# ``outcome_advantages``).
DUST = 8 * torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class TurnCreditTensors:
    """Credit of a batch, flat, in the dtype and on the device of the log-probabilities.

    Args:
        values_S: ``(S,)`` value V_k of every state (Eq. 6); 0 at each rollout's first.
        deltas_D: ``(S - R,)`` one-step credit delta_k of every transition (Eq. 7); the last of a finished rollout is
            answer generation's.
        rewards_T: ``(T,)`` reward r_k of every tool turn (Eq. 10).
        cu_deltas_R1, cu_turns_R1: ``(R+1,) int32`` offsets of each rollout in ``deltas_D`` and ``rewards_T``.
    """

    values_S: Tensor
    deltas_D: Tensor
    rewards_T: Tensor
    cu_deltas_R1: Tensor
    cu_turns_R1: Tensor


@dataclass(frozen=True, slots=True)
class CreditAndAdvantages:
    """What ``credit_and_advantages`` returns.

    Args:
        credit: values, one-step credit and turn rewards.
        advantages_N: ``(N,)`` advantage of every token, exactly 0 where the policy is not trained.
    """

    credit: TurnCreditTensors
    advantages_N: Tensor


def turn_credit_reference(
    mean_logprobs_S: Tensor,
    cu_states_R1: Tensor,
    n_turns_R: Tensor,
    outcome_advantages_R: Tensor,
    config: CreditConfig,
    n_turns: int,
    longest: int,
) -> TurnCreditTensors:
    """``turn_credit_flat`` on checked arguments; ``n_turns`` in total, ``longest`` = the most turns of a rollout."""
    n_states, n_rollouts = mean_logprobs_S.numel(), n_turns_R.numel()
    states_R = cu_states_R1.diff()
    rollout_D = segment_index(states_R - 1, n_states - n_rollouts)
    from_D = torch.arange(n_states - n_rollouts, device=mean_logprobs_S.device) + rollout_D  # index of S_k
    deltas_D = _pair_credit(mean_logprobs_S[:-1], mean_logprobs_S[1:], config)[from_D]
    if config.form == "linear":
        steps_S = torch.zeros_like(mean_logprobs_S)
        steps_S[from_D + 1] = deltas_D
        position_S = torch.arange(n_states, device=steps_S.device) - cu_states_R1[segment_index(states_R, n_states)]
        values_S = prefix_sums(steps_S, position_S, longest + 2)
    else:
        first_S = torch.repeat_interleave(mean_logprobs_S[cu_states_R1[:-1]], states_R, output_size=n_states)
        values_S = _pair_credit(first_S, mean_logprobs_S, config)

    cu_deltas_R1 = cu_states_R1 - torch.arange(n_rollouts + 1, dtype=torch.int32, device=cu_states_R1.device)
    cu_turns_R1 = offsets(n_turns_R)
    rollout_T = segment_index(n_turns_R, n_turns)
    place_T = torch.arange(n_turns, device=rollout_T.device)
    turn_deltas_T = deltas_D[place_T + (cu_deltas_R1 - cu_turns_R1)[rollout_T]]
    remaining_T = cu_turns_R1[1:][rollout_T] - place_T  # T - k
    rewards_T = _turn_rewards(turn_deltas_T, remaining_T, outcome_advantages_R[rollout_T], longest, config)
    return TurnCreditTensors(values_S, deltas_D, rewards_T, cu_deltas_R1, cu_turns_R1)


def _pair_credit(before: Tensor, after: Tensor, config: CreditConfig) -> Tensor:
    """Credit of going from mean log-probability ``before`` to ``after`` (Eq. 7, Table 5).

    log(d_before / d_after) is written as ±log1p(|gain| / smaller gap): the gain of two close log-probabilities is
    exact, so small credits keep their relative precision, and no gain gives exactly 0.
    """
    gain = after - before
    if config.form == "raw":
        return gain
    gap_before = config.gap_offset - before
    if config.form == "linear":
        return gain / gap_before
    smaller_gap = torch.minimum(gap_before, config.gap_offset - after)
    return torch.copysign(torch.log1p(gain.abs() / smaller_gap), gain)


def _turn_rewards(
    deltas_T: Tensor, remaining_T: Tensor, outcome_advantages_T: Tensor, longest: int, config: CreditConfig
) -> Tensor:
    """Eqs. 8-10. ``remaining_T`` = T - k: turns from this one to the rollout's last, itself included."""
    # Discount factors are made on the host in float64, for horizons up to the longest rollout, and looked up.
    reach = min(max(config.horizon, 1), max(longest, 1))
    powers = config.discount ** np.arange(reach + 1, dtype=np.float64)
    window_T = remaining_T.clamp(max=reach)  # h - k + 1
    if config.horizon == 0:
        dense_T = torch.zeros_like(deltas_T)
    else:
        dense_T = window_sums(deltas_T, remaining_T, longest, config.horizon, config.discount)
        if config.normalize_window:
            normalizer = np.concatenate(([0.0], np.cumsum(powers[:-1])))  # Z of a window of n turns at [n]
            dense_T = dense_T / _look_up(normalizer, window_T, deltas_T)
    fill_T = config.terminal_scale * _look_up(powers, window_T, deltas_T) * outcome_advantages_T
    return torch.where(remaining_T == window_T, dense_T + fill_T, dense_T)  # equal: the window reaches turn T-1


def _look_up(table: np.ndarray, index: Tensor, like: Tensor) -> Tensor:
    return torch.as_tensor(table, dtype=like.dtype, device=like.device)[index]


def outcome_advantages_reference(rewards_R: Tensor, group_ids_R: Tensor, std: str) -> Tensor:
    """``outcome_advantages`` on checked arguments."""
    groups = Groups(group_ids_R)
    low_R, high_R = groups.reduce(rewards_R, torch.minimum), groups.reduce(rewards_R, torch.maximum)
    spread_R = high_R - low_R
    equal_R = spread_R <= DUST * torch.maximum(low_R.abs(), high_R.abs())
    # An advantage does not change with the rewards' zero and unit; in [0, 1] no square can overflow or vanish.
    scaled_R = torch.where(equal_R, 0.0, (rewards_R - low_R) / torch.where(equal_R, 1.0, spread_R))
    centred_R = scaled_R - groups.reduce(scaled_R, torch.add) / groups.size_N
    degrees_R = groups.size_N if std == "population" else (groups.size_N - 1).clamp(min=1)
    std_R = (groups.reduce(centred_R.square(), torch.add) / degrees_R).sqrt()
    return torch.where(equal_R, 0.0, centred_R / torch.where(equal_R, 1.0, std_R))


def token_turns_reference(
    boundaries_S: Tensor, cu_states_R1: Tensor, n_turns_R: Tensor, cu_tokens_R1: Tensor, n_tokens: int, n_turns: int
) -> Tensor:
    """``token_turns_flat`` on checked arguments; ``n_tokens`` and ``n_turns`` in total."""
    n_rollouts = n_turns_R.numel()
    # The starts of turns 0..T-1 and of the answer, b_0..b_T, as places in the flat batch: ascending over the batch.
    rollout_B = segment_index(n_turns_R + 1, n_turns + n_rollouts)
    cu_B = offsets(n_turns_R + 1)
    start_B = torch.arange(n_turns + n_rollouts, device=rollout_B.device) - cu_B[rollout_B]
    start_B = boundaries_S[cu_states_R1[rollout_B] + start_B] + cu_tokens_R1[rollout_B]
    token_N = torch.arange(n_tokens, device=start_B.device, dtype=start_B.dtype)
    rollout_N = segment_index(cu_tokens_R1.diff(), n_tokens)
    return torch.searchsorted(start_B, token_N, right=True) - cu_B[rollout_N] - 1


def token_advantages_reference(
    token_turns_N: Tensor,
    loss_mask_N: Tensor,
    cu_tokens_R1: Tensor,
    turn_rewards_T: Tensor,
    cu_turns_R1: Tensor,
    outcome_advantages_R: Tensor,
    group_ids_R: Tensor,
    config: AdvantageConfig,
) -> Tensor:
    """``token_advantages_flat`` on checked arguments."""
    n_rollouts, n_turns, n_tokens = group_ids_R.numel(), turn_rewards_T.numel(), token_turns_N.numel()
    rollout_N = segment_index(cu_tokens_R1.diff(), n_tokens)
    rollout_T = segment_index(cu_turns_R1.diff(), n_turns)
    is_answer_N = loss_mask_N & (token_turns_N == cu_turns_R1.diff()[rollout_N])
    answer_length_R = torch.zeros_like(group_ids_R, dtype=torch.int64).index_add_(0, rollout_N, is_answer_N.long())
    outcome_R = config.alpha_out * outcome_advantages_R

    # One entry a rollout's turn and one for its answer, in order: what a policy token of that turn gets.
    entry_R = cu_turns_R1 + torch.arange(n_rollouts + 1, device=cu_turns_R1.device)
    table = turn_rewards_T.new_zeros(n_turns + n_rollouts)
    table[torch.arange(n_turns, device=rollout_T.device) + rollout_T] = (
        outcome_R[rollout_T] + config.alpha_turn * turn_rewards_T
    )
    table[entry_R[1:] - 1] = outcome_R * _answer_weights(answer_length_R, group_ids_R, config, table.dtype)
    trained_N = loss_mask_N & (token_turns_N >= 0)  # a prompt token is never trained, whatever the mask says
    entry_N = torch.where(trained_N, entry_R[rollout_N] + token_turns_N, 0)
    return torch.where(trained_N, table[entry_N], 0.0) if n_tokens else table.new_zeros(0)


def _answer_weights(
    answer_length_R: Tensor, group_ids_R: Tensor, config: AdvantageConfig, dtype: torch.dtype
) -> Tensor:
    """Answer-tail weight of each rollout; 0 for one without an answer."""
    has_answer_R = answer_length_R > 0
    if config.answer_tail == "off":
        return torch.zeros_like(answer_length_R, dtype=dtype)
    if config.answer_tail == "constant":
        return config.answer_tail_scale * has_answer_R.to(dtype)
    groups = Groups(group_ids_R)
    total_R = groups.reduce(answer_length_R, torch.add).to(dtype)
    mean_R = total_R / groups.reduce(has_answer_R.long(), torch.add).clamp(min=1)
    return config.answer_tail_scale * mean_R / answer_length_R.clamp(min=1) * has_answer_R
