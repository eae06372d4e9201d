"""The Triton kernels of policy_loss; ``triton_impl`` launches them and says what they do as a whole.

Addresses are 64-bit and held within their tensors, whatever the offsets say.

Suffixes: N tokens of all rollouts, R rollouts, R1 = R+1 offsets, B tokens of a block; P programs, S sums, H histograms,
B bins of the two scratch tensors.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_tokens"])
def count_kernel(
    logprobs_N,
    old_logprobs_N,
    mask_N,
    cu_tokens_R1,
    n_tokens_R,
    log_ratio_R,
    n_tokens,
    SEQUENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Trained tokens of each rollout and, for the sequence ratio, their mean log ratio. Grid (R,)."""
    dtype = logprobs_N.dtype.element_ty
    r = tl.program_id(0).to(tl.int64)
    begin = tl.maximum(tl.load(cu_tokens_R1 + r).to(tl.int64), 0)
    end = tl.minimum(tl.load(cu_tokens_R1 + r + 1).to(tl.int64), n_tokens)
    count_B = tl.zeros((BLOCK,), tl.int32)
    total_B = tl.zeros((BLOCK,), dtype)
    for start in range(begin, end, BLOCK):
        token_B = start + tl.arange(0, BLOCK)
        trained_B = tl.load(mask_N + token_B, mask=token_B < end, other=0) != 0
        count_B += trained_B.to(tl.int32)
        if SEQUENCE:
            # A masked entry is not even loaded.
            new_B = tl.load(logprobs_N + token_B, mask=trained_B, other=0.0)
            total_B += new_B - tl.load(old_logprobs_N + token_B, mask=trained_B, other=0.0)
    count = tl.sum(count_B)
    tl.store(n_tokens_R + r, count.to(tl.int64))
    if SEQUENCE:
        tl.store(log_ratio_R + r, tl.sum(total_B) / tl.maximum(count, 1).to(dtype))


@triton.jit
def _excess(x, exp_x):
    """exp(x) - 1 - x. Near 0 the difference cancels; there it is the exponential's series from x^2 to x^8."""
    tail = 1 / 120 + x * (1 / 720 + x * (1 / 5040 + x / 40320))
    series = x * x * (0.5 + x * (1 / 6 + x * (1 / 24 + x * tail)))
    return tl.where(tl.abs(x) < 0.1, series, exp_x - 1.0 - x)


@triton.jit(do_not_specialize=["n_tokens"])
def loss_kernel(
    logprobs_N,
    old_logprobs_N,
    sampler_logprobs_N,
    advantages_N,
    mask_N,
    cu_tokens_R1,
    weight_R,
    log_ratio_R,
    grads_N,
    sums_PS,
    histograms_HB,
    n_tokens,
    CLIP_LOW: tl.constexpr,
    CLIP_HIGH: tl.constexpr,
    MAX_RATIO: tl.constexpr,
    TIS_CAP: tl.constexpr,
    SEQUENCE: tl.constexpr,
    WITH_TIS: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    BIN_BASE: tl.constexpr,
    HISTOGRAMS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Gradients and sums of share ``program_id(1)`` of rollout ``program_id(0)``; the order of sums is ``metrics``'."""
    dtype = logprobs_N.dtype.element_ty
    r = tl.program_id(0).to(tl.int64)
    program = r * tl.num_programs(1) + tl.program_id(1)
    begin = tl.maximum(tl.load(cu_tokens_R1 + r).to(tl.int64), 0)
    end = tl.minimum(tl.load(cu_tokens_R1 + r + 1).to(tl.int64), n_tokens)
    weight = tl.load(weight_R + r).to(dtype)
    low = tl.full((), 1.0 - CLIP_LOW, dtype)
    high = tl.full((), 1.0 + CLIP_HIGH, dtype)
    limit = tl.full((), MAX_RATIO, dtype)
    cap = tl.full((), TIS_CAP, dtype)
    loss_B = tl.zeros((BLOCK,), dtype)
    kl_B = tl.zeros((BLOCK,), dtype)
    ratio_sum_B = tl.zeros((BLOCK,), dtype)
    tis_sum_B = tl.zeros((BLOCK,), dtype)
    count_B = tl.zeros((BLOCK,), tl.int32)
    low_B = tl.zeros((BLOCK,), tl.int32)
    high_B = tl.zeros((BLOCK,), tl.int32)
    cut_B = tl.zeros((BLOCK,), tl.int32)
    least_B = tl.full((BLOCK,), float("inf"), dtype)
    most_B = tl.full((BLOCK,), float("-inf"), dtype)
    histogram = tl.zeros((BINS,), tl.int32)
    stride = tl.num_programs(1).to(tl.int64) * BLOCK
    for start in range(begin + tl.program_id(1).to(tl.int64) * BLOCK, end, stride):
        token_B = start + tl.arange(0, BLOCK)
        inside_B = token_B < end
        trained_B = tl.load(mask_N + token_B, mask=inside_B, other=0) != 0
        # A masked entry is not even loaded: all numbers below are those of trained tokens, or zeros.
        old_N = tl.load(old_logprobs_N + token_B, mask=trained_B, other=0.0)
        raw_B = tl.load(logprobs_N + token_B, mask=trained_B, other=0.0) - old_N
        advantage_B = tl.load(advantages_N + token_B, mask=trained_B, other=0.0)
        if SEQUENCE:
            raw_B = tl.where(trained_B, tl.load(log_ratio_R + r) + 0.0 * raw_B, 0.0)
        x_B = tl.where(raw_B > limit, limit, raw_B)  # and NaN stays NaN
        ratio_B = tl.exp(x_B)
        clipped_B = tl.where(ratio_B < low, low, tl.where(ratio_B > high, high, ratio_B))
        free_B = ratio_B * advantage_B
        held_B = clipped_B * advantage_B
        is_low_B = trained_B & (ratio_B < low) & (advantage_B < 0)
        is_high_B = trained_B & (ratio_B > high) & (advantage_B > 0)
        factor = weight
        if WITH_TIS:
            whole_B = tl.exp(old_N - tl.load(sampler_logprobs_N + token_B, mask=trained_B, other=0.0))
            tis_B = tl.where(whole_B > cap, cap, whole_B)
            cut_B += (trained_B & (whole_B > cap)).to(tl.int32)
            tis_sum_B += tl.where(trained_B, tis_B, 0.0)
            factor = weight * tis_B
        gain_B = tl.where(held_B < free_B, held_B, free_B)
        loss_B -= tl.where(trained_B, factor * gain_B, 0.0)
        stopped_B = is_low_B | is_high_B | (raw_B > limit)
        grad_B = tl.where(trained_B & (stopped_B == 0), 0.0 - factor * free_B, 0.0)
        tl.store(grads_N + token_B, grad_B, mask=inside_B)
        count_B += trained_B.to(tl.int32)
        low_B += is_low_B.to(tl.int32)
        high_B += is_high_B.to(tl.int32)
        kl_B += tl.where(trained_B, _excess(x_B, ratio_B), 0.0)
        ratio_sum_B += tl.where(trained_B, ratio_B, 0.0)
        least_B = tl.where(trained_B & (x_B < least_B), x_B, least_B)
        most_B = tl.where(trained_B & (x_B > most_B), x_B, most_B)
        bits_B = tl.abs(raw_B).to(tl.float32).to(tl.int32, bitcast=True)
        step_B = tl.minimum(tl.maximum((bits_B >> 20) - BIN_BASE, 0), BINS // 2 - 1)
        bin_B = tl.where(raw_B < 0, BINS // 2 - 1 - step_B, BINS // 2 + step_B)
        histogram += tl.histogram(bin_B, BINS, mask=trained_B)
    place = histograms_HB + (program % HISTOGRAMS) * BINS + tl.arange(0, BINS)
    tl.atomic_add(place, histogram.to(tl.int64), mask=histogram > 0, sem="relaxed")
    row = sums_PS + program * SUMS
    tl.store(row + 0, tl.sum(loss_B).to(tl.float64))
    tl.store(row + 1, tl.sum(count_B).to(tl.float64))
    tl.store(row + 2, tl.sum(low_B).to(tl.float64))
    tl.store(row + 3, tl.sum(high_B).to(tl.float64))
    tl.store(row + 4, tl.sum(kl_B).to(tl.float64))
    tl.store(row + 5, tl.sum(ratio_sum_B).to(tl.float64))
    tl.store(row + 6, tl.sum(tis_sum_B).to(tl.float64))
    tl.store(row + 7, tl.sum(cut_B).to(tl.float64))
    tl.store(row + 8, tl.min(least_B).to(tl.float64))
    tl.store(row + 9, tl.max(most_B).to(tl.float64))
