"""The shipped configurations of the Triton kernels, as ``triton_impl.py`` launches them, for ``make kernels-check``.

Every tiling is listed without features and, where it is launched with them, with all of them (bias, softcap, entropy):
between the two lie fewer live registers, not other code. float16 differs from bfloat16 in the instructions' type only
and is listed for the widest tiling.
"""

from __future__ import annotations

from collections.abc import Iterator

from trace_fast.kernels.common.compile_cases import CompileCase
from trace_fast.kernels.token_logprob import triton_kernels
from trace_fast.kernels.token_logprob.tiling import FLOAT32, GROUP, MERGE, NARROW, PLAIN, WIDE, Tiling

TYPES = {
    "targets_M": "*i64",
    "starts_S": "*i32",
    "mean_S": "*fp64",
    "logit_scale": "fp32",
    "softcap": "fp32",
    "inverse_temperature": "fp32",
}


def compile_cases() -> list[CompileCase]:
    """Names end in the sizes of the blocks: rows x columns x depth."""
    return [*_forward_cases(), *_gradient_cases(), *_merge_cases()]


def _forward_cases() -> Iterator[CompileCase]:
    for tiling, archs in ((WIDE, (90,)), (NARROW, (90, 100)), (PLAIN, (80, 90, 100))):
        for size in (tiling, tiling.half()):
            for featured in (False, True) if tiling is not WIDE else (False,):
                yield _product_case("partials", "bf16", size, featured, archs)
    yield _product_case("partials", "fp16", WIDE, False, (90,))
    for featured in (False, True):
        yield _product_case("partials", "fp32", FLOAT32, featured, (80, 90, 100))


def _gradient_cases() -> Iterator[CompileCase]:
    for tiling, archs in ((NARROW, (90, 100)), (PLAIN, (80, 90, 100))):
        for size in (tiling, tiling.half()):
            for featured in (False, True):
                yield _product_case("gradient", "bf16", size, featured, archs)
    yield _product_case("gradient", "fp32", FLOAT32, True, (80, 90, 100))


def _merge_cases() -> Iterator[CompileCase]:
    for name, finish, segments in (("rows", True, False), ("segments", True, True), ("parts", False, False)):
        flags = {"FINISH": finish, "MOMENT": finish, "SEGMENTS": segments, "HAS_IGNORE": finish}
        constants: dict[str, object] = {"BLOCK_M": MERGE.rows, "BLOCK_T": MERGE.tiles, **flags}
        if not finish:
            constants |= {"moment_TM": None}
        if not segments:
            constants |= {"starts_S": None}
        yield _case(f"token_logprob merge {name}", "merge", "fp32", constants, MERGE.warps, 3, False, (80, 90, 100))


def _product_case(kernel: str, dtype: str, tiling: Tiling, featured: bool, archs: tuple[int, ...]) -> CompileCase:
    constants: dict[str, object] = {
        "BLOCK_M": tiling.rows,
        "BLOCK_V": tiling.columns,
        "BLOCK_H": tiling.depth,
        "TMA": tiling.tma,
        "HAS_BIAS": featured,
        "HAS_SOFTCAP": featured,
        "hidden_stride": 1,
        "weight_stride": 1,
    }
    if not featured:
        constants["bias"] = None
    if kernel == "partials":
        constants |= {"GROUP": GROUP, "MOMENT": featured} | ({} if featured else {"moment_TM": None})
    else:
        constants |= {"CURVE": featured} | ({} if featured else {"curve_M": None})
    loads = "tma" if tiling.tma else "pointers"
    features = "bias+softcap+entropy" if featured else "plain"
    name = f"token_logprob {kernel} {dtype} {loads} {features} {tiling.rows}x{tiling.columns}x{tiling.depth}"
    types = {name: f"*{dtype}" for name in ("hidden", "weight", "bias", "out_MC")}
    if tiling.tma:
        types["hidden"] = f"tensordesc<{dtype}[{tiling.rows}, {tiling.depth}]>"
        types["weight"] = f"tensordesc<{dtype}[{tiling.columns}, {tiling.depth}]>"
    return _case(name, kernel, dtype, constants, tiling.warps, tiling.stages, dtype != "fp32", archs, types)


def _case(
    name: str,
    kernel: str,
    dtype: str,
    constants: dict[str, object],
    warps: int,
    stages: int,
    wants_wgmma: bool,
    archs: tuple[int, ...],
    types: dict[str, str] | None = None,
) -> CompileCase:
    function = getattr(triton_kernels, kernel)
    types = TYPES | (types or {})
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument) or _type_by_name(argument)
        for argument in function.arg_names
    }
    aligned = [argument for argument, type_ in signature.items() if type_.startswith("*") or "row_stride" in argument]
    if "hidden_size" in signature:
        aligned.append("hidden_size")
    return CompileCase(name, function, signature, constants, warps, stages, wants_wgmma, tuple(aligned), archs)


def _type_by_name(argument: str) -> str:
    if argument.endswith("_stride"):
        return "i64"
    return "*fp32" if argument.endswith(("_M", "_TM", "_S")) else "i32"
