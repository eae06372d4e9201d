"""Host-side plan of the native implementation: key blocks that spans share, and the path of each span through them.

The keys of a path are cut into blocks of ``KEY_BLOCK`` consecutive depths, aligned to depth 0. A span adds the blocks
that its own depths fall into (the first of them begins with the last rows of its ancestors) and takes over all earlier
ones from the span that owns the block's last row (a row that no span owns is packed again). Linear in rows plus, a
span, the blocks of its path.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trace_fast.layout import SpanRanges

KEY_BLOCK = 64  # kKeyBlock of csrc/cpu/prefix_attention.h


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Args (all ``int64``):

    block_rows: ``(B, KEY_BLOCK)`` row of each key, -1 behind the path's end.
    path_blocks: ``(L,)`` block numbers of paths, by depth, one path after the other.
    spans: ``(P, 4)`` first row, rows, depth of the first row, start of its path in ``path_blocks``.
    """

    block_rows: np.ndarray
    path_blocks: np.ndarray
    spans: np.ndarray


def plan_blocks(spans: SpanRanges) -> BlockTable:
    """The block table of a pack."""
    owner_N = np.full(spans.n_rows, -1, dtype=np.int64)  # span of each row
    for p in range(len(spans)):
        owner_N[spans.starts[p] : spans.ends[p]] = p
    paths: dict[int, np.ndarray] = {}
    block_rows: list[np.ndarray] = []
    table = np.zeros((len(spans), 4), dtype=np.int64)
    n_blocks = n_path = 0
    for p in np.argsort(spans.depths, kind="stable").tolist():  # ancestors begin higher: they come first
        start, end, depth = int(spans.starts[p]), int(spans.ends[p]), int(spans.depths[p])
        table[p] = start, end - start, depth, n_path
        before = spans.ancestors(p)
        ends_R = np.cumsum(before[:, 1] - before[:, 0])
        assert int(ends_R[-1] if len(ends_R) else 0) == depth, "key ranges must cover all depths before the span"
        path = np.full((depth + end - start - 1) // KEY_BLOCK + 1 if end > start else 0, -1, dtype=np.int64)
        last_J = np.arange(1, min(depth // KEY_BLOCK, len(path)) + 1) * KEY_BLOCK - 1  # deepest depths of whole blocks
        owners_J = owner_N[_rows_at(before, ends_R, last_J)]
        for owner in np.unique(owners_J[owners_J >= 0]):
            mine = np.flatnonzero(owners_J == owner)
            path[mine] = paths[owner][mine]
        new_J = np.flatnonzero(path < 0)
        depths = new_J[:, None] * KEY_BLOCK + np.arange(KEY_BLOCK)
        rows = np.full(depths.shape, -1, dtype=np.int64)
        rows[depths < depth] = _rows_at(before, ends_R, depths[depths < depth])
        own = (depths >= depth) & (depths < depth + end - start)
        rows[own] = start + depths[own] - depth
        path[new_J] = n_blocks + np.arange(len(rows))
        n_blocks += len(rows)
        n_path += len(path)
        block_rows.append(rows)
        paths[p] = path
    empty = np.empty((0, KEY_BLOCK), dtype=np.int64)
    return BlockTable(np.concatenate([empty, *block_rows]), np.concatenate([empty[:0, 0], *paths.values()]), table)


def _rows_at(ranges: np.ndarray, ends_R: np.ndarray, depths: np.ndarray) -> np.ndarray:
    """Rows of a path at some of its depths, the path given as ``(r, 2)`` ranges and their last depths + 1."""
    if not len(depths):
        return np.empty(0, dtype=np.int64)
    r = np.searchsorted(ends_R, depths, side="right")
    return ranges[r, 1] - (ends_R[r] - depths)


__all__ = ["KEY_BLOCK", "BlockTable", "plan_blocks"]
