"""A trunk with branches as an attention problem, and exact rows of its answer.

Shapes: N rows, H query heads, K key/value heads, D head dim, M sampled rows. The trunk's rows come first, then those of
the branches, which hang at evenly spaced places; the last hangs at the trunk's end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trace_fast.layout import SpanRanges, rows_of


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes: ``branches`` branches of ``branch_rows`` rows on a trunk of ``trunk`` rows."""

    trunk: int
    branches: int
    branch_rows: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return (
            f"{self.trunk} + {self.branches} x {self.branch_rows} rows, "
            f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"
        )

    @property
    def rows(self) -> int:
        return self.trunk + self.branches * self.branch_rows

    @property
    def places(self) -> np.ndarray:
        """``(branches,)`` trunk rows that each branch sees."""
        return np.linspace(0, self.trunk, self.branches + 1).astype(np.int64)[1:]

    @property
    def pairs(self) -> int:
        """Visible (row, key) pairs of one head."""
        own = self.branches * self.branch_rows * (self.branch_rows + 1) // 2
        return self.trunk * (self.trunk + 1) // 2 + int(self.places.sum()) * self.branch_rows + own

    @property
    def flops(self) -> float:
        """Of the forward: two products of 2 D FLOPs a pair and query head."""
        return 4.0 * self.head_dim * self.heads * self.pairs

    @property
    def trunk_flops(self) -> float:
        """Of the trunk alone."""
        return 4.0 * self.head_dim * self.heads * (self.trunk * (self.trunk + 1) // 2)

    def spans(self) -> SpanRanges:
        """Who sees whom: the trunk is one span, each branch another."""
        starts = np.concatenate([[0], self.trunk + self.branch_rows * np.arange(self.branches)])
        ends = np.concatenate([[self.trunk], starts[1:] + self.branch_rows])
        ranges = np.stack([np.zeros_like(self.places), self.places], axis=1)
        cu = np.concatenate([[0], np.arange(self.branches + 1)])
        return SpanRanges(self.rows, starts, ends, np.concatenate([[0], self.places]), ranges, cu)

    def tensors(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normal query ``(N, H, D)``, key and value ``(N, K, D)``, always the same."""
        generator = torch.Generator(device).manual_seed(0)

        def draw(heads: int) -> torch.Tensor:
            return torch.randn(self.rows, heads, self.head_dim, device=device, generator=generator).to(dtype)

        return draw(self.heads), draw(self.kv_heads), draw(self.kv_heads)

    def mask(self, device: torch.device) -> torch.Tensor:
        """``(N, N) bool``, True where a row sees a key."""
        rows = torch.arange(self.rows, device=device)
        owner, reach = (torch.as_tensor(x, device=device) for x in self.owner_and_reach())
        visible = (owner[:, None] == owner[None]) & (rows[:, None] >= rows[None])
        return visible | ((owner[None] < 0) & (rows[None] < reach[:, None]))

    def owner_and_reach(self) -> tuple[np.ndarray, np.ndarray]:
        """``(N,)`` branch of each row (-1: the trunk), and the trunk rows that it sees (0 for trunk rows)."""
        counts = [self.trunk, *[self.branch_rows] * self.branches]
        return np.repeat(np.arange(-1, self.branches), counts), np.repeat([0, *self.places], counts)

    def sample(self, count: int) -> np.ndarray:
        """``(M,)`` distinct rows: the first and last of trunk and branches, and random ones."""
        rng = np.random.default_rng(0)
        edges = [0, self.trunk - 1, self.trunk, self.rows - 1] if self.branches else [0, self.trunk - 1]
        half = (count - len(edges)) // 2
        drawn = [rng.integers(0, self.trunk, half)]
        if self.branches:
            drawn.append(rng.integers(self.trunk, self.rows, half))
        return np.unique(np.concatenate([edges, *drawn]))


def exact_rows(
    query_NHD: torch.Tensor, key_NKD: torch.Tensor, value_NKD: torch.Tensor, spans: SpanRanges, rows_M: np.ndarray
) -> torch.Tensor:
    """``(M, H, D) float64``: attention of some rows, scale D^-1/2, each from its own list of visible keys."""
    heads, kv_heads, dim = query_NHD.shape[1], key_NKD.shape[1], query_NHD.shape[2]
    out = []
    for row in rows_M:
        span = int(np.searchsorted(spans.starts, row, side="right")) - 1
        visible = rows_of(np.concatenate([spans.ancestors(span), [[spans.starts[span], row + 1]]]))
        keys = torch.as_tensor(visible, device=query_NHD.device)
        query_KGD = query_NHD[int(row)].double().view(kv_heads, heads // kv_heads, dim)
        key_KDL = key_NKD[keys].double().permute(1, 2, 0)
        weights_KGL = torch.softmax(query_KGD @ key_KDL * dim**-0.5, -1)
        out.append((weights_KGL @ value_NKD[keys].double().transpose(0, 1)).reshape(heads, dim))
    return torch.stack(out)
