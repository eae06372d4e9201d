"""Every shipped configuration of the Triton kernels, for the check that compiles them without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton

from trace_fast.kernels.common.compile_cases import CompileCase
from trace_fast.kernels.prefix_attention.triton_backward import delta_kernel, key_grad_kernel, query_grad_kernel
from trace_fast.kernels.prefix_attention.triton_config import (
    LARGE,
    LARGE_ARCHS,
    LARGE_TIGHT,
    SMALL,
    SMALL_ARCHS,
    Blocks,
    Tuning,
    padded,
)
from trace_fast.kernels.prefix_attention.triton_forward import forward_kernel, merge_kernel
from trace_fast.kernels.prefix_attention.triton_ops import DELTA_PAIRS, MERGE_PAIRS

TYPES = {True: ("bf16", "fp16"), False: ("fp32",)}
GROUP = 4
TENSORS = ("query", "key", "value", "sinks", "out", "grad_out", "grad_query", "grad_key", "grad_value")
FLOATS = ("lse", "delta", "grad_lse", "part_out", "part_lse")
SCALARS = {"scale": "fp32", "softcap": "fp32", "n_rows": "i32", "n_pairs": "i32"}


def compile_cases() -> list[CompileCase]:
    """Forward, merge and backward kernels per kind of device, head dim and dtype, plain and with every feature.

    float16 differs from bfloat16 in its conversions only: with every feature.
    """
    cases = []
    for plain, featured, archs in ((LARGE, LARGE_TIGHT, LARGE_ARCHS), (SMALL, SMALL, SMALL_ARCHS)):
        for half, dim in plain:
            for dtype in TYPES[half]:
                if dtype != "fp16":
                    cases += _of_tuning(plain[half, dim], dtype, dim, False, archs)
                cases += _of_tuning(featured[half, dim], dtype, dim, True, archs)
        cases.append(_forward(featured[True, 128], "bf16", 80, True, archs))  # loads are masked
    return cases


def _of_tuning(tuning: Tuning, dtype: str, dim: int, features: bool, archs: tuple[int, ...]) -> list[CompileCase]:
    query, key = tuning.query_grad, tuning.key_grad
    query_grad = _constants(query, dtype, dim, features) | {"TMA": tuning.tma}
    key_grad = _constants(key, dtype, dim, features)
    cases = [
        _forward(tuning, dtype, dim, features, archs),
        _case("query-grad", query_grad_kernel, dtype, dim, query, query_grad, archs, products=True),
    ]
    for keys, values in [(True, True)] if tuning.fused_key_grad else [(True, False), (False, True)]:
        name = "key-grad" + (" k" if not values else " v" if not keys else "")
        constants = key_grad | {"KEYS": keys, "VALUES": values}
        cases.append(_case(name, key_grad_kernel, dtype, dim, key, constants, archs, products=True))
    if features and dtype != "fp16":
        m = tuning.forward.m
        value = {"DV": dim, "BLOCK_DV": padded(dim)}
        merge = {"GROUP": GROUP, "TILE_ROWS": m // GROUP, "BLOCK_M": m, "BLOCK_P": MERGE_PAIRS, "SINKS": True, **value}
        delta = {"HEADS": 32, "BLOCK_P": DELTA_PAIRS, **value}
        cases.append(_case("merge", merge_kernel, dtype, dim, Blocks(m, 0, 4, 3), merge, archs, products=False))
        blocks = Blocks(DELTA_PAIRS, 0, 4, 3)
        cases.append(_case("delta", delta_kernel, dtype, dim, blocks, delta, archs, products=False))
    return cases


def _forward(tuning: Tuning, dtype: str, dim: int, features: bool, archs: tuple[int, ...]) -> CompileCase:
    constants = _constants(tuning.forward, dtype, dim, features) | {"SINKS": features, "TMA": tuning.tma}
    return _case("forward", forward_kernel, dtype, dim, tuning.forward, constants, archs, products=True)


def _constants(blocks: Blocks, dtype: str, dim: int, features: bool) -> dict[str, object]:
    return {
        "GROUP": GROUP,
        "TILE_ROWS": blocks.m // GROUP,
        "D": dim,
        "DV": dim,
        "BLOCK_M": blocks.m,
        "BLOCK_N": blocks.n,
        "BLOCK_D": padded(dim),
        "BLOCK_DV": padded(dim),
        "SOFTCAP": features,
        "ACCURATE": dtype == "fp32",
    }


def _case(
    name: str,
    kernel: triton.JITFunction[Any],
    dtype: str,
    dim: int,
    blocks: Blocks,
    constants: Mapping[str, object],
    archs: tuple[int, ...],
    *,
    products: bool,
) -> CompileCase:
    def type_of(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        if argument in ("key", "value") and constants.get("TMA"):
            return f"tensordesc<{dtype}[1,{blocks.n},{padded(dim)}]>"
        if argument in TENSORS:
            return f"*{dtype}"
        if argument in FLOATS:
            return "*fp32"
        return SCALARS.get(argument, "i32" if argument.endswith("_stride") else "*i32")

    signature = {argument: type_of(argument) for argument in kernel.arg_names}
    features = " softcap sinks" if constants.get("SINKS") else " softcap" if constants.get("SOFTCAP") else ""
    sizes = f"d{dim} {blocks.m}x{blocks.n}" if blocks.n else f"d{dim}"
    return CompileCase(
        name=f"prefix_attention {name} {dtype} {sizes}{' tma' if constants.get('TMA') else ''}{features}",
        kernel=kernel,
        signature=signature,
        constants=constants,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        wants_wgmma=products and dtype != "fp32",
        aligned=tuple(a for a, t in signature.items() if t.startswith("*") or a.endswith("_stride")),
        archs=archs,
    )
