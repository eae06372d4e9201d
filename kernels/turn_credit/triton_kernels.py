"""The Triton kernels of turn_credit; ``triton_impl`` launches them and says what they do as a whole.

Addresses are 64-bit and held within their tensors, whatever the offsets say.

Suffixes: R rollouts, R1 = R+1, S states, D = S - R transitions, T turns (in total), N tokens; K turns and B tokens of a
program's blocks.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _quotient(x, y):
    """x / y, rounded: in float32 the operator may be off by two units."""
    return tl.div_rn(x, y) if x.dtype == tl.float32 else x / y


@triton.jit
def _log1p(x):
    """log(1 + x), x >= 0: log(u) is corrected by x / (u - 1), u = the rounded 1 + x, so a small x keeps its digits."""
    u = 1.0 + x
    change = tl.where(u == 1.0, 1.0, u - 1.0)
    return tl.where(u == 1.0, x, tl.log(u) * _quotient(x, change))


@triton.jit
def _pair_credit(before, after, gap_offset, FORM: tl.constexpr):
    """Credit of going from one mean log-probability to the next; see ``reference._pair_credit``."""
    gain = after - before
    if FORM == 1:
        return gain
    gap_before = gap_offset - before
    if FORM == 2:
        return _quotient(gain, gap_before)
    size = _log1p(_quotient(tl.abs(gain), tl.minimum(gap_before, gap_offset - after)))
    return tl.where(gain < 0, -size, size)


@triton.jit
def _load_scores(mean_logprobs_S, place, inside, poison):
    """Scores; what is no log-probability becomes NaN."""
    score = tl.load(mean_logprobs_S + place, mask=inside, other=0.0)
    valid = (score <= 0) & (score > float("-inf"))
    return tl.where(valid, score, float("nan")) + poison


# Sizes are no part of a kernel's identity: a batch of another size, or of size 1, must not compile again.
@triton.jit(do_not_specialize=["n_states", "n_tokens"])
def answer_length_kernel(
    boundaries_S,
    cu_states_R1,
    n_turns_R,
    loss_mask_N,
    cu_tokens_R1,
    answer_length_R,
    n_states,
    n_tokens,
    BLOCK: tl.constexpr,
):
    """Policy tokens of each rollout's answer. Grid (R,)."""
    r = tl.program_id(0).to(tl.int64)
    place = tl.load(cu_states_R1 + r).to(tl.int64) + tl.load(n_turns_R + r).to(tl.int64)
    place = tl.minimum(tl.maximum(place, 0), n_states - 1)
    begin = tl.load(cu_tokens_R1 + r).to(tl.int64) + tl.load(boundaries_S + place).to(tl.int64)
    begin = tl.maximum(begin, 0)
    end = tl.minimum(tl.load(cu_tokens_R1 + r + 1).to(tl.int64), n_tokens)
    count_B = tl.zeros((BLOCK,), tl.int32)
    for start in range(begin, end, BLOCK):
        token_B = start + tl.arange(0, BLOCK)
        count_B += tl.load(loss_mask_N + token_B, mask=token_B < end, other=0).to(tl.int32)
    tl.store(answer_length_R + r, tl.sum(count_B).to(tl.int64))


@triton.jit(do_not_specialize=["n_states", "n_rollouts", "total_turns", "n_tokens", "horizon"])
def credit_kernel(
    mean_logprobs_S,
    cu_states_R1,
    n_turns_R,
    cu_turns_R1,
    outcome_advantages_R,
    boundaries_S,
    loss_mask_N,
    cu_tokens_R1,
    answer_weight_R,
    values_S,
    deltas_D,
    rewards_T,
    advantages_N,
    n_states,
    n_rollouts,
    total_turns,
    n_tokens,
    horizon,
    DISCOUNT: tl.constexpr,
    GAP_OFFSET: tl.constexpr,
    TERMINAL_SCALE: tl.constexpr,
    ALPHA_OUT: tl.constexpr,
    ALPHA_TURN: tl.constexpr,
    FORM: tl.constexpr,
    NORMALIZE: tl.constexpr,
    WITH_TOKENS: tl.constexpr,
    BLOCK_TURNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Values, deltas, rewards of rollout ``program_id(0)``, and the advantages of its share ``program_id(1)``."""
    dtype = mean_logprobs_S.dtype.element_ty
    r = tl.program_id(0).to(tl.int64)
    gap_offset = tl.full((), GAP_OFFSET, dtype)
    state0 = tl.load(cu_states_R1 + r).to(tl.int64)
    state1 = tl.load(cu_states_R1 + r + 1).to(tl.int64)
    turn0 = tl.load(cu_turns_R1 + r).to(tl.int64)
    turns = tl.load(n_turns_R + r).to(tl.int64)
    # Held within the tensors; what had to be held, or contradicts itself, is marked by NaN below.
    states = state1 - state0
    sound = (state0 >= 0) & (states >= 1) & (state1 <= n_states) & ((states - turns == 1) | (states - turns == 2))
    sound = sound & (turns >= 0) & (turn0 >= 0) & (turn0 + turns <= total_turns)
    state0 = tl.minimum(tl.maximum(state0, 0), n_states)
    states = tl.minimum(tl.maximum(states, 0), n_states - state0)
    turn0 = tl.minimum(tl.maximum(turn0, 0), total_turns)
    turns = tl.minimum(tl.minimum(tl.maximum(turns, 0), tl.maximum(states - 1, 0)), total_turns - turn0)
    poison = tl.where(sound, 0.0, float("nan")).to(dtype)
    outcome = tl.load(outcome_advantages_R + r)

    first = _load_scores(mean_logprobs_S, state0, states > 0, poison)
    running = tl.zeros((), dtype)
    for k0 in range(0, states, BLOCK_TURNS):
        k_K = k0 + tl.arange(0, BLOCK_TURNS)
        here_K = _load_scores(mean_logprobs_S, state0 + k_K, k_K < states, poison)
        next_K = _load_scores(mean_logprobs_S, state0 + k_K + 1, k_K + 1 < states, poison)
        delta_K = _pair_credit(here_K, next_K, gap_offset, FORM)
        if FORM == 2:
            step_K = tl.where(k_K + 1 < states, delta_K, 0.0)
            value_K = running + (tl.cumsum(step_K, 0) - step_K)
            running += tl.sum(step_K)
        else:
            value_K = _pair_credit(first, here_K, gap_offset, FORM)
        tl.store(values_S + state0 + k_K, value_K, mask=k_K < states)
        delta_place = state0 - r + k_K
        inside = (k_K + 1 < states) & (delta_place >= 0) & (delta_place < n_states - n_rollouts)
        tl.store(deltas_D + delta_place, delta_K, mask=inside)
    tl.debug_barrier()  # the deltas are read back by other threads

    window = tl.minimum(tl.maximum(horizon, 1).to(tl.int64), tl.maximum(turns, 1))
    for k0 in range(0, turns, BLOCK_TURNS):
        k_K = k0 + tl.arange(0, BLOCK_TURNS)
        remaining_K = turns - k_K
        dense_K = tl.zeros((BLOCK_TURNS,), dtype)
        total_K = tl.zeros((BLOCK_TURNS,), dtype)
        fill_K = tl.zeros((BLOCK_TURNS,), dtype)
        power = tl.full((), 1.0, tl.float64)  # discount^j
        for j in range(window):
            if horizon > 0:
                place = state0 - r + k_K + j
                inside = (j < remaining_K) & (place >= 0) & (place < n_states - n_rollouts)
                dense_K += power.to(dtype) * tl.load(deltas_D + place, mask=inside, other=0.0)
                total_K += tl.where(inside, power.to(dtype), 0.0)
            power = power * tl.full((), DISCOUNT, tl.float64)
            fill_K = tl.where(remaining_K == j + 1, power.to(dtype), fill_K)
        if NORMALIZE:
            dense_K = dense_K / tl.where(total_K > 0, total_K, 1.0)
        reward_K = dense_K + tl.full((), TERMINAL_SCALE, dtype) * fill_K * outcome + poison
        tl.store(rewards_T + turn0 + k_K, reward_K, mask=k_K < turns)

    if WITH_TOKENS:
        tl.debug_barrier()  # and so are the rewards
        token0 = tl.load(cu_tokens_R1 + r).to(tl.int64)
        length = tl.load(cu_tokens_R1 + r + 1).to(tl.int64) - token0
        poison = tl.where(sound & (token0 >= 0) & (length >= 0) & (token0 + length <= n_tokens), 0.0, float("nan"))
        token0 = tl.minimum(tl.maximum(token0, 0), n_tokens)
        length = tl.minimum(tl.maximum(length, 0), n_tokens - token0)
        outcome = tl.full((), ALPHA_OUT, dtype) * outcome + poison.to(dtype)
        answer = outcome * tl.load(answer_weight_R + r).to(dtype)
        stride = tl.num_programs(1).to(tl.int64) * BLOCK_TOKENS
        for start in range(tl.program_id(1).to(tl.int64) * BLOCK_TOKENS, length, stride):
            token_B = start + tl.arange(0, BLOCK_TOKENS)
            mask_B = token_B < length
            # Boundaries b_0..b_T that are at or before the token: a bisection for the first one behind it.
            low_B = tl.zeros((BLOCK_TOKENS,), tl.int64)
            high_B = tl.zeros((BLOCK_TOKENS,), tl.int64) + tl.minimum(turns + 1, states)
            gap = tl.minimum(turns + 1, states)
            while gap > 0:
                middle_B = (low_B + high_B) // 2
                open_B = low_B < high_B
                boundary_B = tl.load(boundaries_S + state0 + middle_B, mask=open_B & mask_B, other=0)
                before_B = boundary_B.to(tl.int64) <= token_B
                low_B = tl.where(open_B & before_B, middle_B + 1, low_B)
                high_B = tl.where(open_B & (before_B == 0), middle_B, high_B)
                gap = gap // 2
            turn_B = low_B - 1
            trained_B = mask_B & (turn_B >= 0)
            trained_B = trained_B & (tl.load(loss_mask_N + token0 + token_B, mask=mask_B, other=0) != 0)
            in_turn_B = trained_B & (turn_B < turns)
            reward_B = tl.load(rewards_T + turn0 + turn_B, mask=in_turn_B, other=0.0)
            advantage_B = tl.where(in_turn_B, outcome + tl.full((), ALPHA_TURN, dtype) * reward_B, answer)
            tl.store(advantages_N + token0 + token_B, tl.where(trained_B, advantage_B, 0.0), mask=mask_B)
