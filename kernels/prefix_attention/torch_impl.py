"""Tiled prefix_attention on torch's own kernels: fused SDPA where it applies, eager tiles for softcap and sinks.

See ``tiles`` for why a row's result does not depend on its pack. Three facts of torch's CPU kernels are used and
kept by tests: a matrix product's row does not depend on the other rows as long as there are a few of them (query
rows are padded to ``ROW_MULTIPLE``); the flash kernel walks keys in blocks of ``DEPTH_BLOCK`` from the first key
on; a wholly hidden block leaves its running softmax untouched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trace_fast.kernels.prefix_attention.tiles import DEPTH_BLOCK, Tile, buffer_depth, plan_tiles
from trace_fast.layout import SpanRanges

ROW_MULTIPLE = 4  # fewer rows than this take another GEMM kernel, with other rounding
EAGER_ROWS = 64  # query rows a tile where scores are materialised: bounds memory at heads x rows x keys



@dataclass(frozen=True, slots=True)
class _Visibility:
    """The additive mask of every tile, as views of one table: entry (i, j) depends on j - i only."""

    table: torch.Tensor  # (DEPTH_BLOCK + EAGER_ROWS, origin + DEPTH_BLOCK)
    origin: int  # column of the tile's own depth block

    @classmethod
    def build(cls, tiles: list[Tile], window: int | None, dtype: torch.dtype, device: torch.device) -> _Visibility:
        origin = max((t.keys - DEPTH_BLOCK - first_key(t, window) for t in tiles), default=0)
        rows = torch.arange(DEPTH_BLOCK + EAGER_ROWS, device=device)[:, None]
        columns = torch.arange(-origin, DEPTH_BLOCK, device=device)[None, :]
        hidden = columns > rows
        if window is not None:
            hidden |= columns <= rows - window
        table = torch.zeros(hidden.shape, dtype=dtype, device=device)
        return cls(table.masked_fill_(hidden, float("-inf")), origin)

    def of(self, depth: int, count: int, keys: int) -> torch.Tensor:
        first_row = depth % DEPTH_BLOCK
        return self.table[first_row : first_row + count, self.origin + DEPTH_BLOCK - keys :]


def first_key(tile: Tile, window: int | None) -> int:
    """First depth whose key block some row of the tile's depth block can see."""
    if window is None:
        return 0
    block_start = tile.keys - DEPTH_BLOCK
    return max(block_start - window + 1, 0) // DEPTH_BLOCK * DEPTH_BLOCK


class TorchPlan:
    """Tiles of a pack, and its masks as they come up (one a window and dtype), shared by all layers."""

    def __init__(self, spans: SpanRanges) -> None:
        self.spans = spans
        self.tiles = plan_tiles(spans)
        self.depth = buffer_depth(self.tiles)
        self._masks: dict[tuple[int | None, torch.dtype, torch.device], _Visibility] = {}

    def _visibility(self, window: int | None, dtype: torch.dtype, device: torch.device) -> _Visibility:
        key = (window, dtype, device)
        if key not in self._masks:
            self._masks[key] = _Visibility.build(self.tiles, window, dtype, device)
        return self._masks[key]

    def run(
        self,
        query_NHD: torch.Tensor,
        key_NKD: torch.Tensor,
        value_NKD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``prefix_attention``. Forward only; extra memory: one path of keys and values, one tile's scores."""
        key_KSD, value_KSD = (t.new_zeros(t.shape[1], self.depth, t.shape[2]) for t in (key_NKD, value_NKD))
        out_NHD = query_NHD.new_zeros(len(query_NHD), query_NHD.shape[1], value_NKD.shape[2])
        attend = _FusedTile() if softcap is None and sinks_H is None else _EagerTile(softcap, sinks_H)
        visibility = self._visibility(window, attend.mask_dtype(query_NHD.dtype), query_NHD.device)
        broken_N = _broken_keys(key_NKD, value_NKD)
        for tile in self.tiles:
            for copy in tile.copies:
                to = slice(copy.depth, copy.depth + copy.count)
                if copy.row < 0:
                    key_KSD[:, to].zero_()
                    value_KSD[:, to].zero_()
                else:
                    rows = slice(copy.row, copy.row + copy.count)
                    key_KSD[:, to] = key_NKD[rows].transpose(0, 1)
                    value_KSD[:, to] = value_NKD[rows].transpose(0, 1)
            low = first_key(tile, window)
            for row, count, first, hold_back in _pieces(tile, broken_N, attend.max_rows):
                keys, values = key_KSD[:, low : tile.keys], value_KSD[:, low : tile.keys]
                if hold_back is not None:  # hidden from these rows, but 0 * NaN would reach them
                    keys, values = keys.clone(), values.clone()
                    keys[:, hold_back - low :], values[:, hold_back - low :] = 0, 0
                padded = count + -count % attend.row_multiple
                query_QHD = query_NHD[row : row + count]
                if padded != count:
                    query_QHD = F.pad(query_QHD, (0, 0, 0, 0, 0, padded - count))
                mask_QS = visibility.of(first, padded, tile.keys - low)
                out_NHD[row : row + count] = attend(query_QHD, keys, values, mask_QS, scale)[:count]
        return out_NHD


def _pieces(
    tile: Tile, broken_N: torch.Tensor | None, max_rows: int
) -> list[tuple[int, int, int, int | None]]:
    """(row, count, depth, first depth to hold back) of the tile's calls; more than one only for long eager
    tiles and where keys are not finite: rows before the first broken key must not notice it."""
    cuts = [*range(0, tile.count, max_rows), tile.count]
    broken_at = None
    if broken_N is not None:
        broken = broken_N[tile.row : tile.row + tile.count].nonzero()
        if len(broken):
            broken_at = int(broken[0])
            cuts = sorted({*cuts, broken_at})
    return [
        (tile.row + a, b - a, tile.depth + a, tile.depth + broken_at if broken_at is not None and b <= broken_at else None)
        for a, b in zip(cuts, cuts[1:], strict=False)
        if b > a
    ]


def _broken_keys(key_NKD: torch.Tensor, value_NKD: torch.Tensor) -> torch.Tensor | None:
    """``(N,) bool`` rows with NaN or Inf in key or value; ``None`` when there are none (one cheap pass)."""
    if torch.isfinite(key_NKD.sum(dtype=torch.float64) + value_NKD.sum(dtype=torch.float64)):
        return None
    return ~(torch.isfinite(key_NKD).all(-1).all(-1) & torch.isfinite(value_NKD).all(-1).all(-1)).cpu()


class _FusedTile:
    max_rows = DEPTH_BLOCK
    row_multiple = ROW_MULTIPLE

    @staticmethod
    def mask_dtype(dtype: torch.dtype) -> torch.dtype:
        return dtype

    def __call__(
        self, query_QHD: torch.Tensor, key_KSD: torch.Tensor, value_KSD: torch.Tensor, mask_QS: torch.Tensor, scale: float
    ) -> torch.Tensor:
        out_1HQD = F.scaled_dot_product_attention(
            query_QHD.transpose(0, 1)[None],
            key_KSD[None],
            value_KSD[None],
            attn_mask=mask_QS[None, None],
            scale=scale,
            enable_gqa=query_QHD.shape[1] != key_KSD.shape[0],
        )
        return out_1HQD[0].transpose(0, 1)


class _EagerTile:
    """Scores in memory, in float32 (float64 for float64): for softcap and sinks, which SDPA does not have."""

    max_rows = row_multiple = EAGER_ROWS  # one shape only: threads split these products by rows

    def __init__(self, softcap: float | None, sinks_H: torch.Tensor | None) -> None:
        self.softcap, self.sinks_H = softcap, sinks_H

    @staticmethod
    def mask_dtype(dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype == torch.float64 else torch.float32

    def __call__(
        self, query_QHD: torch.Tensor, key_KSD: torch.Tensor, value_KSD: torch.Tensor, mask_QS: torch.Tensor, scale: float
    ) -> torch.Tensor:
        accumulate = mask_QS.dtype
        rows, heads, dim = query_QHD.shape
        kv_heads = key_KSD.shape[0]
        folded = (kv_heads, heads // kv_heads, rows)  # query heads of one K/V head fold into the rows
        query = query_QHD.to(accumulate).transpose(0, 1).reshape(kv_heads, -1, dim)
        scores = torch.bmm(query, key_KSD.to(accumulate).transpose(1, 2)).mul_(scale)
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh().mul_(self.softcap)
        scores = scores.view(*folded, -1).add_(mask_QS)
        peak = scores.amax(-1, keepdim=True)
        if self.sinks_H is not None:
            sink = self.sinks_H.to(accumulate).view(kv_heads, -1, 1, 1)
            peak = torch.maximum(peak, sink)
        weights = scores.sub_(peak).exp()
        total = weights.sum(-1, keepdim=True)
        if self.sinks_H is not None:
            total = total + (sink - peak).exp()
        out = torch.bmm(weights.view(kv_heads, -1, weights.shape[-1]), value_KSD.to(accumulate))
        out = out.view(*folded, -1) / total
        return out.reshape(heads, rows, -1).transpose(0, 1).to(query_QHD.dtype)
