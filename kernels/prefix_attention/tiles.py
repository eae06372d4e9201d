"""Host-side plan of the tiled implementation: which query rows go together, and what the key buffer holds.

The tiled implementation keeps one path of the trie at a time in a key/value buffer indexed by depth. A query
tile is a piece of one span inside one block of ``DEPTH_BLOCK`` depths, so everything that a row's arithmetic
depends on (key order, key count, block edges) follows from its depth alone, never from the company it is packed
in. That is what makes its result the same, bit for bit, alone or in any pack.

Stale keys of other rollouts behind a path's end are zeroed: they are masked, but 0 * NaN would still spread.
"""

from __future__ import annotations

from dataclasses import dataclass

from trace_fast.layout import SpanRanges

DEPTH_BLOCK = 256  # keys are padded to a multiple; whole vectors for torch's CPU flash kernel, 6 % less waste than 512


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows ``row:row+count`` go to depths ``depth:depth+count`` of the buffer; ``row`` -1 writes zeros."""

    depth: int
    row: int
    count: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows ``row:row+count`` at depths ``depth..``, after ``copies`` have been done; keys 0..``keys``."""

    row: int
    count: int
    depth: int
    keys: int
    copies: tuple[Copy, ...]


def plan_tiles(spans: SpanRanges) -> list[Tile]:
    """Tiles of all spans, deepest shared path first reused: linear in spans plus copied ranges."""
    tiles: list[Tile] = []
    held: list[Copy] = []  # what the buffer holds now, by depth, without gaps
    for p in range(len(spans)):
        start, end, depth = int(spans.starts[p]), int(spans.ends[p]), int(spans.depths[p])
        if start == end:  # no tile would make its copies, on which the next span would rely
            continue
        path, at = [], 0
        for s, e in [*spans.ancestors(p).tolist(), (start, end)]:
            path.append(Copy(at, int(s), int(e - s)))
            at += e - s
        assert at == depth + end - start, "key ranges must cover all depths before the span"
        path.append(Copy(at, -1, -at % DEPTH_BLOCK))
        copies = _difference(path, held)
        held = _overlay(held, path)
        for first in _block_starts(depth, at):
            count = min(at, first + DEPTH_BLOCK - first % DEPTH_BLOCK) - first
            keys = (first // DEPTH_BLOCK + 1) * DEPTH_BLOCK
            tiles.append(Tile(start + first - depth, count, first, keys, tuple(copies)))
            copies = []
    return tiles


@dataclass(frozen=True, slots=True)
class Part:
    """Keys ``start:end`` of a tile. Unmasked parts are seen by every row of the tile's depth block.

    ``distance`` is the depth block's first depth less ``start``: with it a mask needs no depths.
    """

    start: int
    end: int
    masked: bool
    distance: int


def key_parts(tile: Tile, window: int | None) -> list[Part]:
    """Splits a tile's keys at depths that follow from its depth block alone: cut by the window, whole, its own."""
    own = tile.keys - DEPTH_BLOCK
    low = whole = 0
    if window is not None:
        low = max(own - window + 1, 0) // DEPTH_BLOCK * DEPTH_BLOCK
        whole = min(-(-max(tile.keys - window, 0) // DEPTH_BLOCK) * DEPTH_BLOCK, own)
    parts = [Part(low, whole, True, own - low), Part(whole, own, False, own - whole), Part(own, tile.keys, True, 0)]
    return [part for part in parts if part.start < part.end]


def buffer_depth(tiles: list[Tile]) -> int:
    """Depths that the key buffer needs."""
    return max((tile.keys for tile in tiles), default=0)


def _block_starts(first: int, end: int) -> list[int]:
    if first == end:
        return []
    return [first, *range((first // DEPTH_BLOCK + 1) * DEPTH_BLOCK, end, DEPTH_BLOCK)]


def _difference(path: list[Copy], held: list[Copy]) -> list[Copy]:
    """The parts of ``path`` that the buffer does not hold yet."""
    copies: list[Copy] = []
    h = 0
    for part in path:
        at, stop = part.depth, part.depth + part.count
        while at < stop:
            while h < len(held) and held[h].depth + held[h].count <= at:
                h += 1
            piece = held[h] if h < len(held) and held[h].depth <= at else None
            upto = min(stop, piece.depth + piece.count) if piece else stop
            row = -1 if part.row < 0 else part.row + at - part.depth
            if piece is None or row != (-1 if piece.row < 0 else piece.row + at - piece.depth):
                if copies and copies[-1].depth + copies[-1].count == at and _continues(copies[-1], row):
                    copies[-1] = Copy(copies[-1].depth, copies[-1].row, copies[-1].count + upto - at)
                else:
                    copies.append(Copy(at, row, upto - at))
            at = upto
    return copies


def _continues(copy: Copy, row: int) -> bool:
    return row == -1 if copy.row < 0 else row == copy.row + copy.count


def _overlay(held: list[Copy], path: list[Copy]) -> list[Copy]:
    """The buffer after ``path`` was written: the path, then whatever lay deeper."""
    end = path[-1].depth + path[-1].count
    rest = []
    for part in held:
        skip = max(end - part.depth, 0)
        if skip < part.count:
            rest.append(Copy(part.depth + skip, -1 if part.row < 0 else part.row + skip, part.count - skip))
    return [part for part in path if part.count] + rest


__all__ = ["DEPTH_BLOCK", "Copy", "Part", "Tile", "buffer_depth", "key_parts", "plan_tiles"]
