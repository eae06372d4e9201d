"""How the Triton kernels of token_logprob cut their work: integers that need neither Triton nor a GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trace_fast.kernels.token_logprob.problem import Problem
from trace_fast.kernels.token_logprob.tiling import (
    FLOAT32,
    GROUP,
    NARROW,
    PLAIN,
    WIDE,
    choose_splits,
    choose_tiling,
    rows_per_slice,
)

H100 = 132  # streaming multiprocessors


def tiles_of(vocabulary: int, columns: int = WIDE.columns) -> int:
    return -(-vocabulary // columns)


@pytest.mark.parametrize("vocabulary", [50257, 131072, 151936])
@pytest.mark.parametrize("rows", [64, 100, 128, 500, 1024, 2048, 2176, 3000, 4096, 48000])
def test_the_chip_is_kept_full(rows: int, vocabulary: int) -> None:
    """Rounds of programs times their tiles, against the tiles that every processor would have to do at least."""
    row_blocks = -(-rows // (WIDE.rows if rows > 64 else WIDE.rows // 2))
    tiles = tiles_of(vocabulary)
    splits = choose_splits(row_blocks, tiles, H100)
    steps = -(-row_blocks * splits // H100) * -(-tiles // splits)
    least = -(-row_blocks * tiles // H100)
    assert steps <= 1.08 * least + 1


@given(st.integers(1, 400), st.integers(1, 1200), st.integers(1, 200))
def test_shares_are_whole_and_none_is_empty(row_blocks: int, tiles: int, processors: int) -> None:
    splits = choose_splits(row_blocks, tiles, processors)
    assert 1 <= splits <= tiles
    bounds = [split * tiles // splits for split in range(splits + 1)]  # as the kernel does
    assert bounds[0] == 0
    assert bounds[-1] == tiles
    assert all(first < last for first, last in pairwise(bounds))
    if row_blocks >= GROUP and tiles >= processors:  # at most GROUP row blocks are at work at one time
        assert splits >= processors // GROUP


@pytest.mark.parametrize(("buffers", "vocabulary"), [(2, 131072), (3, 131072), (2, 151936), (3, 151936)])
def test_scratch_stays_below_64_megabytes(buffers: int, vocabulary: int) -> None:
    columns = WIDE.columns if buffers == 2 else NARROW.columns
    tiles = tiles_of(vocabulary, columns)
    rows = rows_per_slice(tiles, buffers, 48 << 20)
    assert rows % WIDE.rows == 0
    assert rows * tiles * buffers * 4 < 64e6
    assert rows >= 2048


def test_one_block_of_rows_is_the_smallest_slice() -> None:
    assert rows_per_slice(1000, 3, 1) == WIDE.rows


def test_what_a_matrix_is_like_decides_the_tiling() -> None:
    def tiling(rows: int, hidden: int, dtype: torch.dtype, *, entropy: bool = False, bias: bool = False) -> object:
        weight = torch.zeros(50, hidden, dtype=dtype)
        problem = Problem(
            torch.zeros(rows, hidden, dtype=dtype),
            weight,
            torch.zeros(rows, dtype=torch.int64),
            torch.zeros(50, dtype=dtype) if bias else None,
            None,
            1.0,
            1.0,
        )
        return choose_tiling(problem, entropy=entropy)

    assert tiling(65, 64, torch.bfloat16) == WIDE
    assert tiling(64, 64, torch.bfloat16) == WIDE.half()
    assert tiling(65, 64, torch.float16, entropy=True) == NARROW
    assert tiling(65, 64, torch.float16, bias=True) == NARROW
    assert tiling(65, 65, torch.bfloat16) == PLAIN  # rows of 130 bytes
    assert tiling(3, 65, torch.bfloat16) == PLAIN.half()
    assert tiling(65, 64, torch.float32) == tiling(3, 64, torch.float32) == FLOAT32
    half = WIDE.half()
    assert (half.rows * 2, half.warps * 2) == (WIDE.rows, WIDE.warps)
    assert (half.columns, half.depth) == (WIDE.columns, WIDE.depth)
