"""A shipped configuration of a Triton kernel, described so that it can be compiled without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CompileCase:
    """One kernel with the constants, warps and stages it is launched with.

    Args:
        name: for the table, ``op kernel dtype sizes``.
        kernel: the ``triton.jit`` function.
        signature: Triton type of every argument, in order: ``"*bf16"``, ``"i64"``, ``"fp32"``, ``"constexpr"``,
            ``"tensordesc<bf16[1,64,128]>"``.
        constants: values of the ``constexpr`` arguments.
        num_warps, num_stages: as in the launch.
        wants_wgmma: whether its matrix products must run on Hopper's warp-group instructions.
        aligned: arguments that are divisible by 16 in every launch (pointers and strides), as the launcher
            specialises them.
        archs: the compute capabilities that this configuration is launched on.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int
    num_stages: int
    wants_wgmma: bool
    aligned: tuple[str, ...] = ()
    archs: tuple[int, ...] = (80, 90, 100)
