"""Host-side tables of the Triton attention: every visible pair once, shared tiles, balanced work. Needs no Triton."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from span_trees import agent_rollout, tree, visible_pairs

from trace_fast.kernels.prefix_attention.triton_plan import KeyTables, QueryTables, plan_keys, plan_queries
from trace_fast.layout import SpanRanges


def pairs_of_items(tables: QueryTables, items: np.ndarray, n_rows: int, block_n: int) -> np.ndarray:
    """How often the work items meet each (row, key), as the kernels walk them."""
    met = np.zeros((n_rows, n_rows + block_n), dtype=np.int64)
    for tile, segment, segment_end, edge, edge_end, _ in items:
        rows = tables.tile_rows[tile]
        for first, end in tables.segments[segment:segment_end]:
            assert first < end
            assert (end - first) % block_n == 0
            met[rows[rows >= 0], first:end] += 1
        for e in range(edge, edge_end):
            low = np.maximum(tables.edge_low[e], tables.edges[e])
            high = np.minimum(tables.edge_high[e], tables.edges[e] + block_n)
            assert (low < high)[rows >= 0].any(), "an edge block that no row of the tile sees"
            for place in np.flatnonzero((low < high) & (rows >= 0)):
                met[rows[place], low[place] : high[place]] += 1
    assert not met[:, n_rows:].any()
    return met[:, :n_rows]


def pairs_of_key_tiles(tables: KeyTables, n_rows: int) -> np.ndarray:
    met, owners = np.zeros((n_rows, n_rows), dtype=np.int64), np.zeros(n_rows, dtype=np.int64)
    for first, count, segment, segment_end, edge, edge_end in tables.tiles:
        owners[first : first + count] += 1
        for start, end in tables.segments[segment:segment_end]:
            met[start:end, first : first + count] += 1
        for e in range(edge, edge_end):
            low, high = max(tables.edge_low[e], first), min(tables.edge_high[e], first + count)
            met[tables.edge_rows[e], low : max(low, high)] += 1
    assert (owners == 1).all(), "every key row's gradient has one writer"
    return met


@pytest.mark.parametrize("window", [None, 1, 7, 60])
@pytest.mark.parametrize(("tile_rows", "block_n"), [(16, 16), (5, 16), (3, 32), (64, 8)])
def test_tables_meet_every_visible_pair_once(tile_rows: int, block_n: int, window: int | None) -> None:
    for seed in range(25):
        spans = tree(seed, spans=12)
        truth = visible_pairs(spans, window)
        sizes: dict[str, Any] = {"tile_rows": tile_rows, "block_n": block_n, "window": window}
        for programs in (1, 9, 500):
            tables = plan_queries(spans, **sizes, programs=programs, key_heads=2)
            for items in (tables.items, tables.whole_items):
                assert (pairs_of_items(tables, items, spans.n_rows, block_n) == truth).all(), seed
            taken = np.sort(tables.items[tables.items[:, 5] >= 0, 5])
            assert (taken == np.arange(tables.slots)).all()
        assert (pairs_of_key_tiles(plan_keys(spans, **sizes), spans.n_rows) == truth).all(), seed


def test_short_branches_share_tiles_and_hidden_blocks_are_not_listed() -> None:
    spans = agent_rollout(trunk=6000, turns=60, branch=8)
    tables = plan_queries(spans, tile_rows=32, block_n=64, window=None, programs=1, key_heads=1)
    unshared = -(-6000 // 32) + 60
    # four branches a tile, but for the first ones: they see so little of one another's keys that sharing costs more
    assert len(tables.tile_rows) <= unshared - 60 + 60 // 4 + 1
    blocks = np.diff(tables.segments, axis=1).sum() // 64 + len(tables.edges)
    needed = (tables.tile_rows.max(1).clip(max=5999) // 64 + 1).sum()  # up to each tile's deepest key
    assert blocks <= needed + 2 * len(tables.tile_rows)
    assert len(tables.edges) <= 4 * len(tables.tile_rows)


def test_splits_fill_the_device_and_heavy_items_come_first() -> None:
    spans = SpanRanges.single(4096)
    tables = plan_queries(spans, tile_rows=64, block_n=64, window=None, programs=132, key_heads=2)
    full = np.diff(tables.segments, axis=1)[:, 0] // 64
    cost = [full[a:b].sum() + d - c for _, a, b, c, d, _ in tables.items]
    assert cost == sorted(cost, reverse=True)
    even = sum(cost) * 2 / 132
    assert max(cost) <= even + 1
    assert len(plan_queries(spans, tile_rows=64, block_n=64, window=None, programs=4, key_heads=8).splits) == 0
