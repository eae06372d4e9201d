"""Metrics of the policy loss, and how the compiled implementations make them from sums and a histogram.

Quantiles need an order of all ratios; counting log ratios in bins gives them in the same pass. A bin holds one sign and
an eighth of an octave of |log ratio|, so a quantile's log ratio is off by at most a 16th of itself (and 2^-27, where
the bins end): for a ratio of 1.2 that is 1.1 %. The reference sorts, and is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BINS, BINS_PER_OCTAVE, LOWEST_EXPONENT = 512, 8, -27  # csrc/cpu/policy_loss.h
QUANTILES = (0.01, 0.50, 0.99)
# Places in the sums, csrc/cpu/policy_loss.h.
LOSS, TOKENS, CLIPPED_LOW, CLIPPED_HIGH, KL, RATIO, TIS, TIS_CLIPPED, MIN_LOG_RATIO, MAX_LOG_RATIO = range(10)
SUMS = 10


@dataclass(frozen=True, slots=True)
class PolicyLossMetrics:
    """Of the trained tokens of this call; float64 scalars on its device, NaN (but ``n_tokens``) where there are none.

    Args:
        n_tokens: trained tokens, to weigh the metrics of several calls.
        clip_low_fraction: share of tokens without gradient because their ratio is below 1 - clip_low at a negative
            advantage; ``clip_high_fraction``: above 1 + clip_high at a positive one.
        approx_kl: mean of ratio - 1 - log ratio, which estimates KL(old ‖ current) in nats and is never negative.
        ratio_mean, ratio_min, ratio_max: of exp(current - old), or of the sequence ratio, cut at ``max_log_ratio``.
        ratio_q01, ratio_q50, ratio_q99: the smallest ratio that at least that share of the tokens does not exceed.
        tis_mean, tis_clipped_fraction: weight of truncated importance sampling, and share of tokens at the cap; 1 and
            0 when it is off.
    """

    n_tokens: Tensor
    clip_low_fraction: Tensor
    clip_high_fraction: Tensor
    approx_kl: Tensor
    ratio_mean: Tensor
    ratio_min: Tensor
    ratio_max: Tensor
    ratio_q01: Tensor
    ratio_q50: Tensor
    ratio_q99: Tensor
    tis_mean: Tensor
    tis_clipped_fraction: Tensor


N_METRICS = 12


def metrics_from_sums(sums: Tensor, histogram: Tensor) -> Tensor:
    """``(N_METRICS,) float64`` in the order of ``PolicyLossMetrics``, without waiting for a device.

    Args:
        sums: ``(SUMS,)`` float64.
        histogram: ``(BINS,)`` int64 counts of trained tokens by log ratio.
    """
    n_tokens = sums[TOKENS]  # slices and scalars only: an index list would be copied to the device
    means = torch.where(n_tokens > 0, sums[CLIPPED_LOW : TIS_CLIPPED + 1] / n_tokens, math.nan)
    extremes = torch.where(n_tokens > 0, sums[MIN_LOG_RATIO : MAX_LOG_RATIO + 1], math.nan)
    below_B = histogram.cumsum(0)
    ranks = torch.stack([n_tokens * share for share in QUANTILES]).ceil().clamp(min=1).long()
    middles = bin_middle(torch.searchsorted(below_B, ranks).clamp(max=BINS - 1))
    quantiles = torch.minimum(torch.maximum(middles, extremes[0]), extremes[1])
    low, high, kl, ratio, tis, tis_clipped = means
    ends = torch.stack((extremes[0], extremes[1], *quantiles)).exp()
    return torch.cat((torch.stack((n_tokens, low, high, kl, ratio)), ends, torch.stack((tis, tis_clipped))))


def bin_middle(bin: Tensor) -> Tensor:
    """float64 log ratio in the middle of each bin (int64)."""
    step = torch.where(bin >= BINS // 2, bin - BINS // 2, BINS // 2 - 1 - bin)
    octave = step // BINS_PER_OCTAVE + LOWEST_EXPONENT
    size = (1 + (step % BINS_PER_OCTAVE + 0.5).double() / BINS_PER_OCTAVE) * torch.exp2(octave.double())
    return torch.where(bin >= BINS // 2, size, -size)
