"""prefix_attention in Triton: plan on the host, launch on the device, forward and backward.

``triton_plan`` says which rows share a tile and which key blocks they visit, ``triton_forward`` and ``triton_backward``
hold the kernels and their mathematics, ``triton_config`` the block sizes, ``triton_ops`` the two custom operators that
launch them, so that fake tensors, autograd, ``torch.compile`` and CUDA graphs work. The tables of a plan are made and
go to the device once per pack, head layout, window and device; nothing waits for it. Before a graph is captured (or
with ``fullgraph=True``) a plan has to have run once, so that they are there.

What holds for the bits: no atomics and a fixed order of all sums, so the same pack gives the same bits on the same
device; hidden keys contribute exactly 0, so a row does not notice what other branches hold, NaN included. Which keys
fall into one block depends on the rows that share a tile, so the same rollout in another pack may differ in the last
bit (``"torch"`` and ``"native"`` do not).

Shapes: N rows, H query heads, K key/value heads, D head dim (value's DV). out ``(N, H, DV)``, lse ``(N, H)`` float32.
"""

from __future__ import annotations

import numpy as np
import torch
import triton

from trace_fast.errors import ConfigError
from trace_fast.kernels.common.derivatives import refuse_tangents
from trace_fast.kernels.prefix_attention.triton_cases import compile_cases
from trace_fast.kernels.prefix_attention.triton_config import MAX_HEAD_DIM, Blocks, Tuning, choose
from trace_fast.kernels.prefix_attention.triton_forward import forward_kernel
from trace_fast.kernels.prefix_attention.triton_ops import attend
from trace_fast.kernels.prefix_attention.triton_plan import plan_keys, plan_queries
from trace_fast.layout import SpanRanges

__all__ = ["TritonPlan", "compile_cases", "why_not"]

ALIGNED = 4  # int32 in 16 bytes
INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int | None = None) -> str | None:
    """What keeps the Triton kernels from running such tensors here, in words; ``None`` when nothing does."""
    if device.type != "cuda" and not INTERPRETED:
        return f"Triton kernels run on CUDA devices (or in Triton's interpreter), got {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        return f"the Triton kernels need compute capability 8.0 or more, got {major}.{minor}"
    if dtype not in MAX_HEAD_DIM:
        return f"the Triton kernels take {', '.join(str(d) for d in MAX_HEAD_DIM)}, got {dtype}"
    if INTERPRETED and dtype == torch.bfloat16:
        return "Triton's interpreter multiplies the bit patterns of torch.bfloat16"
    if head_dim is not None and head_dim > MAX_HEAD_DIM[dtype]:
        return f"the Triton kernels take head dims up to {MAX_HEAD_DIM[dtype]} in {dtype}, got {head_dim}"
    return None


def _why_not_numbers(query: torch.Tensor, value: torch.Tensor, scale: float) -> str | None:
    """The same for what depends on shapes and numbers."""
    largest = max(query.shape[2], value.shape[2])
    if largest > MAX_HEAD_DIM[query.dtype]:
        return f"the Triton kernels take head dims up to {MAX_HEAD_DIM[query.dtype]} in {query.dtype}, got {largest}"
    if scale <= 0:
        return f"the Triton kernels take a positive scale, got {scale}"
    return None


class TritonPlan:
    """Tables of a pack, made as head layouts, windows and devices come up, shared by all layers.

    Args:
        spans: host-side visibility.
        tuning: block sizes; by default what ``triton_config`` holds for the device.
    """

    def __init__(self, spans: SpanRanges, tuning: Tuning | None = None) -> None:
        self.spans = spans
        self._tuning = tuning
        self._covered = int((spans.ends - spans.starts).sum())
        self._tables: dict[tuple[object, ...], tuple[list[torch.Tensor], int]] = {}

    def run(
        self,
        query_NHD: torch.Tensor,
        key_NKD: torch.Tensor,
        value_NKD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_H: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output, and ``(N, H)`` float32 log of the softmax's denominator in nats, sink included; -inf in no span.

        Differentiable in query, key, value and sinks, through both results.

        Raises:
            ConfigError: the kernels cannot run these arguments; the message says why.
        """
        device, key_heads = query_NHD.device, key_NKD.shape[1]
        group = query_NHD.shape[1] // key_heads
        reason = why_not(device, query_NHD.dtype) or _why_not_numbers(query_NHD, value_NKD, scale)
        if reason is not None:
            raise ConfigError(f"prefix_attention: backend 'triton' cannot run here: {reason}")
        refuse_tangents("prefix_attention", "triton", query=query_NHD, key=key_NKD, value=value_NKD, sinks=sinks_H)
        inputs = [query_NHD, key_NKD, value_NKD, *([] if sinks_H is None else [sinks_H])]
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        tuning = self._tuning or _tuning(query_NHD, value_NKD, softcap is not None)
        kernels = [tuning.forward, tuning.query_grad, tuning.key_grad] if grad else [tuning.forward]
        most = min(blocks.m for blocks in kernels)
        if group > most:
            raise ConfigError(
                f"prefix_attention: backend 'triton' takes up to {most} query heads a key head here, got {group}"
            )
        tables, slots = self._query_tables(tuning.forward, group, key_heads, window, tuning.programs, device)
        grad_tables: list[torch.Tensor] = []
        if grad:
            grad_tables = [
                *self._query_tables(tuning.query_grad, group, key_heads, window, 1, device)[0],
                *self._key_tables(tuning.key_grad, group, window, device),
            ]
        out, lse = attend(
            query_NHD,
            key_NKD,
            value_NKD,
            sinks_H,
            tables,
            grad_tables,
            slots,
            self._covered == len(query_NHD),
            float(scale),
            float(softcap or 0.0),
            _numbers(tuning.forward, tuning.tma),
            [
                *_numbers(tuning.query_grad, tuning.tma),
                *_numbers(tuning.key_grad, False),
                int(tuning.fused_key_grad),
            ],
        )
        return out, lse

    def _query_tables(
        self, blocks: Blocks, group: int, key_heads: int, window: int | None, programs: int, device: torch.device
    ) -> tuple[list[torch.Tensor], int]:
        """In the order that ``triton_ops`` takes them, and the number of slots."""
        key = ("query", blocks.m // group, blocks.n, window, programs, key_heads, device)
        if key not in self._tables:
            self._tables[key] = _make_query_tables(
                self.spans, blocks.m // group, blocks.n, window, programs, key_heads, device
            )
        return self._tables[key]

    def _key_tables(self, blocks: Blocks, group: int, window: int | None, device: torch.device) -> list[torch.Tensor]:
        key = ("key", blocks.m // group, blocks.n, window, device)
        if key not in self._tables:
            self._tables[key] = _make_key_tables(self.spans, blocks.m // group, blocks.n, window, device), 0
        return self._tables[key][0]


@torch.compiler.disable
def _make_query_tables(
    spans: SpanRanges,
    tile_rows: int,
    block_n: int,
    window: int | None,
    programs: int,
    key_heads: int,
    device: torch.device,
) -> tuple[list[torch.Tensor], int]:
    plan = plan_queries(
        spans, tile_rows=tile_rows, block_n=block_n, window=window, programs=programs, key_heads=key_heads
    )
    blocks = [plan.segments, plan.edges, plan.edge_low, plan.edge_high]
    return _to_device([plan.items, plan.tile_rows, *blocks, plan.splits, plan.whole_items], device), plan.slots


@torch.compiler.disable
def _make_key_tables(
    spans: SpanRanges, tile_rows: int, block_n: int, window: int | None, device: torch.device
) -> list[torch.Tensor]:
    plan = plan_keys(spans, tile_rows=tile_rows, block_n=block_n, window=window)
    return _to_device([plan.tiles, plan.segments, plan.edge_rows, plan.edge_low, plan.edge_high], device)


def _to_device(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """One copy for all of them; from pinned memory, so that the host does not wait for it.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for pointers that do not.
    """
    padded = [np.pad(a.reshape(-1), (0, -a.size % ALIGNED)) for a in arrays]
    with torch.inference_mode(False):  # a plan made while scoring may serve training later
        flat = torch.from_numpy(np.concatenate(padded))
        if device.type == "cuda":
            flat = flat.pin_memory().to(device, non_blocking=True)
        parts = flat.split([len(p) for p in padded])
        return [part[: a.size].view(a.shape) for part, a in zip(parts, arrays, strict=True)]


def _tuning(query: torch.Tensor, value: torch.Tensor, softcap: bool) -> Tuning:
    capability, programs = (8, 0), 1  # the interpreter
    if query.device.type == "cuda":
        capability = torch.cuda.get_device_capability(query.device)
        programs = torch.cuda.get_device_properties(query.device).multi_processor_count
    dims = query.shape[2], value.shape[2]
    return choose(query.dtype, *dims, softcap=softcap, capability=capability, programs=programs)


def _numbers(blocks: Blocks, tma: bool) -> list[int]:
    return [blocks.m, blocks.n, blocks.warps, blocks.stages, int(tma)]
