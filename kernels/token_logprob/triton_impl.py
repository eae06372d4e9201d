"""Triton token_logprob: launches of ``triton_kernels.py`` and its registration as custom ops.

Forward: ``partials`` fills (T, M) buffers, ``merge`` reads them; rows are done in slices so that the buffers stay below
``SCRATCH_BYTES``, whatever the number of rows. Backward: a chunk of ``gradient`` in the input's dtype, then two matrix
products of torch with float32 results, summed in float32.

The numbers of a row depend on the device's generation, the dtypes and the features asked for, never on other rows, on
the number of rows or processors, or on scheduling: tiles are fixed, sums are ordered, and nothing is atomic.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from trace_fast.kernels.token_logprob import triton_kernels
from trace_fast.kernels.token_logprob.ops import define_ops, run_parts, run_score
from trace_fast.kernels.token_logprob.problem import Problem, RowSums, Scored
from trace_fast.kernels.token_logprob.tiling import GROUP, MERGE, Tiling, choose_splits, choose_tiling, rows_per_slice
from trace_fast.kernels.token_logprob.triton_cases import compile_cases

__all__ = ["OPS", "compile_cases", "parts", "score", "why_not"]

INTERPRETED = not isinstance(triton_kernels.partials, triton.JITFunction)
SCRATCH_BYTES = 48 << 20
CHUNK_ROWS, CHUNK_COLUMNS = 4096, 4096  # of the gradient's (rows, vocabulary) buffer


def why_not(device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run on such tensors; None when they can."""
    if device.type != "cuda" and not INTERPRETED:
        return f"Triton kernels run on CUDA devices (or in Triton's interpreter), got {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        return f"Triton kernels need compute capability 8.0, got {major}.{minor}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"Triton kernels take float32, bfloat16 or float16 rows, got {dtype}"
    if INTERPRETED and dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 by its bits; use float16 or float32 there"
    if weight_dtype != dtype:
        return f"Triton kernels need rows and head of one dtype, got {dtype} and {weight_dtype}"
    return None


def score(problem: Problem, *, starts_S: torch.Tensor | None, ignore_index: int | None, entropy: bool) -> Scored:
    """See ``token_logprob`` and ``segment_mean_logprob``."""
    return run_score(OPS, problem, starts_S=starts_S, ignore_index=ignore_index, entropy=entropy)


def parts(problem: Problem, *, vocabulary_start: int) -> RowSums:
    """See ``token_logprob_parts``."""
    return run_parts(OPS, problem, vocabulary_start=vocabulary_start)


def _operand(matrix: torch.Tensor, rows: int, tiling: Tiling) -> Any:
    if not tiling.tma:
        return matrix
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, tiling.depth])


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _forward(
    problem: Problem,
    vocabulary_start: int,
    *,
    finish: bool,
    starts_S: torch.Tensor | None = None,
    ignore_index: int | None = None,
    entropy: bool = False,
) -> _Rows:
    """Both launches, over slices of rows where the buffers would be too large.

    Slices leave row sums behind; one more merge then takes them as a vocabulary of one tile, which changes no bit of
    them, and finishes all rows as it would have without slices.
    """
    hidden, weight = problem.hidden_MH, problem.weight_VH
    rows = len(hidden)
    out = _Rows.empty(hidden, rows, starts_S, finish=finish, entropy=entropy)
    if rows == 0:
        out.mean_S.fill_(float("nan"))
        return out
    tiling = choose_tiling(problem, entropy=entropy)
    tiles = triton.cdiv(len(weight), tiling.columns)
    slice_rows = rows_per_slice(tiles, 3 if entropy else 2, SCRATCH_BYTES)
    found_M = hidden.new_empty(rows, dtype=torch.float32)
    ids = (len(weight), vocabulary_start, ignore_index)
    with _on(hidden.device):
        if rows <= slice_rows:
            scratch = _launch_partials(problem, vocabulary_start, tiling, found_M, entropy)
            _launch_merge(scratch, found_M, problem.targets_M, starts_S, ids, out, finish=finish)
            return out
        sums = _Rows.empty(hidden, rows, None, finish=False, entropy=entropy) if finish else out
        for first in range(0, rows, slice_rows):
            some = slice(first, first + slice_rows)
            share = problem._replace(hidden_MH=hidden[some], targets_M=problem.targets_M[some])
            scratch = _launch_partials(share, vocabulary_start, tiling, found_M[some], entropy)
            _launch_merge(scratch, found_M[some], share.targets_M, None, ids, sums.part(some), finish=False)
        if finish:
            row_sums = _Scratch(sums.peak_M[None], sums.total_M[None], sums.moment_M[None] if entropy else None)
            _launch_merge(row_sums, found_M, problem.targets_M, starts_S, ids, out, finish=True)
    return out


@dataclass(frozen=True, slots=True)
class _Scratch:
    """(T, M) float32: of every tile the maximum, the sum of exponentials and their first moment."""

    peak_TM: torch.Tensor
    total_TM: torch.Tensor
    moment_TM: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Rows:
    """Results a row (float32) or segment (float64); those not asked for have no elements."""

    peak_M: torch.Tensor
    total_M: torch.Tensor
    target_M: torch.Tensor
    moment_M: torch.Tensor
    logprob_M: torch.Tensor
    entropy_M: torch.Tensor
    mean_S: torch.Tensor

    @classmethod
    def empty(
        cls, like: torch.Tensor, rows: int, starts_S: torch.Tensor | None, *, finish: bool, entropy: bool
    ) -> _Rows:
        unfinished, moments = 0 if finish else rows, rows if entropy else 0
        segments = 0 if starts_S is None else len(starts_S) - 1
        sizes = (rows, rows, unfinished, min(unfinished, moments), rows - unfinished, min(rows - unfinished, moments))
        tensors = [like.new_empty(size, dtype=torch.float32) for size in sizes]
        results = cls(*tensors, *[like.new_empty(segments, dtype=torch.float64)])
        if starts_S is not None:  # rows outside every segment are written by nobody
            for result in (results.peak_M, results.total_M, results.logprob_M, results.entropy_M):
                result.fill_(float("nan"))
        return results

    def part(self, some: slice) -> _Rows:
        """Views of some rows' unfinished results."""
        sums = (result[some] for result in (self.peak_M, self.total_M, self.target_M, self.moment_M))
        peak_M, total_M, target_M, moment_M = sums
        return replace(self, peak_M=peak_M, total_M=total_M, target_M=target_M, moment_M=moment_M)


def _launch_partials(
    problem: Problem, vocabulary_start: int, tiling: Tiling, found_M: torch.Tensor, entropy: bool
) -> _Scratch:
    hidden, weight, targets, bias, softcap, logit_scale, temperature = problem
    rows, tiles = len(hidden), triton.cdiv(len(weight), tiling.columns)
    scratch = [hidden.new_empty((tiles, rows), dtype=torch.float32) for _ in range(3 if entropy else 2)]
    sums = _Scratch(scratch[0], scratch[1], scratch[2] if entropy else None)
    row_blocks = triton.cdiv(rows, tiling.rows)
    splits = choose_splits(row_blocks, tiles, _processors(hidden.device))
    triton_kernels.partials[(row_blocks * splits,)](
        _operand(hidden, tiling.rows, tiling), _operand(weight, tiling.columns, tiling), bias, targets,
        sums.peak_TM, sums.total_TM, sums.moment_TM, found_M,
        rows, hidden.shape[1], len(weight), vocabulary_start,
        *hidden.stride(), *weight.stride(), *_scales(softcap, logit_scale, temperature), tiles, splits,
        **_blocks(tiling), GROUP=GROUP, HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap is not None, MOMENT=entropy,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return sums


def _launch_merge(
    sums: _Scratch,
    found_M: torch.Tensor,
    targets_M: torch.Tensor,
    starts_S: torch.Tensor | None,
    ids: tuple[int, int, int | None],
    out: _Rows,
    *,
    finish: bool,
) -> None:
    tiles, rows = sums.peak_TM.shape
    vocabulary, vocabulary_start, ignore_index = ids
    programs = triton.cdiv(rows, MERGE.rows) if starts_S is None else len(starts_S) - 1
    triton_kernels.merge[(programs,)](
        sums.peak_TM, sums.total_TM, sums.moment_TM, found_M, targets_M, starts_S,
        out.logprob_M, out.entropy_M, out.mean_S, out.peak_M, out.total_M, out.target_M, out.moment_M,
        rows, tiles, vocabulary, vocabulary_start, 0 if ignore_index is None else ignore_index,
        BLOCK_M=MERGE.rows, BLOCK_T=MERGE.tiles, FINISH=finish, MOMENT=sums.moment_TM is not None,
        SEGMENTS=starts_S is not None, HAS_IGNORE=ignore_index is not None, num_warps=MERGE.warps,
    )  # fmt: skip


def _scales(softcap: float | None, logit_scale: float, temperature: float) -> tuple[float, float, float]:
    """logit_scale, softcap, 1 / temperature; without a softcap between them the last goes into the first."""
    if softcap is None:
        return logit_scale / temperature, 1.0, 1.0
    return logit_scale, softcap, 1.0 / temperature


def _blocks(tiling: Tiling) -> dict[str, Any]:
    return {"BLOCK_M": tiling.rows, "BLOCK_V": tiling.columns, "BLOCK_H": tiling.depth, "TMA": tiling.tma}


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
    out = _forward(problem, 0, finish=True, starts_S=starts_S, ignore_index=ignore_index, entropy=entropy)
    return out.logprob_M, out.entropy_M, out.mean_S, out.peak_M, out.total_M


def _parts(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_M: torch.Tensor,
    bias_V: torch.Tensor | None,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    vocabulary_start: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    problem = Problem(hidden_MH, weight_VH, targets_M, bias_V, softcap, logit_scale, temperature)
    out = _forward(problem, vocabulary_start, finish=False)
    return out.peak_M, out.total_M, out.target_M


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
    """The gradient of ``ops.py``; extra memory: a chunk in the input's dtype, float32 sums of its rows and columns."""
    problem = Problem(hidden_MH, weight_VH, targets_M, bias_V, softcap, logit_scale, temperature)
    factors = (peak_M, slope_M.contiguous(), curve_M.contiguous(), spike_M.contiguous())
    rows, vocabulary = len(hidden_MH), len(weight_VH)
    grad_hidden = hidden_MH.new_zeros(hidden_MH.shape if want_hidden else 0, dtype=torch.float32)
    grad_weight = weight_VH.new_empty(weight_VH.shape if want_weight else 0)
    grad_bias = hidden_MH.new_empty(0) if bias_V is None else bias_V.new_empty(vocabulary if want_bias else 0)
    chunk_MC = hidden_MH.new_empty(min(rows, CHUNK_ROWS), triton.cdiv(min(vocabulary, CHUNK_COLUMNS), 16) * 16)
    for low in range(0, vocabulary, CHUNK_COLUMNS):
        columns = slice(low, min(low + CHUNK_COLUMNS, vocabulary))
        sum_CH = grad_hidden.new_zeros((columns.stop - low, hidden_MH.shape[1]) if want_weight else 0)
        sum_C = grad_hidden.new_zeros(columns.stop - low)
        for first in range(0, rows, CHUNK_ROWS):
            some = slice(first, min(first + CHUNK_ROWS, rows))
            share = problem._replace(
                hidden_MH=hidden_MH[some],
                weight_VH=weight_VH[columns],
                targets_M=targets_M[some],
                bias_V=None if bias_V is None else bias_V[columns],
            )
            grad_MC = chunk_MC[: some.stop - first, : columns.stop - low]
            _launch_gradient(share, tuple(factor[some] for factor in factors), vocabulary_start + low, grad_MC)
            if want_hidden:
                grad_hidden[some] += _product(grad_MC, weight_VH[columns])
            if want_weight:
                sum_CH += _product(grad_MC.T, hidden_MH[some])
            if want_bias:
                sum_C += grad_MC.sum(0, dtype=torch.float32)
        if want_weight:
            grad_weight[columns] = sum_CH
        if want_bias:
            grad_bias[columns] = sum_C
    return grad_hidden.to(hidden_MH.dtype), grad_weight, grad_bias


def _launch_gradient(
    problem: Problem, factors: tuple[torch.Tensor, ...], column_start: int, out_MC: torch.Tensor
) -> None:
    hidden, weight, targets, bias, softcap, logit_scale, temperature = problem
    curved = factors[2].numel() > 0
    tiling = choose_tiling(problem, entropy=True)  # whose columns leave registers for the gradient
    blocks = triton.cdiv(len(hidden), tiling.rows) * triton.cdiv(len(weight), tiling.columns)
    with _on(hidden.device):
        triton_kernels.gradient[(blocks,)](
            _operand(hidden, tiling.rows, tiling), _operand(weight, tiling.columns, tiling), bias, targets,
            factors[0], factors[1], factors[2] if curved else None, factors[3], out_MC,
            len(hidden), hidden.shape[1], len(weight), column_start,
            *hidden.stride(), *weight.stride(), out_MC.stride(0), *_scales(softcap, logit_scale, temperature),
            **_blocks(tiling), HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap is not None, CURVE=curved,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """float32 product that is not rounded on the way."""
    if left.dtype == torch.float32:
        return torch.mm(left, right)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())  # torch has no product of another dtype on the CPU


OPS = define_ops("triton", _score, _parts, _backward)
