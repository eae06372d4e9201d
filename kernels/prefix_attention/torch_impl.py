"""Tiled prefix_attention on torch's own kernels: fused flash tiles, eager tiles where there is a softcap.

See ``tiles`` for why a row's result does not depend on its pack. On the CPU a tile's keys fall into parts at fixed
depths: the blocks that all its rows see (no mask), the block of their own depth, and the blocks that a window cuts;
each part is one call of torch's flash kernel, query heads of one key head folded into its rows, and parts are merged
by their log-sum-exp. A sink is one more part without a value. Three facts of torch's kernels are used, and kept by
tests: a matrix product's row does not depend on the other rows as long as there are a few of them (query rows are
padded to ``ROW_MULTIPLE``); the flash kernel walks a
part's keys in fixed blocks from its first key on, and parts begin and end at multiples of ``DEPTH_BLOCK``; a wholly
hidden block leaves its running softmax untouched.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from trace_fast.errors import ConfigError
from trace_fast.kernels.prefix_attention.tiles import DEPTH_BLOCK, Part, Tile, buffer_depth, key_parts, plan_tiles
from trace_fast.layout import SpanRanges

ROW_MULTIPLE = 4  # fewer rows than this take another GEMM kernel, with other rounding
EAGER_ROWS = 64  # query rows a tile where scores are materialised: bounds memory at heads x rows x keys


class Mask(NamedTuple):
    """Additive mask of a part, and which of its rows see no key of the part at all."""

    values: torch.Tensor  # (rows, keys) 0 or -inf
    blind: torch.Tensor  # (rows,) bool

    def of_rows(self, first: int, count: int) -> Mask:
        return Mask(self.values[first : first + count], self.blind[first : first + count])


class TorchPlan:
    """Tiles of a pack, and its masks as they come up (one a window and dtype), shared by all layers."""

    def __init__(self, spans: SpanRanges) -> None:
        self.spans = spans
        self.tiles = plan_tiles(spans)
        self.depth = buffer_depth(self.tiles)
        self._masks: dict[tuple[int, int, int | None, torch.dtype, torch.device], Mask] = {}

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp. Forward only; extra memory: one path of keys and values, one tile's scores.

        Raises:
            ConfigError: a gradient is wanted.
        """
        if torch.is_grad_enabled() and any(t.requires_grad for t in (query_NHD, key_NKD, value_NKD)):
            raise ConfigError("prefix_attention: backend 'torch' has no gradient; use native, triton or reference")
        out_NHD = query_NHD.new_zeros(len(query_NHD), query_NHD.shape[1], value_NKD.shape[2])
        flash = softcap is None and query_NHD.device.type == "cpu" and query_NHD.shape[2] == value_NKD.shape[2]
        attend = _FlashTile(scale, sinks_H) if flash else _EagerTile(scale, softcap, sinks_H)
        # torch's CPU kernel is no faster in half precision, and would round the weights and every part to it
        accumulate = torch.float64 if query_NHD.dtype == torch.float64 else torch.float32
        lse_NH = query_NHD.new_full(query_NHD.shape[:2], float("-inf"), dtype=accumulate)
        key_KSD, value_KSD = (
            torch.zeros(t.shape[1], self.depth, t.shape[2], dtype=accumulate, device=t.device)
            for t in (key_NKD, value_NKD)
        )
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
            parts = key_parts(tile, window)
            block_masks = [self._mask(part, window, accumulate, query_NHD.device) for part in parts]
            for row, count, first, hold_back in _pieces(tile, broken_N, attend.max_rows):
                keys, values = key_KSD[:, : tile.keys], value_KSD[:, : tile.keys]
                if hold_back is not None:  # hidden from these rows, but 0 * NaN would reach them
                    keys, values = keys.clone(), values.clone()
                    keys[:, hold_back:], values[:, hold_back:] = 0, 0
                padded = count + -count % attend.row_multiple
                query_QHD = query_NHD[row : row + count].to(accumulate)
                if padded != count:
                    query_QHD = F.pad(query_QHD, (0, 0, 0, 0, 0, padded - count))
                at = first % DEPTH_BLOCK
                masks = [None if m is None else m.of_rows(at, padded) for m in block_masks]
                out_QHD, lse_QH = attend(query_QHD, keys, values, parts, masks)
                out_NHD[row : row + count], lse_NH[row : row + count] = out_QHD[:count], lse_QH[:count]
        return out_NHD, lse_NH

    def _mask(self, part: Part, window: int | None, dtype: torch.dtype, device: torch.device) -> Mask | None:
        """Mask of a whole depth block against a part; depends on their distance only, so few exist."""
        if not part.masked:
            return None
        key = (part.distance, part.end - part.start, window, dtype, device)
        if key not in self._masks:
            rows = torch.arange(DEPTH_BLOCK + EAGER_ROWS, device=device)[:, None] + part.distance
            columns = torch.arange(part.end - part.start, device=device)[None, :]
            hidden = columns > rows
            if window is not None:
                hidden |= columns <= rows - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
            self._masks[key] = Mask(mask.masked_fill_(hidden, float("-inf")), hidden.all(1))
        return self._masks[key]


def _pieces(tile: Tile, broken_N: torch.Tensor | None, max_rows: int) -> list[tuple[int, int, int, int | None]]:
    """(row, count, depth, first depth to hold back) of the tile's calls; more than one only for long eager
    tiles and where keys are not finite: rows before the first broken key must not notice it."""
    cuts = [*range(0, tile.count, max_rows), tile.count]
    broken_at = None
    if broken_N is not None:
        broken = broken_N[tile.row : tile.row + tile.count].nonzero()
        if len(broken):
            broken_at = int(broken[0])
            cuts = sorted({*cuts, broken_at})
    pieces = []
    for a, b in pairwise(cuts):
        hold_back = tile.depth + broken_at if broken_at is not None and b <= broken_at else None
        if b > a:
            pieces.append((tile.row + a, b - a, tile.depth + a, hold_back))
    return pieces


def _broken_keys(key_NKD: torch.Tensor, value_NKD: torch.Tensor) -> torch.Tensor | None:
    """``(N,) bool`` rows with NaN or Inf in key or value; ``None`` when there are none (one cheap pass)."""
    if torch.isfinite(key_NKD.sum(dtype=torch.float64) + value_NKD.sum(dtype=torch.float64)):
        return None
    return ~(torch.isfinite(key_NKD).all(-1).all(-1) & torch.isfinite(value_NKD).all(-1).all(-1)).cpu()


class _FlashTile:
    """torch's CPU flash kernel, a call a part. Output ``(Q, H, D)`` and log-sum-exp ``(Q, H)``."""

    max_rows = DEPTH_BLOCK
    row_multiple = ROW_MULTIPLE

    def __init__(self, scale: float, sinks_H: torch.Tensor | None) -> None:
        self.scale, self.sinks_H = scale, sinks_H

    def __call__(
        self,
        query_QHD: torch.Tensor,
        key_KSD: torch.Tensor,
        value_KSD: torch.Tensor,
        parts: list[Part],
        masks: list[Mask | None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, heads, dim = query_QHD.shape
        kv_heads = len(key_KSD)
        query = query_QHD.transpose(0, 1).reshape(1, kv_heads, -1, dim)  # rows of head g follow those of head g-1
        outs, sums = [], []
        for part, mask in zip(parts, masks, strict=True):
            out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query,
                key_KSD[None, :, part.start : part.end],
                value_KSD[None, :, part.start : part.end],
                attn_mask=None if mask is None else mask.values.repeat(heads // kv_heads, 1)[None, None],
                scale=self.scale,
            )
            log_sum = log_sum[0].reshape(kv_heads, -1, 1)
            if mask is not None and part.distance:  # the kernel gives a row without keys the value 0 and the sum 0
                log_sum = log_sum.masked_fill(mask.blind.repeat(heads // kv_heads)[:, None], float("-inf"))
            outs.append(out[0])
            sums.append(log_sum)
        alone = len(outs) == 1 and self.sinks_H is None
        out, log_sum = (outs[0], sums[0]) if alone else self._merge(outs, sums, rows)
        return out.reshape(heads, rows, -1).transpose(0, 1), log_sum.reshape(heads, rows).T

    def _merge(
        self, outs: list[torch.Tensor], sums: list[torch.Tensor], rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        peak = sums[0]
        for other in sums[1:]:
            peak = torch.maximum(peak, other)
        if self.sinks_H is not None:
            sink = self.sinks_H.to(peak.dtype).repeat_interleave(rows).reshape(peak.shape)
            peak = torch.maximum(peak, sink)
        total = (sink - peak).exp() if self.sinks_H is not None else torch.zeros_like(peak)
        merged = torch.zeros_like(outs[0])
        for out, log_sum in zip(outs, sums, strict=True):
            weight = (log_sum - peak).exp()
            total = total + weight
            merged += out * weight
        return merged / total, peak + total.log()


class _EagerTile:
    """Scores in memory: for softcap, and for devices without the flash kernel. Results as ``_FlashTile``'s."""

    max_rows = row_multiple = EAGER_ROWS  # one shape only: threads split these products by rows

    def __init__(self, scale: float, softcap: float | None, sinks_H: torch.Tensor | None) -> None:
        self.scale, self.softcap, self.sinks_H = scale, softcap, sinks_H

    def __call__(
        self,
        query_QHD: torch.Tensor,
        key_KSD: torch.Tensor,
        value_KSD: torch.Tensor,
        parts: list[Part],
        masks: list[Mask | None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, heads, dim = query_QHD.shape
        kv_heads, low = len(key_KSD), parts[0].start
        folded = (kv_heads, heads // kv_heads, rows)  # query heads of one key head fold into the rows
        query = query_QHD.transpose(0, 1).reshape(kv_heads, -1, dim)
        scores = torch.bmm(query, key_KSD[:, low:].transpose(1, 2)).mul_(self.scale)
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh().mul_(self.softcap)
        scores = scores.view(*folded, -1)
        for part, mask in zip(parts, masks, strict=True):
            if mask is not None:
                scores[..., part.start - low : part.end - low].add_(mask.values)
        peak = scores.amax(-1, keepdim=True)
        if self.sinks_H is not None:
            sink = self.sinks_H.to(scores.dtype).view(kv_heads, -1, 1, 1)
            peak = torch.maximum(peak, sink)
        weights = scores.sub_(peak).exp()
        total = weights.sum(-1, keepdim=True)
        if self.sinks_H is not None:
            total = total + (sink - peak).exp()
        out = torch.bmm(weights.view(kv_heads, -1, weights.shape[-1]), value_KSD[:, low:])
        out = out.view(*folded, -1) / total
        return out.reshape(heads, rows, -1).transpose(0, 1), (peak + total.log()).reshape(heads, rows).T
