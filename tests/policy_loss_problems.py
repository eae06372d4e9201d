"""Batches for the tests of policy_loss's implementations, and the objective recomputed with NumPy loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trace_fast.kernels.policy_loss import PolicyLoss, PolicyLossConfig, PolicyLossMetrics, policy_loss

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
ODD_LENGTHS = (5, 0, 300, 1, 1023, 63, 2, 1300)
CONFIGS = {
    "paper": PolicyLossConfig(),
    "grpo": PolicyLossConfig.grpo(),
    "dapo": PolicyLossConfig.dapo(tis_cap=2.0),
    "dr_grpo": PolicyLossConfig.dr_grpo(divisor=100.0),
    "gspo": PolicyLossConfig.gspo(),
    "gspo tis": PolicyLossConfig.gspo(tis_cap=1.5),
    "low limit": PolicyLossConfig(max_log_ratio=0.1),
    "no clip": PolicyLossConfig(clip_low=0.0, clip_high=0.0, aggregation="token_mean"),
}


@dataclass
class Batch:
    """Arguments of ``policy_loss``; a masked token holds NaN or an infinity in every tensor."""

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    sampler_logprobs_N: Tensor
    advantages_N: Tensor
    mask_N: Tensor
    cu_tokens_R1: Tensor

    def to(self, dtype: torch.dtype) -> Batch:
        floats = (self.logprobs_N, self.old_logprobs_N, self.sampler_logprobs_N, self.advantages_N)
        return Batch(*(x.to(dtype) for x in floats), self.mask_N, self.cu_tokens_R1)

    def part(self, first: int, last: int) -> Batch:
        """Rollouts first..last-1."""
        a, b = int(self.cu_tokens_R1[first]), int(self.cu_tokens_R1[last])
        tensors = (self.logprobs_N, self.old_logprobs_N, self.sampler_logprobs_N, self.advantages_N, self.mask_N)
        return Batch(*(x[a:b] for x in tensors), self.cu_tokens_R1[first : last + 1] - a)


def batch(
    dtype: torch.dtype, lengths: Sequence[int] = ODD_LENGTHS, seed: int = 0, spread: float = 0.25, kept: float = 0.6
) -> Batch:
    random = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def normal(scale: float) -> Tensor:
        return torch.randn(n, generator=random, dtype=torch.float64) * scale

    old = -torch.empty(n, dtype=torch.float64).exponential_(1.0, generator=random)
    made = Batch(
        old + normal(spread),
        old,
        old + normal(2 * spread),
        normal(1.0),
        torch.rand(n, generator=random) < kept,
        torch.tensor([0, *np.cumsum(np.array(lengths, dtype=np.int64)).tolist()]),
    ).to(dtype)
    junk = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    for tensor in (made.logprobs_N, made.old_logprobs_N, made.sampler_logprobs_N, made.advantages_N):
        tensor[~made.mask_N] = junk[torch.randint(0, 3, (int((~made.mask_N).sum()),), generator=random)]
    return made


def run(problem: Batch, config: PolicyLossConfig, backend: str, **more: Any) -> tuple[PolicyLoss, Tensor]:
    """The op and the gradient by the log-probabilities."""
    logprobs_N = problem.logprobs_N.clone().requires_grad_()
    result = policy_loss(
        logprobs_N,
        problem.old_logprobs_N,
        problem.advantages_N,
        problem.mask_N,
        problem.cu_tokens_R1,
        config,
        sampler_logprobs_N=None if config.tis_cap is None else problem.sampler_logprobs_N,
        backend=backend,
        **more,
    )
    result.loss.backward()
    assert logprobs_N.grad is not None
    return result, logprobs_N.grad


def by_hand(problem: Batch, config: PolicyLossConfig) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, gradient and means from the formulas, a token at a time, in float64."""
    problem = problem.to(torch.float64)
    new, old, sampler, advantage, mask, cu = (
        x.numpy()
        for x in (
            problem.logprobs_N,
            problem.old_logprobs_N,
            problem.sampler_logprobs_N,
            problem.advantages_N,
            problem.mask_N,
            problem.cu_tokens_R1,
        )
    )
    spans = [np.flatnonzero(mask[a:b]) + a for a, b in pairwise(cu)]
    spans = [span for span in spans if len(span)]
    loss, grad = 0.0, np.zeros(len(new))
    low_clips, high_clips, kls, ratios, weights, capped = [], [], [], [], [], []
    for span in spans:
        factor = {
            "rollout_mean": 1 / (len(spans) * len(span)),
            "token_mean": 1 / sum(len(s) for s in spans),
            "constant": 1 / (len(spans) * (config.divisor or math.nan)),
        }[config.aggregation]
        mean = float(np.mean(new[span] - old[span]))
        for i in span:
            x = mean if config.ratio == "sequence" else new[i] - old[i]
            ratio = math.exp(min(x, config.max_log_ratio))
            inside = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            tis = 1.0
            if config.tis_cap is not None:
                tis = min(math.exp(old[i] - sampler[i]), config.tis_cap)
                capped.append(math.exp(old[i] - sampler[i]) > config.tis_cap)
            loss -= factor * tis * min(ratio * advantage[i], inside * advantage[i])
            low_clips.append(ratio < 1 - config.clip_low and advantage[i] < 0)
            high_clips.append(ratio > 1 + config.clip_high and advantage[i] > 0)
            if not (low_clips[-1] or high_clips[-1] or x > config.max_log_ratio):
                grad[i] = -factor * tis * ratio * advantage[i]
            kls.append(ratio - 1 - min(x, config.max_log_ratio))
            ratios.append(ratio)
            weights.append(tis)
    ordered = sorted(ratios)
    return (
        loss,
        grad,
        {
            "n_tokens": float(len(ratios)),
            "clip_low_fraction": float(np.mean(low_clips)),
            "clip_high_fraction": float(np.mean(high_clips)),
            "approx_kl": float(np.mean(kls)),
            "ratio_mean": float(np.mean(ratios)),
            "ratio_min": ordered[0],
            "ratio_max": ordered[-1],
            "ratio_q01": ordered[max(math.ceil(0.01 * len(ordered)), 1) - 1],
            "ratio_q50": ordered[max(math.ceil(0.50 * len(ordered)), 1) - 1],
            "ratio_q99": ordered[max(math.ceil(0.99 * len(ordered)), 1) - 1],
            "tis_mean": float(np.mean(weights)),
            "tis_clipped_fraction": float(np.mean(capped)) if capped else 0.0,
        },
    )


def check_metrics(got: PolicyLossMetrics, wanted: dict[str, float], unit: float, exact_quantiles: bool) -> None:
    """Means to ``unit`` times what a float32 or float64 ratio can be off; quantiles to their bins (``metrics.py``)."""
    for name, value in wanted.items():
        found = float(getattr(got, name))
        if name.startswith("ratio_q") and not exact_quantiles:
            size = abs(math.log(value))
            assert abs(math.log(found) - math.log(value)) <= size / 15 + 2.0**-27 + 8 * unit, name
        elif name.endswith("fraction") or name == "n_tokens":
            assert found == value or abs(found - value) <= 2**-52, name  # counts over a count
        else:
            assert abs(found - value) <= 16 * unit * (1 + abs(value)), (name, found, value)
