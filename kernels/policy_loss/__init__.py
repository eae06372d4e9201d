"""policy_loss: the clipped objective of Eq. 12 over the tokens of a batch, its gradient and its metrics.

With the current, the old and the sampler's log-probability l, l_old, l_smp of a trained token t of rollout r (nats),
its advantage A and the weight w_r of its rollout (``weights.py``):

    x = l - l_old, or the mean of that over the rollout's trained tokens (``ratio="sequence"``)
    ratio = exp(min(x, max_log_ratio))
    gain = min(ratio · A, clip(ratio, 1 - clip_low, 1 + clip_high) · A)
    loss = -sum_t w_r · min(exp(l_old - l_smp), tis_cap) · gain
    d loss / d l = -w_r · min(exp(l_old - l_smp), tis_cap) · ratio · A, or 0 where the token is clipped

The gradient is with respect to ``logprobs_N`` only. A token that the mask leaves out has no part in anything: whatever
stands there (NaN, infinity) is replaced before the first operation, so that no 0 · infinity arises.

Contents are checked on the CPU; on a CUDA device that would wait for it, so there a number that is not finite makes the
loss NaN, and offsets that are out of order lose tokens but never read outside the tensors.

Suffixes: N tokens of all rollouts, R rollouts, R1 = R+1 offsets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trace_fast.errors import ConfigError, TraceFastError
from trace_fast.kernels.common.checks import why_not_implementation
from trace_fast.kernels.common.derivatives import refuse_tangents
from trace_fast.kernels.policy_loss.checks import check_arguments, check_contents
from trace_fast.kernels.policy_loss.config import PolicyLossConfig
from trace_fast.kernels.policy_loss.metrics import PolicyLossMetrics
from trace_fast.kernels.policy_loss.reference import policy_loss_reference
from trace_fast.kernels.policy_loss.weights import BatchCounts

IMPLEMENTATIONS = ("reference", "native", "triton")

__all__ = [
    "IMPLEMENTATIONS",
    "BatchCounts",
    "PolicyLoss",
    "PolicyLossConfig",
    "PolicyLossMetrics",
    "policy_loss",
    "why_not",
]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """``loss``: scalar in the log-probabilities' dtype, to call ``backward`` on; ``metrics`` carry no gradient."""

    loss: Tensor
    metrics: PolicyLossMetrics


@torch.compiler.assume_constant_result  # what a machine can run does not change while a graph is traced
def why_not(name: str, *, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why implementation ``name`` cannot run tensors of this device and dtype here; ``None`` when it can."""
    return why_not_implementation(__name__, IMPLEMENTATIONS, name, device, dtype)


def policy_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    mask_N: Tensor,
    cu_tokens_R1: Tensor,
    config: PolicyLossConfig,
    *,
    sampler_logprobs_N: Tensor | None = None,
    counts: BatchCounts | None = None,
    backend: str = "reference",
) -> PolicyLoss:
    """The policy loss of a batch or of a part of one.

    Args:
        logprobs_N: ``(N,)`` float32 or float64 log-probability of each token under the policy in training.
        old_logprobs_N: ``(N,)`` same dtype, under the policy as it was when the batch began; a constant.
        advantages_N: ``(N,)`` same dtype.
        mask_N: ``(N,)`` bool, True where the policy wrote the token and it is trained. Observations of tools, prompts
            and padding are False; denominators count True only.
        cu_tokens_R1: ``(R+1,)`` int32 or int64 offsets of the rollouts.
        sampler_logprobs_N: ``(N,)`` same dtype, from the engine that sampled the tokens; needed with ``tis_cap``.
        counts: the whole batch's denominators, where this call sees a part of it; micro-batches then sum to the whole.
        backend: a name of ``IMPLEMENTATIONS``.

    Raises:
        TraceFastError: (a ``ValueError``) a wrong dtype, device, length or layout, offsets out of order, denominators
            that are too small, a number at a trained token that is not finite; it names the tensor.
        ConfigError: (a ``TraceFastError``) the implementation cannot run here, or ``tis_cap`` and the sampler's
            log-probabilities do not come together.
    """
    counts = counts or BatchCounts()
    check_arguments(
        logprobs_N,
        old_logprobs_N,
        advantages_N,
        mask_N,
        cu_tokens_R1,
        sampler_logprobs_N,
        counts.tokens_per_rollout_R,
        config,
    )
    reason = why_not(backend, device=logprobs_N.device, dtype=logprobs_N.dtype)
    if reason is not None:
        raise ConfigError(f"policy_loss: backend {backend!r} cannot run: {reason}")
    if logprobs_N.device.type == "cpu" and backend != "native":  # the C++ code checks what it reads
        check_contents(
            mask_N,
            cu_tokens_R1,
            logprobs_N=logprobs_N.detach(),
            old_logprobs_N=old_logprobs_N,
            sampler_logprobs_N=sampler_logprobs_N,
            advantages_N=advantages_N,
        )
    arguments = (
        logprobs_N,
        old_logprobs_N.detach(),
        None if sampler_logprobs_N is None else sampler_logprobs_N.detach(),
        advantages_N.detach(),
        mask_N,
        cu_tokens_R1,
        _scalar("n_tokens", counts.n_tokens, logprobs_N),
        _scalar("n_rollouts", counts.n_rollouts, logprobs_N),
        counts.tokens_per_rollout_R,
    )
    if backend == "reference":
        loss, metrics = policy_loss_reference(*arguments, config)
    else:
        refuse_tangents("policy_loss", backend, logprobs_N=logprobs_N)
        loss, _, metrics = getattr(torch.ops.trace_fast, f"policy_loss_{backend}")(
            *arguments,
            config.ratio,
            config.clip_low,
            config.clip_high,
            config.max_log_ratio,
            config.tis_cap,
            config.aggregation,
            config.divisor,
        )
    return PolicyLoss(loss, PolicyLossMetrics(*metrics.detach().unbind()))


def _scalar(name: str, value: int | Tensor | None, like: Tensor) -> Tensor | None:
    """A count as an integer scalar on the tensors' device, made there without a copy from the host."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=torch.int64, device=like.device)
    if value.numel() != 1 or value.dtype not in (torch.int32, torch.int64) or value.device != like.device:
        raise TraceFastError(
            f"{name}: expected an integer or an integer scalar tensor on {like.device}, "
            f"got {value.dtype} of shape {tuple(value.shape)} on {value.device}"
        )
    return value.reshape(())
