"""Host-side plan of the Triton kernels: which rows go together, and which key blocks they visit.

Query tiles. Spans are taken in the order of their rows and cut into tiles of TILE_ROWS rows; a short span (or the tail
of a long one) shares the tile that is still open when they see largely the same keys. The keys of a tile are a few
contiguous *runs* of rows, cut into blocks of BLOCK_N from the run's first row. A block that every row of the tile sees
whole is *full* and only counted, as (start, end) of a segment; every other block is an *edge*. Blocks that no row sees
do not occur.

Visibility. What a row sees inside one block is an interval of key rows: an ancestor's range cut by the window, or its
own span up to itself. So an edge block carries (low, high) a row of the tile, and the test is two comparisons a
(row, key), the same for causality, branches and windows. Where a block would hold two intervals of one row (it
straddles a gap between two ranges), it is listed twice. No depth, no span id, no tree reaches the device.

Splits. When tiles are fewer than the chip's processors, or one is much longer than the rest, a tile's blocks are dealt
out in order to several work items, whose partial results are merged. Items are sorted, heaviest first.

Key tiles, for the gradients of keys and values, are the transposed lists: rows ``start..start+count`` of keys, the
contiguous query rows that see them all, and a list of (query row, low, high) for the others.

Everything is linear in rows, tiles and listed blocks, and vectorised over them; only the dealing of spans to tiles is a
loop. Tables are int32 (a pack has fewer than 2^31 rows); the kernels compute addresses in int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trace_fast.kernels.prefix_attention.triton_intervals import (
    Work,
    expand,
    find_runs,
    gaps,
    join,
    rank,
    tiles_of_segments,
)
from trace_fast.layout import SpanRanges

ENDLESS = 1 << 40  # a window wider than any depth


@dataclass(frozen=True, slots=True, eq=False)
class QueryTables:
    """Work of the forward kernel and of the query-gradient kernel; T tiles, I items, S segments, E edge blocks.

    Args:
        tile_rows: ``(T, TILE_ROWS)`` pack row of each place of a tile, -1 where none.
        items: ``(I, 6)`` tile, its segments ``[1]:[2]``, its edges ``[3]:[4]``, slot of the partial result or -1.
        whole_items: ``(T, 6)`` the same without splits.
        segments: ``(S, 2)`` first key row and end of full blocks; a multiple of BLOCK_N apart.
        edges: ``(E,)`` first key row of an edge block. edge_low, edge_high: ``(E, TILE_ROWS)`` keys that a place sees.
        splits: ``(X, 3)`` tile and its slots ``[1]:[2]``. slots: their number.
    """

    tile_rows: np.ndarray
    items: np.ndarray
    whole_items: np.ndarray
    segments: np.ndarray
    edges: np.ndarray
    edge_low: np.ndarray
    edge_high: np.ndarray
    splits: np.ndarray
    slots: int


@dataclass(frozen=True, slots=True, eq=False)
class KeyTables:
    """Work of the key-gradient kernel; T key tiles that cover every row of the pack.

    Args:
        tiles: ``(T, 6)`` first key row, count, segments ``[2]:[3]``, edge rows ``[4]:[5]``; heaviest first.
        segments: ``(S, 2)`` query rows that see the whole tile.
        edge_rows, edge_low, edge_high: ``(E,)`` a query row and the keys of the tile that it sees.
    """

    tiles: np.ndarray
    segments: np.ndarray
    edge_rows: np.ndarray
    edge_low: np.ndarray
    edge_high: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _Ranges:
    """All (span, range) pairs: ancestors, and last the own rows, joined with an ancestor that ends where they begin.

    Key row m of a range is at depth ``m + to_depth``. ``own`` ranges are causal.
    """

    span: np.ndarray
    start: np.ndarray
    end: np.ndarray
    to_depth: np.ndarray
    own: np.ndarray
    cu: np.ndarray  # (P + 1,) ranges of a span

    @classmethod
    def of(cls, spans: SpanRanges) -> _Ranges:
        count = np.diff(spans.cu_ranges)
        lengths = spans.ranges[:, 1] - spans.ranges[:, 0]
        before = np.concatenate([[0], np.cumsum(lengths)])
        depth = before[:-1] - np.repeat(before[spans.cu_ranges[:-1]], count)
        span = np.concatenate([np.repeat(np.arange(len(spans)), count), np.arange(len(spans))])
        start = np.concatenate([spans.ranges[:, 0], spans.starts])
        end = np.concatenate([spans.ranges[:, 1], spans.ends])
        to_depth = np.concatenate([depth, spans.depths]) - start
        own = np.arange(len(span)) >= len(lengths)
        order = np.argsort(span, kind="stable")
        span, start, end, to_depth, own = (a[order] for a in (span, start, end, to_depth, own))
        joined = np.flatnonzero(own[1:] & ~own[:-1] & (end[:-1] == start[1:]))
        start[joined + 1] = start[joined]
        keep = np.ones(len(span), dtype=bool)
        keep[joined] = False
        span, start, end, to_depth, own = (a[keep] for a in (span, start, end, to_depth, own))
        cu = np.searchsorted(span, np.arange(len(spans) + 1))
        return cls(span, start, end, to_depth, own, cu)


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Rows ``start:end`` of a span, placed in a tile from ``place`` on; in the order of tiles."""

    tile: np.ndarray
    place: np.ndarray
    span: np.ndarray
    start: np.ndarray
    end: np.ndarray


def plan_queries(
    spans: SpanRanges, *, tile_rows: int, block_n: int, window: int | None, programs: int, key_heads: int
) -> QueryTables:
    """Tiles, blocks and work items; ``programs`` is how many the device runs at a time."""
    ranges = _Ranges.of(spans)
    pieces = _deal(spans, tile_rows)
    tiles = int(pieces.tile[-1]) + 1 if len(pieces.tile) else 0
    width = window or ENDLESS

    seen = expand(ranges.cu[pieces.span + 1] - ranges.cu[pieces.span])  # every (piece, range) pair
    piece, pair_range = seen.owner, ranges.cu[pieces.span][seen.owner] + seen.index
    to_depth = ranges.to_depth[pair_range]
    row_depth = (spans.depths - spans.starts)[pieces.span[piece]]
    oldest = row_depth - to_depth - width + 1  # first key row in the window of row n: n + oldest
    start, end, own = ranges.start[pair_range], ranges.end[pair_range], ranges.own[pair_range]
    first, last = pieces.start[piece], pieces.end[piece] - 1
    any_start, any_end = np.maximum(start, first + oldest), np.where(own, last + 1, end)
    all_start, all_end = np.maximum(start, last + oldest), np.where(own, first + 1, end)

    pair_tile = pieces.tile[piece]
    run_tile, run_start, run_end, full = find_runs(
        pair_tile, any_start, any_end, all_start, all_end, np.bincount(pieces.tile, minlength=tiles), block_n
    )
    full_run, full_first, full_end = full
    segments = run_start[full_run][:, None] + np.stack([full_first, full_end], 1) * block_n
    segment_tile = run_tile[full_run]
    edge_run, edge_block = gaps(full_run, full_first, full_end, -((run_start - run_end) // block_n))
    edge_start = run_start[edge_run] + edge_block * block_n
    edge_end = np.minimum(edge_start + block_n, run_end[edge_run])
    edge_tile = run_tile[edge_run]

    # (edge, pair) of the same tile that overlap, in the order of edges
    pairs_of_tile = np.searchsorted(pair_tile, np.arange(tiles + 1))
    both = expand(np.diff(pairs_of_tile)[edge_tile])
    edge, pair = both.owner, pairs_of_tile[edge_tile][both.owner] + both.index
    meets = np.maximum(any_start[pair], edge_start[edge]) < np.minimum(any_end[pair], edge_end[edge])
    edge, pair = edge[meets], pair[meets]
    again = rank(edge, piece[pair])  # a second interval of the same rows goes to a second listing of the block
    listings = np.zeros(len(edge_start), dtype=np.int64)
    np.maximum.at(listings, edge, again + 1)
    listing = (np.cumsum(listings) - listings)[edge] + again
    edges = np.repeat(edge_start, listings)
    edge_tile = np.repeat(edge_tile, listings)

    rows = expand((pieces.end - pieces.start)[piece[pair]])
    row = first[pair][rows.owner] + rows.index
    at = (listing[rows.owner], pieces.place[piece[pair]][rows.owner] + rows.index)
    edge_low = np.zeros((len(edges), tile_rows), dtype=np.int64)
    edge_high = np.zeros_like(edge_low)
    edge_low[at] = np.maximum(start[pair][rows.owner], row + oldest[pair][rows.owner])
    high = np.where(own[pair][rows.owner], row + 1, end[pair][rows.owner])
    edge_high[at] = np.minimum(high, edge_end[edge][rows.owner])

    table = np.full((tiles, tile_rows), -1, dtype=np.int64)
    rows = expand(pieces.end - pieces.start)
    table[pieces.tile[rows.owner], pieces.place[rows.owner] + rows.index] = pieces.start[rows.owner] + rows.index
    work = Work(tiles, segments, segment_tile, edge_tile, block_n)
    per_part = work.part_blocks(programs, key_heads)
    segments, items, splits, slots = work.items(per_part)
    cut = Work(tiles, segments, tiles_of_segments(items, len(segments)), edge_tile, block_n)
    _, whole_items, _, _ = cut.items(None)
    return QueryTables(
        tile_rows=_int32(table),
        items=_int32(items),
        whole_items=_int32(whole_items),
        segments=_int32(segments),
        edges=_int32(edges),
        edge_low=_int32(edge_low),
        edge_high=_int32(edge_high),
        splits=_int32(splits),
        slots=slots,
    )


def plan_keys(spans: SpanRanges, *, tile_rows: int, block_n: int, window: int | None) -> KeyTables:
    """The transposed lists; ``tile_rows`` is how many query rows the kernel takes at a time."""
    ranges = _Ranges.of(spans)
    tile_start = _key_tiles(spans, block_n)
    tile_end = np.append(tile_start[1:], spans.n_rows)
    width = window or ENDLESS

    first_tile = np.searchsorted(tile_start, ranges.start, side="right") - 1
    end_tile = np.searchsorted(tile_start, ranges.end, side="left")
    seen = expand(np.maximum(end_tile - first_tile, 0))
    r, tile = seen.owner, first_tile[seen.owner] + seen.index
    span, own = ranges.span[r], ranges.own[r]
    x, y = tile_start[tile], tile_end[tile]
    low, high = np.maximum(x, ranges.start[r]), np.minimum(y, ranges.end[r])
    row_depth = (spans.depths - spans.starts)[span]
    reach = ranges.to_depth[r] + width - row_depth  # row n sees key m through the window when n < m + reach
    rows_start, rows_end = spans.starts[span], spans.ends[span]
    any_first = np.where(own, np.maximum(rows_start, low), rows_start)
    any_end = np.minimum(rows_end, high - 1 + reach)
    all_first = np.where(own, np.maximum(rows_start, y - 1), rows_start)
    all_end = np.minimum(rows_end, x + reach)
    whole = (low == x) & (high == y) & (all_first < all_end)

    segments, segment_tile = join(tile[whole], all_first[whole], all_end[whole])
    short = segments[:, 1] - segments[:, 0] < tile_rows  # their rows fill blocks together with the edge rows
    edge_tile = np.concatenate([tile[~whole], tile[whole], tile[whole], segment_tile[short]])
    edge_first = np.concatenate([any_first[~whole], any_first[whole], all_end[whole], segments[short, 0]])
    edge_end = np.concatenate([any_end[~whole], all_first[whole], any_end[whole], segments[short, 1]])
    source = np.concatenate([np.flatnonzero(~whole), np.flatnonzero(whole), np.flatnonzero(whole)])
    source = np.concatenate([source, np.full(int(short.sum()), -1)])
    segments, segment_tile = segments[~short], segment_tile[~short]

    rows = expand(np.maximum(edge_end - edge_first, 0))
    edge_row = edge_first[rows.owner] + rows.index
    pair, edge_tile = source[rows.owner], edge_tile[rows.owner]
    edge_low = np.where(pair < 0, tile_start[edge_tile], np.maximum(low[pair], edge_row - reach[pair] + 1))
    edge_high = np.where(pair < 0, tile_end[edge_tile], np.where(own[pair], edge_row + 1, high[pair]))
    order = np.lexsort((edge_row, edge_tile))
    edge_row, edge_low, edge_high, edge_tile = (a[order] for a in (edge_row, edge_low, edge_high, edge_tile))

    tiles = np.arange(len(tile_start) + 1)
    segment_at, edge_at = np.searchsorted(segment_tile, tiles), np.searchsorted(edge_tile, tiles)
    full_rows = np.bincount(segment_tile, segments[:, 1] - segments[:, 0], len(tile_start))
    heavy = np.argsort(-(full_rows + np.diff(edge_at)), kind="stable")
    listed = [tile_start, tile_end - tile_start, segment_at[:-1], segment_at[1:], edge_at[:-1], edge_at[1:]]
    return KeyTables(*(_int32(a) for a in (np.stack(listed, 1)[heavy], segments, edge_row, edge_low, edge_high)))


# --- spans to tiles ------------------------------------------------------------------------------------------------


def _deal(spans: SpanRanges, tile_rows: int) -> _Pieces:
    """Rows to tiles, in the order of rows."""
    found: list[np.ndarray] = []  # (pieces, 5): tile, place, span, start, end
    tile, place = -1, tile_rows  # the open tile, and its first free place
    shared: list[tuple[int, int]] = []  # what every row of the open tile sees, in order of depth
    keys = 0  # about how many keys its rows see together
    for p in np.argsort(spans.starts, kind="stable").tolist():
        at, end = int(spans.starts[p]), int(spans.ends[p])
        if at == end:
            continue
        path = _path(spans, p)
        depth = int(spans.depths[p])
        if place < tile_rows:
            common = _common_path(shared, path)
            # one tile costs its shared keys once and the others with a mask, about half again; two tiles cost both
            if 4 * _length(common) > keys + depth:
                take = min(tile_rows - place, end - at)
                found.append(np.array([[tile, place, p, at, at + take]]))
                shared, keys = common, keys + depth + take - _length(common)
                place, at = place + take, at + take
        if at < end:
            cuts = np.arange(at, end, tile_rows)
            count = len(cuts)
            tiles = np.arange(tile + 1, tile + 1 + count)
            pieces = [tiles, np.zeros_like(cuts), np.full(count, p), cuts, np.minimum(cuts + tile_rows, end)]
            found.append(np.stack(pieces, 1))
            tile, place = tile + count, int(end - cuts[-1])
            shared, keys = path, depth + end - int(spans.starts[p])
    table = np.concatenate(found) if found else np.empty((0, 5), dtype=np.int64)
    return _Pieces(*table.T.astype(np.int64))


def _path(spans: SpanRanges, p: int) -> list[tuple[int, int]]:
    """What the last row of a span sees: its ranges in order of depth, those that touch joined."""
    path: list[tuple[int, int]] = []
    for start, end in [*spans.ancestors(p).tolist(), (int(spans.starts[p]), int(spans.ends[p]))]:
        if path and path[-1][1] == start:
            path[-1] = (path[-1][0], end)
        else:
            path.append((start, end))
    return path


def _common_path(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The leading keys that two paths have in common."""
    common = []
    for (a_start, a_end), (b_start, b_end) in zip(a, b, strict=False):
        if a_start == b_start:
            common.append((a_start, min(a_end, b_end)))
        if (a_start, a_end) != (b_start, b_end):
            break
    return common


def _length(path: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in path)


def _key_tiles(spans: SpanRanges, block_n: int) -> np.ndarray:
    """First rows of the key tiles: long spans are cut from their start, short neighbours share a tile."""
    starts: list[np.ndarray] = []
    at, room = 0, 0  # rows dealt, and what the open tile still takes
    cuts = np.unique(np.concatenate([[0], spans.starts, spans.ends, [spans.n_rows]])).tolist()
    for first, end in pairwise(cuts):  # also rows of no span: others may see them
        assert first == at
        count = end - first
        if count > room:
            starts.append(np.arange(first, end, block_n))
            room = (block_n - count) if count < block_n else 0
        else:
            room -= count
        at = end
    return np.concatenate(starts) if starts else np.empty(0, dtype=np.int64)


def _int32(array: np.ndarray) -> np.ndarray:
    assert array.size == 0 or (array.min() >= -1 and array.max() < 2**31), "a pack has fewer than 2^31 rows"
    return np.ascontiguousarray(array, dtype=np.int32)
