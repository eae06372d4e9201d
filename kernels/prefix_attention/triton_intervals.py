"""Integer work behind ``triton_plan``, vectorised over all tiles at once: intervals to blocks, blocks to work items.

All arrays are int64. A *tile* is a number, intervals are half-open ranges of key rows, lists lie in the order of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TILE_STRIDE = 1 << 32  # tile and row in one sortable number; rows are fewer than 2^31
MIN_PART_BLOCKS = 4  # key blocks of a split part: fewer do not pay for writing and merging it


def find_runs(
    tile: np.ndarray,
    any_start: np.ndarray,
    any_end: np.ndarray,
    all_start: np.ndarray,
    all_end: np.ndarray,
    pieces_of_tile: np.ndarray,
    block_n: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Sweeps the key rows of all tiles at once.

    Returns tile, first row and end of each run, and the full blocks as (run, first block, end block).
    """
    seen, whole = any_start < any_end, all_start < all_end
    tiles = np.concatenate([tile[seen], tile[seen], tile[whole], tile[whole]])
    places = np.concatenate([any_start[seen], any_end[seen], all_start[whole], all_end[whole]])
    some = np.repeat([1, -1, 0, 0], [seen.sum(), seen.sum(), whole.sum(), whole.sum()])
    every = np.repeat([0, 0, 1, -1], [seen.sum(), seen.sum(), whole.sum(), whole.sum()])
    order = np.lexsort((places, tiles))
    tiles, places, some, every = tiles[order], places[order], np.cumsum(some[order]), np.cumsum(every[order])
    # stretches between events; the sums are those after the last event at a place
    stretch = np.flatnonzero((np.diff(places) > 0) & (np.diff(tiles) == 0) & (some[:-1] > 0))
    tiles, start, end = tiles[stretch], places[stretch], places[stretch + 1]
    full = every[stretch] == pieces_of_tile[tiles]
    (runs, run_tile), (common, common_tile) = join(tiles, start, end), join(tiles[full], start[full], end[full])
    run = np.searchsorted(run_tile * TILE_STRIDE + runs[:, 0], common_tile * TILE_STRIDE + common[:, 0], "right") - 1
    origin = runs[run, 0]
    first, stop = -((origin - common[:, 0]) // block_n), (common[:, 1] - origin) // block_n
    some_blocks = first < stop
    return run_tile, runs[:, 0], runs[:, 1], (run[some_blocks], first[some_blocks], stop[some_blocks])


def join(tile: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Intervals of a tile that touch become one: ``(n, 2)`` and their tiles, sorted."""
    order = np.lexsort((start, tile))
    tile, start, end = tile[order], start[order], end[order]
    new = np.ones(len(tile), dtype=bool)
    new[1:] = (tile[1:] != tile[:-1]) | (start[1:] != end[:-1])
    last = np.append(new[1:], True)[: len(tile)]
    return np.stack([start[new], end[last]], 1), tile[new]


def gaps(
    full_run: np.ndarray, full_first: np.ndarray, full_end: np.ndarray, blocks_of_run: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Run and number of every block that is not full."""
    run = np.concatenate([np.arange(len(blocks_of_run)), full_run])
    opens = np.concatenate([np.zeros_like(blocks_of_run), full_end])
    closes = np.concatenate([blocks_of_run, full_first])
    opens, closes = opens[np.lexsort((opens, run))], closes[np.lexsort((closes, run))]
    gap = expand(closes - opens)
    return np.sort(run, kind="stable")[gap.owner], opens[gap.owner] + gap.index


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Blocks of tiles dealt to work items: a tile's full blocks, segment by segment, then its edges."""

    tiles: int
    segments: np.ndarray
    segment_tile: np.ndarray
    edge_tile: np.ndarray
    block_n: int

    def blocks(self) -> np.ndarray:
        """``(T,)`` blocks of a tile."""
        return self._full() + np.bincount(self.edge_tile, minlength=self.tiles)

    def _counts(self) -> np.ndarray:
        return (self.segments[:, 1] - self.segments[:, 0]) // self.block_n

    def _full(self) -> np.ndarray:
        return np.bincount(self.segment_tile, self._counts(), self.tiles).astype(np.int64)

    def part_blocks(self, programs: int, key_heads: int) -> int | None:
        """Most blocks of a work item so that all programs are busy to the end; None when whole tiles do that."""
        blocks = self.blocks()
        even = -(-int(blocks.sum()) * key_heads // programs)
        return max(even, MIN_PART_BLOCKS) if blocks.max(initial=0) > max(even, MIN_PART_BLOCKS) else None

    def items(self, per_part: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Segments (cut where items part), items, splits, slots."""
        blocks, full = self.blocks(), self._full()
        parts = np.ones(self.tiles, dtype=np.int64) if per_part is None else -(-blocks // per_part)
        size = -(-blocks // parts)
        parts = -(-blocks // size)
        item_at = np.cumsum(parts) - parts  # first item of a tile

        counts = self._counts()
        before = np.cumsum(counts) - counts  # blocks ahead of a segment, in its tile
        before -= (np.cumsum(full) - full)[self.segment_tile]
        own_size = size[self.segment_tile]
        pieces = expand((before + counts - 1) // own_size - before // own_size + 1)
        s = pieces.owner
        part = before[s] // own_size[s] + pieces.index
        begin = np.maximum(part * own_size[s], before[s]) - before[s]
        stop = np.minimum((part + 1) * own_size[s], before[s] + counts[s]) - before[s]
        segments = self.segments[s, :1] + np.stack([begin, stop], 1) * self.block_n
        segment_item = item_at[self.segment_tile[s]] + part

        edge_number = np.arange(len(self.edge_tile)) - np.searchsorted(self.edge_tile, self.edge_tile)
        edge_item = item_at[self.edge_tile] + (full[self.edge_tile] + edge_number) // size[self.edge_tile]

        total = int(parts.sum())
        tile = np.repeat(np.arange(self.tiles), parts)
        items = np.arange(total + 1)
        segment_at, edge_at = np.searchsorted(segment_item, items), np.searchsorted(edge_item, items)
        split = parts > 1
        slot = np.where(split[tile], np.cumsum(split[tile]) - 1, -1)
        table = np.stack([tile, segment_at[:-1], segment_at[1:], edge_at[:-1], edge_at[1:], slot], 1)
        full_of_item = np.bincount(segment_item, stop - begin, total)
        heavy = np.argsort(-(full_of_item + np.diff(edge_at)), kind="stable")
        ends = np.cumsum(parts[split])
        splits = np.stack([np.flatnonzero(split), ends - parts[split], ends], 1)
        return segments, table[heavy], splits, int(split[tile].sum())


def tiles_of_segments(items: np.ndarray, segments: int) -> np.ndarray:
    """``(S,)`` tile of each segment that the items list."""
    found = np.empty(segments, dtype=np.int64)
    listed = expand(items[:, 2] - items[:, 1])
    found[items[listed.owner, 1] + listed.index] = items[listed.owner, 0]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Expanded:
    owner: np.ndarray
    index: np.ndarray


def expand(counts: np.ndarray) -> Expanded:
    """``counts[i]`` entries for every i: which i, and the number within it."""
    counts = counts.astype(np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    return Expanded(owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts))


def rank(group: np.ndarray, member: np.ndarray) -> np.ndarray:
    """How many earlier entries have the same (group, member); equal ones follow each other."""
    new = np.ones(len(group), dtype=bool)
    new[1:] = (group[1:] != group[:-1]) | (member[1:] != member[:-1])
    index = np.arange(len(group))
    return index - np.maximum.accumulate(np.where(new, index, 0))
