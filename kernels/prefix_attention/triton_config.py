"""Block sizes, warps and stages that the Triton kernels of prefix_attention are launched with.

Two sets: *large* for sm_90 and sm_100 (227 KB of shared memory a program, TMA), *small* for everything from sm_80 on
(they fit into 99 KB, so that sm_86, sm_89 and sm_120 run them too). ``make kernels-check`` compiles both and prints
what they cost. Head dims are those after padding to a power of two. wgmma on sm_90 works on 64 rows a warp group: the
row-head pairs of the forward and the query gradient, the keys of the key gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

LARGE_ARCHS, SMALL_ARCHS = (90, 100), (80,)
# Products of float32 run on the ordinary units, whose operands of 256 columns do not fit into registers.
MAX_HEAD_DIM = {torch.float32: 128, torch.bfloat16: 256, torch.float16: 256}


@dataclass(frozen=True, slots=True)
class Blocks:
    """One kernel: row-head pairs and keys a block, warps, pipeline stages."""

    m: int
    n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """All kernels of one dtype and head dim on one device.

    Args:
        forward, query_grad, key_grad: their blocks.
        tma: whether key blocks come through tensor descriptors.
        fused_key_grad: gradients of keys and values in one launch; two where one program's registers cannot hold both.
        programs: how many programs the device runs at a time, to decide on splits.
    """

    forward: Blocks
    query_grad: Blocks
    key_grad: Blocks
    tma: bool
    fused_key_grad: bool
    programs: int = 1


# (half precision?, padded head dim) -> tuning; 32 takes that of 64
LARGE: dict[tuple[bool, int], Tuning] = {
    (True, 64): Tuning(Blocks(128, 64, 4, 3), Blocks(128, 64, 8, 2), Blocks(64, 128, 8, 2), True, True),
    (True, 128): Tuning(Blocks(128, 128, 8, 2), Blocks(128, 64, 8, 2), Blocks(32, 128, 8, 2), True, True),
    (True, 256): Tuning(Blocks(128, 32, 8, 3), Blocks(128, 16, 8, 2), Blocks(16, 128, 8, 2), True, False),
    (False, 64): Tuning(Blocks(32, 32, 4, 2), Blocks(32, 16, 4, 1), Blocks(16, 16, 4, 2), False, True),
    (False, 128): Tuning(Blocks(32, 16, 8, 2), Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1), False, True),
}
# softcap, and head dims whose loads are masked, need registers that the wider blocks leave none of
LARGE_TIGHT = {**LARGE, (True, 128): replace(LARGE[True, 128], forward=Blocks(128, 64, 8, 3))}
SMALL: dict[tuple[bool, int], Tuning] = {
    (True, 64): Tuning(Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(32, 64, 4, 1), False, True),
    (True, 128): Tuning(Blocks(64, 32, 4, 3), Blocks(64, 32, 4, 2), Blocks(32, 64, 4, 1), False, True),
    (True, 256): Tuning(Blocks(64, 32, 8, 1), Blocks(32, 32, 4, 1), Blocks(16, 32, 4, 1), False, False),
    (False, 64): LARGE[False, 64],
    (False, 128): LARGE[False, 128],
}


def padded(dim: int) -> int:
    """Next power of two, at least 32: what block shapes and tensor cores ask for."""
    return max(32, 1 << (dim - 1).bit_length())


def choose(
    dtype: torch.dtype, query_dim: int, value_dim: int, *, softcap: bool, capability: tuple[int, int], programs: int
) -> Tuning:
    """Tuning for these head dims on a device of this compute capability that runs ``programs`` at a time."""
    largest = max(query_dim, value_dim)
    tight = softcap or min(query_dim, value_dim) < padded(largest)
    large = LARGE_TIGHT if tight else LARGE
    table = large if capability[0] * 10 in LARGE_ARCHS else SMALL
    return replace(table[dtype != torch.float32, max(64, padded(largest))], programs=programs)
