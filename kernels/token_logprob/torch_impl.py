"""Chunked token_logprob in torch: a block of rows times a chunk of the vocabulary at a time, in float32.

Row blocks have a fixed size (the last one is padded), so every product has the same shape and a row's bits do not
depend on how many others there are. Extra memory: one chunk of the head in float32 and one block of logits; for the
gradient one more block, and the sums for the chunk and for the rows in float32.

Without a gradient the code below runs as it stands, inside whatever torch mode the caller has set; with one, and while
compiling, it runs as a custom op, which is opaque to both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trace_fast.kernels.token_logprob.ops import define_ops, run_parts, run_score
from trace_fast.kernels.token_logprob.problem import Problem, RowSums, Scored, accumulation_dtype, safe_offsets

ROW_BLOCK = 256
VOCABULARY_CHUNK = 8192


def score(problem: Problem, *, starts_S: torch.Tensor | None, ignore_index: int | None, entropy: bool) -> Scored:
    """See ``token_logprob`` and ``segment_mean_logprob``."""
    if problem.needs_grad or torch.compiler.is_compiling():
        return run_score(OPS, problem, starts_S=starts_S, ignore_index=ignore_index, entropy=entropy)
    OPS.refuse_tangents(problem)
    logprob, entropy_M, mean_S, _, _ = _score(*problem, starts_S, ignore_index, entropy)
    return Scored(logprob, entropy_M if entropy else None, None if starts_S is None else mean_S)


def parts(problem: Problem, *, vocabulary_start: int) -> RowSums:
    """See ``token_logprob_parts``."""
    if problem.needs_grad or torch.compiler.is_compiling():
        return run_parts(OPS, problem, vocabulary_start=vocabulary_start)
    OPS.refuse_tangents(problem)
    return _parts(*problem, vocabulary_start)


def _score(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_M: torch.Tensor,
    bias_V: torch.Tensor | None,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    starts_S: torch.Tensor | None,
    ignore_index: int | None,
    entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    problem = Problem(hidden_MH, weight_VH, targets_M, bias_V, softcap, logit_scale, temperature)
    rows = len(targets_M)
    peak_M, total_M, target_M, moment_M = _sums(problem, 0, entropy)
    # Still padded: a vectorised logarithm rounds the odd elements at the end of an array with another routine.
    logprob_M = (target_M - peak_M - total_M.log()).clamp_(max=0)[:rows]
    entropy_M = total_M.new_empty(0)
    if entropy:
        entropy_M = (total_M.log() - moment_M / total_M).clamp_(min=0)[:rows]
    scored_M = torch.ones_like(targets_M, dtype=torch.bool)
    unknown_M = (targets_M < 0) | (targets_M >= len(weight_VH))
    if ignore_index is not None:
        scored_M = targets_M != ignore_index
        entropy_M = entropy_M.masked_fill(~scored_M, 0) if entropy else entropy_M
    logprob_M = logprob_M.masked_fill(unknown_M, float("nan")).masked_fill(~scored_M, 0)
    mean_S = total_M.new_empty(0, dtype=torch.float64)
    if starts_S is not None:
        mean_S = _sum_segments(logprob_M, starts_S) / _sum_segments(scored_M, starts_S)
    return logprob_M, entropy_M.contiguous(), mean_S, peak_M[:rows].clone(), total_M[:rows].clone()


def _sum_segments(values_M: torch.Tensor, starts_S: torch.Tensor) -> torch.Tensor:
    """float64; one segment after the other, each in the order of its rows: the same bits in any company."""
    return torch.segment_reduce(values_M.double(), "sum", offsets=safe_offsets(starts_S, len(values_M)), initial=0)


def _parts(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_M: torch.Tensor,
    bias_V: torch.Tensor | None,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    vocabulary_start: int,
) -> RowSums:
    problem = Problem(hidden_MH, weight_VH, targets_M, bias_V, softcap, logit_scale, temperature)
    peak_M, total_M, target_M, _ = _sums(problem, vocabulary_start, entropy=False)
    rows = len(targets_M)
    return peak_M[:rows].clone(), total_M[:rows].clone(), target_M[:rows].clone()


def _sums(
    problem: Problem, vocabulary_start: int, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maximum, sum of exponentials, target's logit (0 where it is elsewhere) and sum e^(x - max) (x - max); padded."""
    hidden_MH, weight_VH, targets_M, bias_V, softcap, logit_scale, temperature = problem
    accumulate = accumulation_dtype(hidden_MH)
    rows = len(hidden_MH)
    pad = -rows % ROW_BLOCK
    hidden_MH = F.pad(hidden_MH.to(accumulate), (0, 0, 0, pad))
    targets_M = F.pad(targets_M - vocabulary_start, (0, pad))
    peak_M = hidden_MH.new_full((rows + pad,), float("-inf"))
    total_M = hidden_MH.new_zeros(rows + pad)
    target_M = hidden_MH.new_zeros(rows + pad)
    moment_M = hidden_MH.new_zeros(rows + pad)
    for low in range(0, len(weight_VH), VOCABULARY_CHUNK):
        chunk_CH = weight_VH[low : low + VOCABULARY_CHUNK].to(accumulate)
        bias_C = None if bias_V is None else bias_V[low : low + VOCABULARY_CHUNK].to(accumulate)
        for first in range(0, rows, ROW_BLOCK):
            block = slice(first, first + ROW_BLOCK)
            logits = F.linear(hidden_MH[block], chunk_CH, bias_C).mul_(logit_scale)
            if softcap is not None:
                logits = logits.div_(softcap).tanh().mul_(softcap)
            logits = logits.div_(temperature)
            inside = targets_M[block] - low
            hit = (inside >= 0) & (inside < len(chunk_CH))
            found = logits.gather(1, inside.clamp(0, len(chunk_CH) - 1)[:, None])[:, 0]
            target_M[block] = torch.where(hit, found, target_M[block])
            peak = torch.maximum(peak_M[block], logits.amax(1))
            shift = peak.masked_fill(peak == float("-inf"), 0)  # a chunk of -inf only: 0 in sum, not NaN
            kept = (peak_M[block] - shift).exp()
            below = logits.sub_(shift[:, None])
            if entropy:
                share = below.exp()
                moved = (total_M[block] * (peak_M[block] - shift)).masked_fill(total_M[block] == 0, 0)
                bent = torch.where(share > 0, share * below, 0)
                moment_M[block] = kept * (moment_M[block] + moved) + bent.sum(1)
                total_M[block] = total_M[block] * kept + share.sum(1)
            else:
                total_M[block] = total_M[block] * kept + below.exp().sum(1)
            peak_M[block] = peak
    return peak_M, total_M, target_M, moment_M


def _backward(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_M: torch.Tensor,
    bias_V: torch.Tensor | None,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    peak_M: torch.Tensor,
    slope_M: torch.Tensor,
    curve_M: torch.Tensor,
    spike_M: torch.Tensor,
    vocabulary_start: int,
    want_hidden: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of ``ops.py``; every sum is taken in float32 and rounded once."""
    accumulate = accumulation_dtype(hidden_MH)
    grad_hidden = hidden_MH.new_zeros(hidden_MH.shape if want_hidden else 0, dtype=accumulate)
    grad_weight = weight_VH.new_empty(weight_VH.shape if want_weight else 0)
    grad_bias = hidden_MH.new_empty(0) if bias_V is None else bias_V.new_empty(len(bias_V) if want_bias else 0)
    active_M = (slope_M != 0) | (spike_M != 0)
    if curve_M.numel():
        active_M = active_M | (curve_M != 0)
    for low in range(0, len(weight_VH), VOCABULARY_CHUNK):
        chunk = slice(low, low + VOCABULARY_CHUNK)
        chunk_CH = weight_VH[chunk].to(accumulate)
        bias_C = None if bias_V is None else bias_V[chunk].to(accumulate)
        sum_CH, sum_C = torch.zeros_like(chunk_CH if want_weight else chunk_CH[:0]), chunk_CH.new_zeros(len(chunk_CH))
        for first in range(0, len(hidden_MH), ROW_BLOCK):
            block = slice(first, first + ROW_BLOCK)
            rows_MH = hidden_MH[block].to(accumulate)
            logits = F.linear(rows_MH, chunk_CH, bias_C).mul_(logit_scale)
            chain = torch.as_tensor(logit_scale / temperature, dtype=accumulate, device=logits.device)
            if softcap is not None:
                bend = logits.div_(softcap).tanh()
                logits, chain = bend * softcap, (1 - bend * bend).mul_(chain)
            below = logits.div_(temperature).sub_(peak_M[block, None])
            share = below.exp()
            grad = share * slope_M[block, None]
            if curve_M.numel():
                grad += torch.where(share > 0, share * below, 0) * curve_M[block, None]
            inside = targets_M[block] - vocabulary_start - low
            hit = (inside >= 0) & (inside < len(chunk_CH))
            spike = torch.where(hit, spike_M[block], 0)
            grad.scatter_add_(1, inside.clamp(0, len(chunk_CH) - 1)[:, None], spike[:, None])
            # A row without gradient gives 0, whatever it holds.
            grad = torch.where(active_M[block, None], grad * chain, 0)
            if want_hidden:
                grad_hidden[block].addmm_(grad, chunk_CH)
            if want_weight:
                sum_CH.addmm_(grad.T, rows_MH)
            if want_bias:
                sum_C += grad.sum(0)
        if want_weight:
            grad_weight[chunk] = sum_CH
        if want_bias:
            grad_bias[chunk] = sum_C
    return grad_hidden.to(hidden_MH.dtype), grad_weight, grad_bias


OPS = define_ops("torch", _score, _parts, _backward)
