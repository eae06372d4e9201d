"""prefix_attention in C++ on the CPU (``csrc/cpu/prefix_attention.h``): the code path that the processor allows.

Differentiable (``native_backward``: torch's matrix products). A row's result depends on its own path alone, bit for
bit, whatever it is packed with and however many threads there are (``torch.get_num_threads()`` of them are used).
float32 and float16 are computed in float32; bfloat16 has products in bfloat16 and sums in float32 where the processor
has AVX-512 BF16 (on AMX tiles where it has them), else float32.
"""

from __future__ import annotations

from typing import Any

import torch

from trace_fast import native
from trace_fast.errors import ConfigError
from trace_fast.kernels.common.derivatives import first_order_only, refuse_tangents
from trace_fast.kernels.prefix_attention.native_backward import prefix_attention_backward
from trace_fast.kernels.prefix_attention.native_plan import plan_blocks
from trace_fast.layout import SpanRanges

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int | None = None) -> str | None:
    """Why this implementation cannot run such tensors here; ``None`` when it can (any ``head_dim``)."""
    state = native.status()
    return _unfit(device, dtype) or (None if state.available else f"the native module is {state.reason}")


def _unfit(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"the C++ kernel runs on the CPU, got {device}"
    return None if dtype in DTYPES else f"the C++ kernel takes float32, bfloat16 or float16, got {dtype}"


def kernels(dtype: torch.dtype) -> list[str]:
    """Code paths that this processor runs for a dtype, fastest first.

    Of ``amx_bf16`` and ``avx512_bf16`` (bfloat16 only), ``avx512``, ``avx2`` and ``baseline``. ``amx_bf16`` has been
    run on emulated tiles only, never on a chip; name another code path in ``NativePlan`` to go without it.

    Raises:
        ConfigError: the native module is not available.
    """
    return list(native.module().prefix_attention_kernels(str(dtype)))


class NativePlan:
    """Block table of a pack, shared by all its layers.

    Args:
        spans: the pack's visibility.
        kernel: a code path of ``kernels(dtype)``; empty is the fastest.

    Raises:
        ConfigError: the native module is not available.
    """

    def __init__(self, spans: SpanRanges, kernel: str = "") -> None:
        native.module()
        table = plan_blocks(spans)
        self.spans = spans
        self.kernel = kernel
        with torch.inference_mode(False):  # tensors made in that mode could not be saved for a backward pass
            self._tables = [torch.from_numpy(t) for t in (table.block_rows, table.path_blocks, table.spans)]

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
        """Output and ``(N, H) float32`` log-sum-exp of each row's scores (nats), sink included.

        Raises:
            ConfigError: a device or dtype that this implementation does not run.
        """
        reason = _unfit(query_NHD.device, query_NHD.dtype)
        if reason is not None:
            raise ConfigError(f"prefix_attention: backend 'native': {reason}")
        refuse_tangents("prefix_attention", "native", query=query_NHD, key=key_NKD, value=value_NKD, sinks=sinks_H)
        query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (query_NHD, key_NKD, value_NKD))
        sinks = None if sinks_H is None else sinks_H.float().contiguous()
        return _prefix_attention(
            query, key, value, *self._tables, scale, window or 0, softcap or 0.0, sinks, self.kernel
        )


@torch.library.custom_op("trace_fast::prefix_attention_native", mutates_args=())
def _prefix_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_rows: torch.Tensor,
    path_blocks: torch.Tensor,
    spans: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
    lse = query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
    native.module().prefix_attention(
        query, key, value, out, lse, block_rows, path_blocks, spans, scale, window, softcap, sinks,
        torch.get_num_threads(), kernel or kernels(query.dtype)[0],
    )  # fmt: skip
    return out, lse


@_prefix_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_rows: torch.Tensor,
    path_blocks: torch.Tensor,
    spans: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    return out, query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("trace_fast::prefix_attention_native_backward", mutates_args=())
def _prefix_attention_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    block_rows: torch.Tensor,
    path_blocks: torch.Tensor,
    spans: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> list[torch.Tensor]:
    found = prefix_attention_backward(
        grad_out, grad_lse, query, key, value, out, lse, block_rows, path_blocks, spans,
        scale=scale, window=window, softcap=softcap, sinks_H=sinks,
    )  # fmt: skip
    return [gradient for gradient in found if gradient is not None]


@_prefix_attention_backward.register_fake
def _(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    block_rows: torch.Tensor,
    path_blocks: torch.Tensor,
    spans: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> list[torch.Tensor]:
    like = [query.new_empty(t.shape) for t in (query, key, value)]
    return like if sinks is None else [*like, sinks.new_empty(sinks.shape, dtype=torch.float32)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, block_rows, path_blocks, spans, scale, window, softcap, sinks, _ = inputs
    ctx.save_for_backward(query, key, value, *output, block_rows, path_blocks, spans, sinks)
    ctx.settings = (scale, window, softcap)


def _backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *tensors, sinks = ctx.saved_tensors
    found = _prefix_attention_backward(grad_out, grad_lse, *tensors, *ctx.settings, sinks)
    inputs = (grad_out, grad_lse, *tensors[:3], sinks)
    found = first_order_only("prefix_attention", "native", inputs, found)
    return (*found[:3], None, None, None, None, None, None, found[3] if sinks is not None else None, None)


_prefix_attention.register_autograd(_backward, setup_context=_setup)


__all__ = ["DTYPES", "NativePlan", "kernels", "why_not"]
