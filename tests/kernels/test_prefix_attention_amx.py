"""The C++ attention on AMX tiles: its own source on emulated tiles, and its instructions in the module as built.

A processor with AMX runs the cases marked ``needs_amx`` as they are. On others a process of its own runs these, and the
tests of all code paths, on a build whose tiles are emulated.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from span_trees import tree, visible_pairs

from trace_fast import native
from trace_fast.kernels.prefix_attention.native_impl import DTYPES, NativePlan, kernels
from trace_fast.kernels.prefix_attention.reference import ReferencePlan
from trace_fast.layout import SpanRanges

pytestmark = pytest.mark.skipif(not native.status().available, reason=f"native module: {native.status().reason}")

HERE = Path(__file__)
REPOSITORY = HERE.parents[2]
AMX = "amx_bf16"
OTHERS = ("test_prefix_attention_native.py", "test_prefix_attention.py")
SELECTED = f"{AMX} or test_prefix_attention_native or test_head_dims_and_groups"
FEATURES: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 70},
    {"softcap": 2.0},
    {"sinks": True},
    {"window": 9, "softcap": 3.0, "sinks": True},
    {"scale": -0.3},
]


def available() -> list[str]:
    return kernels(torch.bfloat16) if native.status().available else []


@cache
def missing_for_emulation() -> str | None:
    """Why the kernel cannot be built and run on emulated tiles here, if so."""
    tools = [name for name in ("cmake", "c++") if shutil.which(name) is None]
    if tools:
        return f"{' and '.join(tools)} not found"
    if importlib.util.find_spec("pybind11") is None:
        return "the Python package pybind11 is not installed"
    if native.status().available and "avx512_bf16" not in available():
        return "all but the tiles needs AVX-512 BF16, which this processor does not have"
    return None


@cache
def missing_for_disassembly() -> str | None:
    """Why AMX instructions cannot be looked for in the module, if so."""
    tools = [name for name in ("c++", "objdump") if shutil.which(name) is None]
    if tools:
        return f"{' and '.join(tools)} not found"
    command = ["c++", "-x", "assembler", "-c", "-", "-o", os.devnull]
    known = subprocess.run(command, input="tdpbf16ps %tmm2, %tmm1, %tmm0\n", text=True, capture_output=True)
    return f"the assembler does not know AMX: {known.stderr.strip()}" if known.returncode else None


def needs_amx(test: Any) -> Any:
    return pytest.mark.skipif(AMX not in available(), reason=f"no {AMX} here; test_on_emulated_tiles runs this")(test)


def build_on_emulated_tiles(folder: Path) -> Path:
    """Folder with the built module."""
    pybind11 = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], check=True, capture_output=True, text=True
    ).stdout.strip()
    options = {
        "TRACE_FAST_EMULATE_AMX": "ON",
        "TRACE_FAST_CUDA": "OFF",
        "CMAKE_BUILD_TYPE": "Release",
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11,
        "TRACE_FAST_OUTPUT_DIR": str(folder / "out"),
    }
    steps = [
        ["cmake", "-S", str(REPOSITORY), "-B", str(folder), *(f"-D{name}={value}" for name, value in options.items())],
        ["cmake", "--build", str(folder)],
    ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder / "out"


@pytest.mark.skipif(AMX in available(), reason=f"{AMX} runs here, and all tests run on it")
@pytest.mark.skipif(missing_for_emulation() is not None, reason=str(missing_for_emulation()))
def test_on_emulated_tiles(tmp_path: Path) -> None:
    """None of the selected tests may be skipped: they are there for the kernel that this build offers first."""
    module = build_on_emulated_tiles(tmp_path)
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:benchmark"),
        *("-p", "native_build", "--native-build", str(module), "-k", SELECTED),
        *(str(HERE.with_name(name)) for name in (HERE.name, *OTHERS)),
    ]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}

    def pytest_output(*arguments: str) -> str:
        done = subprocess.run(
            [*command, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=1800
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        return done.stdout

    collected = re.findall(r"^tests/kernels/(\S+?)::(\w+)", pytest_output("--collect-only"), re.MULTILINE)
    assert {file for file, _ in collected} == {HERE.name, *OTHERS}
    assert (HERE.name, test_amx_bf16_comes_first.__name__) in collected
    summary = pytest_output().splitlines()[-1]
    assert re.match(rf"{len(collected)} passed, \d+ deselected\b", summary), summary


@pytest.mark.skipif(missing_for_disassembly() is not None, reason=str(missing_for_disassembly()))
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is built for Linux, which hands the tiles out")
def test_its_instructions_are_in_the_module() -> None:
    command = ["objdump", "-d", "--no-show-raw-insn", native.module().__file__]
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for instruction in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tilestored", "tilezero", "tilerelease"):
        assert re.search(rf"\t{instruction}\b", code), instruction
    assert set(re.findall(r"%tmm\d+", code)) == {f"%tmm{tile}" for tile in range(8)}


def test_it_is_not_offered_without_amx() -> None:
    features = native.cpu_features()
    if features["amx_tile"] and features["amx_bf16"]:
        pytest.skip("this processor has AMX")
    for dtype in DTYPES:
        assert AMX not in kernels(dtype)


@needs_amx
def test_amx_bf16_comes_first() -> None:
    assert kernels(torch.bfloat16)[:2] == [AMX, "avx512_bf16"]
    assert AMX not in [*kernels(torch.float32), *kernels(torch.float16)]


def inputs(rows: int, heads: int, dim: int, value_dim: int) -> list[torch.Tensor]:
    return [torch.randn(rows, h, d).bfloat16() for h, d in ((heads, dim), (2, dim), (2, value_dim))]


def run(
    plan: Any, tensors: list[torch.Tensor], *, sinks: bool = False, **features: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    settings = {"scale": 0.3, "window": None, "softcap": None} | features
    sinks_H = torch.linspace(-2, 3, tensors[0].shape[1]).bfloat16().to(tensors[0].dtype) if sinks else None
    out, lse = plan.run(*tensors, **settings, sinks_H=sinks_H)
    return out.double(), lse.double()


@needs_amx
@pytest.mark.parametrize("group", [1, 3, 7, 8])
@pytest.mark.parametrize("dim", [32, 40, 64, 72, 128, 160, 256])
def test_amx_bf16_is_no_further_from_the_truth_than_eager_attention(dim: int, group: int) -> None:
    """And no further from the code path without tiles than the two may be from the truth."""
    unit = torch.finfo(torch.bfloat16).eps
    for seed, features in enumerate(FEATURES):
        spans = tree(seed, longest=(20, 90, 200)[seed % 3])  # with empty spans, and rows of no span
        tensors = inputs(spans.n_rows + 3, 2 * group, dim, value_dim=(dim, 24, 96)[seed % 3])
        truth, true_lse = run(ReferencePlan(spans), [t.double() for t in tensors], **features)
        eager, _ = run(ReferencePlan(spans), tensors, **features)
        ours, lse = run(NativePlan(spans, AMX), tensors, **features)
        other, _ = run(NativePlan(spans, "avx512_bf16"), tensors, **features)
        error, allowed = (ours - truth).abs(), (eager - truth).abs()
        # Weights are rounded to bfloat16 before the second product: each is off by up to half a unit, so the output by
        # up to half a unit of the largest value, one unit with the final rounding.
        largest = tensors[2].double().abs().max()
        assert error.max() <= 2 * allowed.max() + unit * largest
        assert error.mean() <= 1.25 * allowed.mean() + unit * largest / 64
        # Both round the same weights, but where a sum in another order falls on the other side of a border.
        assert (ours - other).abs().max() <= 2 * unit * largest
        assert (ours - other).abs().mean() <= unit * largest / 64
        seen = true_lse > -math.inf
        assert torch.equal(lse > -math.inf, seen)
        assert (ours[~seen] == 0).all()
        # Of float32, a score: half a unit for each of `dim` additions and some for its scaling, 24 for the power of 2.
        query, key = (t.double().norm(dim=-1).max() for t in tensors[:2])
        slack = (dim / 2 + 24) * torch.finfo(torch.float32).eps * 0.3 * query * key
        torch.testing.assert_close(lse[seen], true_lse[seen], rtol=0, atol=float(slack))


def last_rows(total: int, count: int) -> SpanRanges:
    """A path of `total` rows, the last `count` of which are asked for."""
    first = total - count
    return SpanRanges(
        n_rows=total,
        starts=np.array([first]),
        ends=np.array([total]),
        depths=np.array([first]),
        ranges=np.array([[0, first]]),
        cu_ranges=np.array([0, 1]),
    )


@needs_amx
@pytest.mark.parametrize("broken", [False, True], ids=["finite", "broken"])
@pytest.mark.parametrize("group", [1, 3, 7, 8])
def test_amx_bf16_gives_a_row_its_bits_in_tiles_of_any_height(group: int, broken: bool) -> None:
    """Also where a value that only the last row sees sends its block through code for single rows."""
    total = 150
    tensors = inputs(total, 2 * group, 72, 40)
    whole, lse = run(NativePlan(SpanRanges.single(total), AMX), tensors)
    if broken:
        tensors[2][total - 1] = math.inf
    for count in (*range(2, 20), 31, 32, 33, 47, 48, 49, 149):
        part, part_lse = run(NativePlan(last_rows(total, count), AMX), tensors)
        rows = slice(total - count, total - broken)
        assert torch.equal(part[rows], whole[rows]), count
        assert torch.equal(part_lse[rows], lse[rows]), count
        assert part[total - 1].isfinite().all() != broken


@needs_amx
@pytest.mark.parametrize("window", [None, 9], ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_amx_bf16_keeps_what_is_not_finite_on_its_path(place: int, poison: float, window: int | None) -> None:
    spans = tree(4, longest=90)
    tensors = inputs(spans.n_rows, 6, 40, 40)
    visible = torch.as_tensor(visible_pairs(spans, window)).bool()
    clean, _ = run(NativePlan(spans, AMX), tensors, window=window)
    assert clean.isfinite().all()
    seen_rows = visible.any(1).nonzero().flatten().tolist()
    for row in (seen_rows[0], seen_rows[len(seen_rows) // 3], seen_rows[-1]):
        dirty = [t.clone() for t in tensors]
        dirty[place][row, 0, 5] = poison
        ours, _ = run(NativePlan(spans, AMX), dirty, window=window)
        other, _ = run(NativePlan(spans, "avx512_bf16"), dirty, window=window)
        reached = torch.arange(spans.n_rows) == row if place == 0 else visible[:, row]
        assert torch.equal(ours[~reached], clean[~reached])
        assert torch.equal(ours[:, 3:], clean[:, 3:]), "heads of another key head"
        assert torch.equal(ours.isfinite(), other.isfinite())
        if math.isnan(poison):
            assert ours[reached, 0].isnan().any(-1).all()
