"""Eager oracle of policy_loss: torch operations and autograd, any device.

Suffixes: N tokens of all rollouts, R rollouts, R1 = R+1 offsets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_fast.kernels.policy_loss.config import PolicyLossConfig
from trace_fast.kernels.policy_loss.metrics import N_METRICS, QUANTILES
from trace_fast.kernels.policy_loss.weights import check_counts, rollout_weights


def policy_loss_reference(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor | None,
    advantages_N: Tensor,
    mask_N: Tensor,
    cu_tokens_R1: Tensor,
    n_tokens: Tensor | None,
    n_rollouts: Tensor | None,
    tokens_per_rollout_R: Tensor | None,
    config: PolicyLossConfig,
) -> tuple[Tensor, Tensor]:
    """Loss and the ``(N_METRICS,)`` metrics, on checked arguments; see ``policy_loss``."""
    n_rollouts_here = cu_tokens_R1.numel() - 1
    rollout_N = torch.repeat_interleave(
        torch.arange(n_rollouts_here, device=mask_N.device), cu_tokens_R1.diff().long(), output_size=mask_N.numel()
    )
    n_tokens_R = torch.zeros(n_rollouts_here, dtype=torch.int64, device=mask_N.device)
    n_tokens_R.index_add_(0, rollout_N, mask_N.long())
    if mask_N.device.type == "cpu":
        check_counts(n_tokens_R, n_tokens, n_rollouts, tokens_per_rollout_R, config.ratio)

    # The mask comes before any arithmetic: what stands at a masked token may be anything.
    log_ratio_N = torch.where(mask_N, logprobs_N - old_logprobs_N, 0.0)
    advantages_N = torch.where(mask_N, advantages_N, 0.0)
    if config.ratio == "sequence":
        summed_R = log_ratio_N.new_zeros(n_rollouts_here).index_add(0, rollout_N, log_ratio_N.detach())
        mean_R = summed_R / n_tokens_R.clamp(min=1)
        # The sequence's value with the token's own gradient.
        log_ratio_N = mean_R[rollout_N] + (log_ratio_N - log_ratio_N.detach())
    ratio_N = log_ratio_N.clamp(max=config.max_log_ratio).exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    gain_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    tis_N = torch.ones_like(gain_N)
    if sampler_logprobs_N is not None:
        assert config.tis_cap is not None
        tis_N = torch.where(mask_N, old_logprobs_N - sampler_logprobs_N, 0.0).detach().exp()
        gain_N = gain_N * tis_N.clamp(max=config.tis_cap)
    weight_R = rollout_weights(
        n_tokens_R, config.aggregation, config.divisor, n_tokens, n_rollouts, tokens_per_rollout_R
    )
    loss = -(gain_N * weight_R.to(gain_N.dtype)[rollout_N]).sum()
    cap = config.tis_cap if sampler_logprobs_N is not None else None
    return loss, _metrics(log_ratio_N.detach(), ratio_N.detach(), advantages_N, tis_N, mask_N, low, high, cap, config)


@torch.no_grad()
def _metrics(
    log_ratio_N: Tensor,
    ratio_N: Tensor,
    advantages_N: Tensor,
    tis_N: Tensor,
    mask_N: Tensor,
    low: float,
    high: float,
    cap: float | None,
    config: PolicyLossConfig,
) -> Tensor:
    """In the order of ``PolicyLossMetrics``; waits for the device, because it selects the trained tokens."""
    log_ratio, ratio, advantages, tis = (x[mask_N] for x in (log_ratio_N, ratio_N, advantages_N, tis_N))
    metrics = torch.full((N_METRICS,), float("nan"), dtype=torch.float64, device=mask_N.device)
    count = ratio.numel()
    metrics[0] = count
    if not count:
        return metrics
    ordered = ratio.sort().values
    ranks = [max(int(torch.tensor(count * q, dtype=torch.float64).ceil()), 1) - 1 for q in QUANTILES]
    log_ratio = log_ratio.clamp(max=config.max_log_ratio)
    clipped_tis = torch.zeros_like(tis) if cap is None else (tis > cap).to(tis.dtype)
    values = [
        ((ratio < low) & (advantages < 0)).double().mean(),
        ((ratio > high) & (advantages > 0)).double().mean(),
        (torch.expm1(log_ratio) - log_ratio).double().mean(),
        ratio.double().mean(),
        ordered[0],
        ordered[-1],
        *(ordered[rank] for rank in ranks),
        (tis if cap is None else tis.clamp(max=cap)).double().mean(),
        clipped_tis.double().mean(),
    ]
    metrics[1:] = torch.stack([value.double() for value in values])
    return metrics
