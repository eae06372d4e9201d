"""How the Triton kernels of token_logprob cut their products: by device, dtype, features and number of rows.

Plain integers, decided on the host; nothing here needs Triton or a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from trace_fast.kernels.token_logprob.problem import Problem

GROUP = 16  # row blocks that walk through the vocabulary together


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of a product's blocks and how they are loaded."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    tma: bool

    def half(self) -> Tiling:
        """Half the rows with half the warps: every row sees the same instructions in the same order."""
        return replace(self, rows=self.rows // 2, warps=self.warps // 2)


@dataclass(frozen=True, slots=True)
class MergeTiling:
    """Rows and vocabulary tiles that a program of the merge reads at a time."""

    rows: int
    tiles: int
    warps: int


MERGE = MergeTiling(rows=32, tiles=128, warps=8)
# Accumulators of 128 x 256 leave no registers for a bias, a softcap or a moment: those run on 128 columns, as does
# everything outside compute capability 9. Without descriptors three stages, so that 99 KiB of shared memory are enough.
# Float32 has no exact tensor core product: its products are FMAs.
WIDE = Tiling(rows=128, columns=256, depth=64, warps=8, stages=4, tma=True)
NARROW = Tiling(rows=128, columns=128, depth=64, warps=8, stages=4, tma=True)
PLAIN = Tiling(rows=128, columns=128, depth=64, warps=8, stages=3, tma=False)
FLOAT32 = Tiling(rows=64, columns=64, depth=32, warps=4, stages=2, tma=False)


def choose_tiling(problem: Problem, *, entropy: bool) -> Tiling:
    """Of the forward pass. The number of rows decides only between a tiling and its half, which give the same bits."""
    hidden, weight = problem.hidden_MH, problem.weight_VH
    if hidden.dtype == torch.float32:
        return FLOAT32
    capability = torch.cuda.get_device_capability(hidden.device)[0] if hidden.is_cuda else 9
    plain = problem.bias_V is None and problem.softcap is None and not entropy
    tiling = WIDE if plain and capability == 9 else NARROW
    if capability < 9 or not (_has_descriptor(hidden) and _has_descriptor(weight)):
        tiling = PLAIN
    return tiling.half() if len(hidden) <= tiling.rows // 2 else tiling


def choose_splits(row_blocks: int, tiles: int, processors: int) -> int:
    """How many shares the vocabulary is cut into: the fewest steps (rounds of programs times tiles of a program).

    At least ``processors / GROUP`` shares, so that the programs at work at one time span at most GROUP row blocks.
    """
    least = max(processors // min(GROUP, row_blocks), 1)
    candidates = {min(max(rounds * processors // row_blocks, least), tiles) for rounds in (1, 2, 3, 4)}
    steps = {splits: -(-row_blocks * splits // processors) * -(-tiles // splits) for splits in candidates}
    return min(candidates, key=lambda splits: (steps[splits], splits))


def rows_per_slice(tiles: int, buffers: int, scratch_bytes: int) -> int:
    """Rows whose ``buffers`` float32 (tiles, rows) buffers fit into ``scratch_bytes``: whole blocks, one at least."""
    return max(scratch_bytes // (4 * tiles * buffers) // WIDE.rows, 1) * WIDE.rows


def _has_descriptor(matrix: torch.Tensor) -> bool:
    """What the tensor memory accelerator asks of a matrix: 16-byte rows, contiguous inside."""
    size = matrix.element_size()
    return matrix.stride(1) == 1 and matrix.stride(0) * size % 16 == 0 and matrix.data_ptr() % 16 == 0
