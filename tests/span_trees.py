"""Random span tries for tests of attention plans and kernels, and who sees whom in them, from the definition."""

from __future__ import annotations

import numpy as np

from trace_fast.layout import SpanRanges, rows_of


def tree(seed: int, spans: int = 9, longest: int = 40, *, gap_rows: bool = True) -> SpanRanges:
    """Random spans: several roots, chains, branches at any place, empty and one-token spans, twins, rows of no span."""
    rng = np.random.default_rng(seed)
    starts, ends, depths, paths = [], [], [], []
    rows = 0
    for _ in range(spans):
        path: list[tuple[int, int]] = []
        if starts and rng.random() < 0.85:
            parent = int(rng.integers(len(starts)))
            hang = int(rng.integers(0, ends[parent] - starts[parent] + 1)) if rng.random() < 0.8 else 0
            path = [*paths[parent], (starts[parent], starts[parent] + hang)] if hang else list(paths[parent])
        length = int(rng.choice([0, 1, 1, int(rng.integers(2, 12)), int(rng.integers(2, longest))]))
        for _ in range(int(rng.integers(1, 3))):  # sometimes a twin at the same place
            rows += int(gap_rows and rng.random() < 0.2)
            starts.append(rows)
            ends.append(rows + length)
            depths.append(sum(e - s for s, e in path))
            paths.append(path)
            rows += length
    cu = np.concatenate([[0], np.cumsum([len(p) for p in paths])]).astype(np.int64)
    ranges = np.array([r for path in paths for r in path], dtype=np.int64).reshape(-1, 2)
    return SpanRanges(rows, np.array(starts), np.array(ends), np.array(depths), ranges, cu)


def visible_pairs(spans: SpanRanges, window: int | None) -> np.ndarray:
    """``(N, N) int`` 1 where the row sees the key, from the definition."""
    seen = np.zeros((spans.n_rows, spans.n_rows), dtype=np.int64)
    for p in range(len(spans)):
        keys = np.concatenate([rows_of(spans.ancestors(p)), np.arange(spans.starts[p], spans.ends[p])])
        for row in range(int(spans.starts[p]), int(spans.ends[p])):
            depth = int(spans.depths[p]) + row - int(spans.starts[p])
            seen[row, keys[0 if window is None else max(depth - window + 1, 0) : depth + 1]] = 1
    return seen


def agent_rollout(trunk: int, turns: int, branch: int) -> SpanRanges:
    """A trunk and one branch a turn, evenly spaced: the shape that scoring produces."""
    hang = np.linspace(trunk // turns, trunk, turns).astype(np.int64)
    starts = np.concatenate([[0], trunk + branch * np.arange(turns)])
    ranges = np.stack([np.zeros(turns, dtype=np.int64), hang], 1)
    ends = starts + np.concatenate([[trunk], np.full(turns, branch)])
    cu = np.concatenate([[0], np.arange(turns + 1)])
    return SpanRanges(int(ends[-1]), starts, ends, np.concatenate([[0], hang]), ranges, cu)
