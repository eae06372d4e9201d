"""token_logprob: log-probabilities of target tokens from hidden rows and the head, without logits in memory.

``token_logprob(hidden_MH, weight_VH, targets_M, ...) -> (M,) float32``

    logits = softcap(logit_scale * (hidden weight^T + bias)) / temperature;  out = logits[target] - logsumexp(logits)

Shapes: M rows, H hidden size, V vocabulary, S segments (answers), R shards of the vocabulary. Logits are formed, in
float32 (float64 for float64 input), for a block of rows and a chunk of the vocabulary at a time; the log-sum-exp is
merged over chunks by their maxima. Results are <= 0 always: the target's logit is part of the maximum, and a rounding
overshoot is clamped to 0. The gradient forms the logits again, a chunk at a time. Units are nats.

``segment_mean_logprob`` adds the mean of every answer, ``token_logprob_parts`` and ``merge_parts`` are the same for a
vocabulary that is sharded over the ranks of a tensor-parallel group.

Ids and offsets on the CPU are checked. On a GPU they are not, for that would wait for the device: an id outside the
vocabulary gives NaN there (never a number), and so does a segment without rows.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal, overload

import torch

from trace_fast.errors import ConfigError
from trace_fast.kernels.common.checks import expect
from trace_fast.kernels.token_logprob import reference, torch_impl
from trace_fast.kernels.token_logprob.checks import check_problem, check_segments, check_shards, check_targets
from trace_fast.kernels.token_logprob.problem import Parts, Problem

IMPLEMENTATIONS = ("reference", "torch", "triton")

__all__ = [
    "IMPLEMENTATIONS",
    "Parts",
    "merge_parts",
    "segment_mean_logprob",
    "token_logprob",
    "token_logprob_parts",
    "why_not",
]


@torch.compiler.assume_constant_result  # a compiled graph keeps the answer: it depends on no tensor's values
def why_not(
    name: str, *, device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype | None = None
) -> str | None:
    """Why implementation ``name`` cannot run such tensors, in words; None when it can.

    Args:
        dtype: of the hidden rows. weight_dtype: of the head, by default the same.
    """
    if name not in IMPLEMENTATIONS:
        return f"expected one of {', '.join(IMPLEMENTATIONS)}"
    if name != "triton":
        return None  # any device, any floating dtype
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    reason: str | None = _implementation(name).why_not(device, dtype, weight_dtype or dtype)
    return reason


def _implementation(name: str) -> Any:
    if name == "triton":  # imported when it is asked for: the package works without Triton
        from trace_fast.kernels.token_logprob import triton_impl

        return triton_impl
    return {"reference": reference, "torch": torch_impl}[name]


def _checked(op: str, problem: Problem, backend: str) -> Any:
    """The module to run, after the checks that all calls share."""
    check_problem(op, problem)
    hidden, weight = problem.hidden_MH, problem.weight_VH
    reason = why_not(backend, device=hidden.device, dtype=hidden.dtype, weight_dtype=weight.dtype)
    if reason is not None:
        raise ConfigError(f"{op}: backend {backend!r}: {reason}")
    return _implementation(backend)


def _problem(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_M: torch.Tensor,
    bias_V: torch.Tensor | None,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
) -> Problem:
    """Vectors contiguous: kernels walk through them; the matrices keep their strides."""
    bias_V = None if bias_V is None else bias_V.contiguous()
    return Problem(
        hidden_MH, weight_VH, targets_M.contiguous(), bias_V, softcap, float(logit_scale), float(temperature)
    )


@overload
def token_logprob(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    ignore_index: int | None = None,
    return_entropy: Literal[False] = False,
    backend: str = "torch",
) -> torch.Tensor: ...


@overload
def token_logprob(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    ignore_index: int | None = None,
    return_entropy: Literal[True],
    backend: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor]: ...


def token_logprob(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    ignore_index: int | None = None,
    return_entropy: bool = False,
    backend: str = "torch",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Natural-log probability (nats) of ``targets_M`` under the head; differentiable in rows, weight and bias.

    Args:
        hidden_MH, weight_VH: float tensors of one device, any strides; the head may have another dtype than the hidden
            rows (not with ``"triton"``).
        targets_M: ``int64`` token ids in 0..V-1, or ``ignore_index``.
        bias_V: added before ``logit_scale`` and ``softcap``.
        ignore_index: rows with this target give 0 and no gradient, whatever their hidden row holds.
        return_entropy: also the entropy of every row's distribution, >= 0.
        backend: ``"reference"`` (eager, autograd), ``"torch"`` (chunked; bit-equal in any company of rows) or
            ``"triton"``.

    Returns:
        ``(M,)`` float32 (float64 for float64 hidden rows), <= 0, or NaN where the hidden row is not finite; with
        ``return_entropy`` a pair of such tensors.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    op = "token_logprob"
    problem = _problem(hidden_MH, weight_VH, targets_M, bias_V, softcap, logit_scale, temperature)
    implementation = _checked(op, problem, backend)
    check_targets(op, problem, ignore_index)
    scored = implementation.score(problem, starts_S=None, ignore_index=ignore_index, entropy=return_entropy)
    return (scored.logprob_M, scored.entropy_M) if return_entropy else scored.logprob_M


def segment_mean_logprob(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_M: torch.Tensor,
    cu_targets_S: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    ignore_index: int | None = None,
    backend: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean log-probability of every answer, and the log-probabilities themselves.

    Args:
        cu_targets_S: ``(S + 1,)`` int32 or int64, 0, increasing, M: answer s is rows cu[s] .. cu[s + 1].
        ignore_index: rows with this target do not count; a mean over none is NaN.
        Others: as in ``token_logprob``.

    Returns:
        ``(S,)`` float64 means and ``(M,)`` log-probabilities. A segment's sum runs in float64 in the order of its rows,
        so its mean does not depend on other segments; both are differentiable.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    op = "segment_mean_logprob"
    problem = _problem(hidden_MH, weight_VH, targets_M, bias_V, softcap, logit_scale, temperature)
    implementation = _checked(op, problem, backend)
    check_targets(op, problem, ignore_index)
    check_segments(op, cu_targets_S, len(targets_M), hidden_MH.device)
    scored = implementation.score(
        problem, starts_S=cu_targets_S.contiguous(), ignore_index=ignore_index, entropy=False
    )
    return scored.mean_S, scored.logprob_M


def token_logprob_parts(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_M: torch.Tensor,
    vocabulary_start: int,
    *,
    bias_V: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    backend: str = "torch",
) -> Parts:
    """What a rank that holds entries ``vocabulary_start ..`` of the vocabulary contributes.

    Args:
        weight_VH, bias_V: this rank's shard of the head.
        targets_M: ids in the whole vocabulary.
        Others: as in ``token_logprob``.

    Returns:
        ``Parts``: maximum, sum of exponentials below it, the target's logit (0 on the ranks that do not hold it) and
        whether this rank holds it (1 or 0), each ``(M,)`` float32 (float64 for float64 rows). In a process group:
        all-reduce the maximum by MAX, then sum * exp(max - reduced max), target and held by SUM. Differentiable through
        sum and target, the maximum counting as a constant: right for whatever depends on both only through
        max + log(sum).

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    op = "token_logprob_parts"
    problem = _problem(hidden_MH, weight_VH, targets_M, bias_V, softcap, logit_scale, temperature)
    implementation = _checked(op, problem, backend)
    expect(vocabulary_start >= 0, op, "vocabulary_start", "0 or more", vocabulary_start)
    max_M, sum_M, target_M = implementation.parts(problem, vocabulary_start=vocabulary_start)
    inside_M = problem.targets_M - vocabulary_start
    held_M = (inside_M >= 0) & (inside_M < len(weight_VH))
    return Parts(max_M, sum_M, target_M, held_M.to(sum_M.dtype))


def merge_parts(
    max_RM: torch.Tensor, sum_RM: torch.Tensor, target_RM: torch.Tensor, held_RM: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities ``(M,)`` from the stacked parts of all shards, <= 0; differentiable in sum and target.

    A target that lies in none of the shards, or in two, gives NaN (its gradient too), never a number.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    check_shards("merge_parts", Parts(max_RM, sum_RM, target_RM, held_RM))
    max_RM = max_RM.detach()
    peak_M = max_RM.amax(0)
    shift_M = peak_M.masked_fill(peak_M == float("-inf"), 0)
    total_M = (sum_RM * (max_RM - shift_M).exp()).sum(0)
    logprob_M = target_RM.sum(0) - shift_M - total_M.log()
    logprob_M = logprob_M - logprob_M.detach().clamp(min=0)  # a rounding overshoot goes, its gradient stays
    return logprob_M * torch.where(held_RM.sum(0) == 1, 1.0, float("nan")).to(logprob_M.dtype)
