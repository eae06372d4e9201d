"""The two custom operators of prefix_attention in Triton, and the launches of their kernels.

``trace_fast::prefix_attention_triton`` gives (out, lse), ``..._triton_backward`` the gradients. Plan tables come in as
lists of int32 tensors in the order of ``triton_impl``; the gradient's tables are empty where no gradient is wanted.
The operators copy an input only where the elements of a head do not lie side by side, or a tensor map cannot describe
it.

Shapes: N rows, H query heads, K key/value heads, D head dim (value's DV). out ``(N, H, DV)``, lse and delta ``(N, H)``
float32. Block sizes travel as the numbers of ``triton_config.Blocks``, so that the schema stays plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from trace_fast.kernels.common.derivatives import first_order_only
from trace_fast.kernels.prefix_attention import triton_backward as backward
from trace_fast.kernels.prefix_attention import triton_forward as forward
from trace_fast.kernels.prefix_attention.triton_config import padded

QUERY_TABLES = 8  # leading tensors of the gradient's tables that belong to the query-gradient kernel
MERGE_PAIRS = 16  # row-head pairs a program of the merge kernel
DELTA_PAIRS = 32  # and of the delta kernel


@torch.library.custom_op("trace_fast::prefix_attention_triton", mutates_args=())
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    tables: Sequence[torch.Tensor],
    grad_tables: Sequence[torch.Tensor],
    slots: int,
    covered: bool,
    scale: float,
    softcap: float,
    blocks: Sequence[int],
    grad_blocks: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """out, lse. ``softcap`` 0 is off; ``covered``: every row is in a span, so nothing needs to be set to zero."""
    query, key, value = (_rows_contiguous(t) for t in (query, key, value))
    (rows, heads, dim), key_heads, value_dim = query.shape, key.shape[1], value.shape[2]
    group = heads // key_heads
    block_m, block_n, warps, stages, tma = blocks
    items, tile_rows, segments, edges, low, high, splits, _ = tables
    allocate = query.new_empty if covered else query.new_zeros
    out = allocate((rows, heads, value_dim))
    lse = torch.empty((rows, heads), dtype=torch.float32, device=query.device)
    if not covered:
        lse.fill_(float("-inf"))
    part_out = torch.empty((slots, key_heads, block_m, value_dim), dtype=torch.float32, device=query.device)
    part_lse = torch.empty((slots, key_heads, block_m), dtype=torch.float32, device=query.device)
    no_sinks = query if sinks is None else sinks
    shape: dict[str, Any] = {
        "GROUP": group,
        "TILE_ROWS": block_m // group,
        "DV": value_dim,
        "BLOCK_M": block_m,
        "BLOCK_DV": padded(value_dim),
        "SINKS": sinks is not None,
        "enable_fp_fusion": True,
    }
    if tma:
        key, value = _for_tma(key), _for_tma(value)
    with _on(query.device):
        if len(items):
            forward.forward_kernel[(len(items), key_heads)](
                query,
                _descriptor(key, block_n) if tma else key,
                _descriptor(value, block_n) if tma else value,
                no_sinks,
                out,
                lse,
                part_out,
                part_lse,
                items,
                tile_rows,
                segments,
                edges,
                low,
                high,
                rows,
                *_strides(query, key, value),
                scale,
                softcap,
                D=dim,
                BLOCK_N=block_n,
                BLOCK_D=padded(dim),
                SOFTCAP=softcap > 0,
                ACCURATE=query.dtype == torch.float32,
                TMA=bool(tma),
                num_warps=warps,
                num_stages=stages,
                **shape,
            )
        if len(splits):
            forward.merge_kernel[(len(splits), key_heads, block_m // MERGE_PAIRS)](
                no_sinks, out, lse, part_out, part_lse, splits, tile_rows, BLOCK_P=MERGE_PAIRS, **shape
            )
    return out, lse


@attend.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    tables: Sequence[torch.Tensor],
    grad_tables: Sequence[torch.Tensor],
    slots: int,
    covered: bool,
    scale: float,
    softcap: float,
    blocks: Sequence[int],
    grad_blocks: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    out = query.new_empty((query.shape[0], query.shape[1], value.shape[2]))
    return out, torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)


@torch.library.custom_op("trace_fast::prefix_attention_triton_backward", mutates_args=())
def gradients(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tables: Sequence[torch.Tensor],
    covered: bool,
    scale: float,
    softcap: float,
    blocks: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, and delta ``(N, H)`` (see ``triton_backward``)."""
    grad_out, query, key, value = (_rows_contiguous(t) for t in (grad_out, query, key, value))
    (rows, heads, dim), key_heads, value_dim = query.shape, key.shape[1], value.shape[2]
    group = heads // key_heads
    q_m, q_n, q_warps, q_stages, tma, k_m, k_n, k_warps, k_stages, _, fused = blocks
    _, tile_rows, segments, edges, low, high, _, items = tables[:QUERY_TABLES]
    key_tiles, key_segments, edge_rows, key_low, key_high = tables[QUERY_TABLES:]
    allocate = torch.empty if covered else torch.zeros
    delta = torch.empty_like(lse)
    grad_query, grad_key, grad_value = (
        allocate(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value)
    )
    shape: dict[str, Any] = {
        "GROUP": group,
        "D": dim,
        "DV": value_dim,
        "BLOCK_D": padded(dim),
        "BLOCK_DV": padded(value_dim),
        "SOFTCAP": softcap > 0,
        "ACCURATE": query.dtype == torch.float32,
        "enable_fp_fusion": True,
    }
    if tma:
        key, value = _for_tma(key), _for_tma(value)
    with _on(query.device):
        if len(items):
            backward.delta_kernel[(triton.cdiv(rows * heads, DELTA_PAIRS),)](
                out,
                grad_out,
                grad_lse.contiguous(),
                delta,
                rows * heads,
                *_strides(grad_out),
                HEADS=heads,
                DV=value_dim,
                BLOCK_P=DELTA_PAIRS,
                BLOCK_DV=padded(value_dim),
            )
            backward.query_grad_kernel[(len(items), key_heads)](
                query,
                _descriptor(key, q_n) if tma else key,
                _descriptor(value, q_n) if tma else value,
                grad_out,
                lse,
                delta,
                grad_query,
                items,
                tile_rows,
                segments,
                edges,
                low,
                high,
                rows,
                *_strides(query, key, value, grad_out),
                scale,
                softcap,
                TILE_ROWS=q_m // group,
                BLOCK_M=q_m,
                BLOCK_N=q_n,
                TMA=bool(tma),
                num_warps=q_warps,
                num_stages=q_stages,
                **shape,
            )
            for keys, values in [(True, True)] if fused else [(True, False), (False, True)]:
                backward.key_grad_kernel[(len(key_tiles), key_heads)](
                    query,
                    key,
                    value,
                    grad_out,
                    lse,
                    delta,
                    grad_key,
                    grad_value,
                    key_tiles,
                    key_segments,
                    edge_rows,
                    key_low,
                    key_high,
                    *_strides(query, key, value, grad_out),
                    scale,
                    softcap,
                    TILE_ROWS=k_m // group,
                    BLOCK_M=k_m,
                    BLOCK_N=k_n,
                    KEYS=keys,
                    VALUES=values,
                    num_warps=k_warps,
                    num_stages=k_stages,
                    **shape,
                )
    return grad_query, grad_key, grad_value, delta


@gradients.register_fake
def _(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tables: Sequence[torch.Tensor],
    covered: bool,
    scale: float,
    softcap: float,
    blocks: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value)]
    return grads[0], grads[1], grads[2], torch.empty_like(lse)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, sinks, tables, grad_tables, _, covered, scale, softcap, _, grad_blocks = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, *grad_tables)
    ctx.tables = len(tables)
    ctx.settings = (covered, scale, softcap, grad_blocks)


def _backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> tuple[Any, ...]:
    query, key, value, sinks, out, lse, *tables = ctx.saved_tensors
    grads = gradients(grad_out, grad_lse, query, key, value, out, lse, tables, *ctx.settings)
    grad_query, grad_key, grad_value, delta = grads
    grad_sinks = None
    if sinks is not None:
        weight = torch.where(lse == float("-inf"), 0.0, torch.exp(sinks.float() - lse))  # rows of no span have none
        grad_sinks = -(weight * delta).sum(0).to(sinks.dtype)
    none_of_tables = [None] * ctx.tables, [None] * len(tables)  # autograd wants the inputs' structure
    inputs, found = (grad_out, grad_lse, query, key, value, sinks), (grad_query, grad_key, grad_value, grad_sinks)
    return *first_order_only("prefix_attention", "triton", inputs, found), *none_of_tables, *(None,) * 6


attend.register_autograd(_backward, setup_context=_setup_context)


# --- launches ------------------------------------------------------------------------------------------------------


def _rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Kernels take any strides of rows and heads, but elements of a head side by side."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _strides(*tensors: torch.Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def _for_tma(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where the hardware cannot map it: it asks for a base and strides aligned to 16 bytes."""
    size = tensor.element_size()
    if tensor.data_ptr() % 16 == 0 and all(s > 0 and s * size % 16 == 0 for s in tensor.stride()[:2]):
        return tensor
    rows, heads, dim = tensor.shape
    return tensor.new_empty((rows, heads, dim + -dim % (16 // size)))[..., :dim].copy_(tensor)


def _descriptor(tensor: torch.Tensor, block_n: int) -> TensorDescriptor:
    """Of the (K, N, D) view: a block is ``block_n`` rows of one head, zeros past the last row and past D."""
    rows, heads, dim = tensor.shape
    row_stride, head_stride, _ = tensor.stride()
    return TensorDescriptor(tensor, [heads, rows, dim], [head_stride, row_stride, 1], [1, block_n, padded(dim)])


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
