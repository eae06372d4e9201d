"""policy_loss in Triton: loss, gradient and metrics from one pass over the tokens.

A first small launch, one program a rollout, counts the mask (and, for the sequence ratio, adds the log ratios up in
the order of the tokens: a rollout's ratio has the same bits in any batch). A few operations on one number a rollout
make the weights. The main launch has a grid of (rollouts, shares of a rollout's tokens); each program writes the
gradients of its tokens and one row of sums, and adds its counts of log ratios to one of 64 histograms. Integers may be
added in any order and the rows of sums are added up in a fixed one, so a repetition gives the same bits.

Nothing waits for the device, and addresses are held within the tensors whatever the offsets say. Registered as
``trace_fast::policy_loss_triton``.

Suffixes: N tokens of all rollouts, R rollouts, R1 = R+1 offsets, P programs, S sums.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from trace_fast.kernels.common.compile_cases import CompileCase
from trace_fast.kernels.common.derivatives import first_order_only
from trace_fast.kernels.policy_loss.metrics import (
    BINS,
    BINS_PER_OCTAVE,
    LOSS,
    LOWEST_EXPONENT,
    MAX_LOG_RATIO,
    MIN_LOG_RATIO,
    N_METRICS,
    SUMS,
    TIS,
    TOKENS,
    metrics_from_sums,
)
from trace_fast.kernels.policy_loss.triton_kernels import count_kernel, loss_kernel
from trace_fast.kernels.policy_loss.weights import check_counts, rollout_weights

NUM_WARPS = 4
BLOCK = {torch.float32: 512, torch.float64: 256}  # of the main launch; ten running sums must fit into registers
COUNT_BLOCK = 1024
TOKENS_A_PROGRAM = 4096  # on average
HISTOGRAMS = 64  # programs that share one wait for one another's additions
BIN_BASE = (127 + LOWEST_EXPONENT) * BINS_PER_OCTAVE


INTERPRETED = isinstance(loss_kernel, InterpretedFunction)


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this implementation cannot run such tensors here; ``None`` when it can."""
    if dtype not in (torch.float32, torch.float64):
        return f"the Triton kernel takes float32 or float64, got {dtype}"
    if device.type == "cuda" or (device.type == "cpu" and INTERPRETED):
        return None
    return f"Triton kernels run on CUDA devices (or in Triton's interpreter), got {device}"


@torch.library.custom_op("trace_fast::policy_loss_triton", mutates_args=())
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
    device, length, rollouts = logprobs_N.device, logprobs_N.numel(), cu_tokens_R1.numel() - 1
    mask = mask_N.view(torch.uint8)
    grads_N = torch.zeros_like(logprobs_N)  # tokens that no rollout covers have no gradient
    n_tokens_R = torch.empty(rollouts, dtype=torch.int64, device=device)
    log_ratio_R = logprobs_N.new_empty(rollouts)
    shares = min(max(triton.cdiv(length, max(rollouts, 1) * TOKENS_A_PROGRAM), 1), 1024)
    sums_PS = torch.empty(rollouts * shares, SUMS, dtype=torch.float64, device=device)
    histograms = torch.zeros(HISTOGRAMS, BINS, dtype=torch.int64, device=device)
    sequence = ratio == "sequence"
    if rollouts:
        count_kernel[(rollouts,)](
            logprobs_N,
            old_logprobs_N,
            mask,
            cu_tokens_R1,
            n_tokens_R,
            log_ratio_R,
            length,
            SEQUENCE=sequence,
            BLOCK=COUNT_BLOCK,
            num_warps=NUM_WARPS,
        )
    if device.type == "cpu":
        check_counts(n_tokens_R, n_tokens, n_rollouts, tokens_per_rollout_R, ratio)
    weight_R = rollout_weights(n_tokens_R, aggregation, divisor, n_tokens, n_rollouts, tokens_per_rollout_R)
    if rollouts:
        loss_kernel[(rollouts, shares)](
            logprobs_N,
            old_logprobs_N,
            logprobs_N if sampler_logprobs_N is None else sampler_logprobs_N,
            advantages_N,
            mask,
            cu_tokens_R1,
            weight_R.contiguous(),
            log_ratio_R,
            grads_N,
            sums_PS,
            histograms,
            length,
            CLIP_LOW=clip_low,
            CLIP_HIGH=clip_high,
            MAX_RATIO=max_log_ratio,
            TIS_CAP=0.0 if tis_cap is None else tis_cap,
            SEQUENCE=sequence,
            WITH_TIS=sampler_logprobs_N is not None,
            BLOCK=BLOCK[logprobs_N.dtype],
            BINS=BINS,
            BIN_BASE=BIN_BASE,
            HISTOGRAMS=HISTOGRAMS,
            SUMS=SUMS,
            num_warps=NUM_WARPS,
        )
    sums = sums_PS.sum(0)
    if rollouts:
        sums[MIN_LOG_RATIO], sums[MAX_LOG_RATIO] = sums_PS[:, MIN_LOG_RATIO].amin(), sums_PS[:, MAX_LOG_RATIO].amax()
    if sampler_logprobs_N is None:
        sums[TIS] = sums[TOKENS]  # every weight is 1
    return sums[LOSS].to(logprobs_N.dtype), grads_N, metrics_from_sums(sums, histograms.sum(0))


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
    found = first_order_only("policy_loss", "triton", (grad_loss, logprobs_N), (grad_loss * grads_N,))
    return (*found, *(None,) * 15)


policy_loss.register_autograd(_backward, setup_context=_save_gradient)


def compile_cases() -> list[CompileCase]:
    """The shipped configurations."""
    constants: dict[str, object] = {
        "CLIP_LOW": 0.20,
        "CLIP_HIGH": 0.28,
        "MAX_RATIO": 20.0,
        "TIS_CAP": 2.0,
        "BINS": BINS,
        "BIN_BASE": BIN_BASE,
        "HISTOGRAMS": HISTOGRAMS,
        "SUMS": SUMS,
    }
    shared = {"mask_N": "*u8", "n_tokens_R": "*i64", "weight_R": "*fp64", "sums_PS": "*fp64", "histograms_HB": "*i64"}
    floats = ("logprobs_N", "old_logprobs_N", "sampler_logprobs_N", "advantages_N", "log_ratio_R", "grads_N")
    cases = []
    for element, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
        constants["BLOCK"] = BLOCK[dtype]
        for offset in ("i32", "i64"):
            types = {**dict.fromkeys(floats, f"*{element}"), **shared, "cu_tokens_R1": f"*{offset}", "n_tokens": "i32"}
            for sequence in (False, True):
                ratio = "sequence" if sequence else "token"
                counted: dict[str, object] = {"SEQUENCE": sequence, "BLOCK": COUNT_BLOCK}
                cases.append(_case(f"policy_loss count {element} {offset} {ratio}", count_kernel, types, counted))
                for tis in (False, True):
                    name = f"policy_loss loss {element} {offset} {ratio}{' tis' if tis else ''}"
                    cases.append(_case(name, loss_kernel, types, {**constants, "SEQUENCE": sequence, "WITH_TIS": tis}))
    return cases


def _case(name: str, kernel: Any, types: dict[str, str], constants: dict[str, object]) -> CompileCase:
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    pointers = tuple(argument for argument, kind in signature.items() if kind.startswith("*"))
    return CompileCase(name, kernel, signature, constants, NUM_WARPS, 3, wants_wgmma=False, aligned=pointers)
