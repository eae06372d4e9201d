"""policy_loss in C++ on the CPU (``csrc/cpu/policy_loss.h``), on ``torch.get_num_threads()`` threads.

Loss, gradient and metrics come from one pass over the tokens, computed in float64 and rounded once; the same bits for
any number of threads. Registered as ``trace_fast::policy_loss_native``.

Suffixes: N tokens of all rollouts, R rollouts, R1 = R+1 offsets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trace_fast import native
from trace_fast.errors import TraceFastError
from trace_fast.kernels.common.checks import why_not_native
from trace_fast.kernels.common.derivatives import first_order_only
from trace_fast.kernels.policy_loss.metrics import BINS, LOSS, N_METRICS, SUMS, metrics_from_sums
from trace_fast.kernels.policy_loss.weights import check_counts, rollout_weights

why_not = why_not_native


@torch.library.custom_op("trace_fast::policy_loss_native", mutates_args=(), device_types="cpu")
def policy_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor | None,
    advantages_N: Tensor,
    mask_N: Tensor,
    cu_tokens_R1: Tensor,
    n_tokens: Tensor | None,
    n_rollouts: Tensor | None,
    tokens_per_rollout_R: Tensor | None,
    ratio: str,
    clip_low: float,
    clip_high: float,
    max_log_ratio: float,
    tis_cap: float | None,
    aggregation: str,
    divisor: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss (scalar), its gradient by ``logprobs_N``, and ``(N_METRICS,)`` float64 metrics."""
    module, threads = native.module(), torch.get_num_threads()
    cu_tokens_R1 = cu_tokens_R1.long()
    n_tokens_R = torch.empty(cu_tokens_R1.numel() - 1, dtype=torch.int64)
    grads_N = torch.empty_like(logprobs_N)
    sums = torch.empty(SUMS, dtype=torch.float64)
    histogram = torch.empty(BINS, dtype=torch.int64)
    tensors = {
        "logprobs_N": logprobs_N,
        "old_logprobs_N": old_logprobs_N,
        "advantages_N": advantages_N,
        "mask_N": mask_N,
        "cu_tokens_R1": cu_tokens_R1,
        "n_tokens_R": n_tokens_R,
        "grads_N": grads_N,
        "sums": sums,
        "histogram": histogram,
    }
    if sampler_logprobs_N is not None:
        tensors["sampler_logprobs_N"] = sampler_logprobs_N
    settings = {
        "sequence_ratio": ratio == "sequence",
        "clip_low": clip_low,
        "clip_high": clip_high,
        "max_log_ratio": max_log_ratio,
        "tis_cap": float("inf") if tis_cap is None else tis_cap,
    }
    try:
        module.policy_loss_counts(mask_N, cu_tokens_R1, n_tokens_R, threads)
        check_counts(n_tokens_R, n_tokens, n_rollouts, tokens_per_rollout_R, ratio)
        tensors["weight_R"] = rollout_weights(
            n_tokens_R, aggregation, divisor, n_tokens, n_rollouts, tokens_per_rollout_R
        ).contiguous()
        module.policy_loss(tensors, settings, threads, native.elementwise_kernel())
    except ValueError as error:
        raise TraceFastError(str(error)) from None
    return sums[LOSS].to(logprobs_N.dtype), grads_N, metrics_from_sums(sums, histogram)


@policy_loss.register_fake
def _(logprobs_N: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        logprobs_N.new_empty(()),
        torch.empty_like(logprobs_N),
        logprobs_N.new_empty(N_METRICS, dtype=torch.float64),
    )


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])


def _backward(ctx: Any, grad_loss: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    logprobs_N, grads_N = ctx.saved_tensors
    found = first_order_only("policy_loss", "native", (grad_loss, logprobs_N), (grad_loss * grads_N,))
    return (*found, *(None,) * 15)


policy_loss.register_autograd(_backward, setup_context=_save_gradient)
