"""Attention over slots: keys and values of many sequences side by side, in a model's own layers.

A *slot* holds the keys and values of one sequence, position by position. A forward pass is a flat list of rows, each a
token of some slot at some position: it writes its key and value there and sees positions 0..its own of its slot. One
row a slot is decoding; runs of rows are prefilling; the rows are packed, never padded to one another. As in scoring,
the model's attention is switched to a function of transformers' ``AttentionInterface`` and the pass travels to it as a
keyword argument.

    scores = softcap(scale * q k^T), hidden positions removed;  p = softmax(scores, sink);  out = p v

Shapes: R rows of a pass, S slots, H query heads, K key/value heads, G = H/K, D head dim, L positions. Scores and
softmax are float32 (float64 for float64 input).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from trace_fast.errors import ModelError

SLOT_ATTENTION = "trace_fast_slots"
QUERY_BLOCK = 64  # rows of one product where results must not depend on where a prefill began
_LONGEST_BLOCK = 256  # rows whose scores exist at a time, where they exist at all


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that continue one slot: positions ``start:stop``."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Block:
    """Neighbouring slots that decode together: rows ``first:last`` of the pass, slots ``low:high``, of which ``inside``
    (relative to ``low``) are in the pass; ``None``: all of them."""

    first: int
    last: int
    low: int
    high: int
    length: int
    positions_S: Tensor
    inside: Tensor | None


class SlotStore:
    """Keys and values of all slots and layers. A layer's tensors are made when it runs first, since only then are its
    heads and dims known; they start as zeros: what lies behind a sequence gets weight 0, but must be a number."""

    def __init__(self, n_slots: int, max_length: int) -> None:
        self.n_slots = n_slots
        self.max_length = max_length
        self._layers: list[tuple[Tensor, Tensor]] = []

    @property
    def bytes(self) -> int:
        """Of all layers seen so far."""
        return sum(t.numel() * t.element_size() for pair in self._layers for t in pair)

    def layer(self, number: int, key_RKD: Tensor, value_RKD: Tensor) -> tuple[Tensor, Tensor]:
        """``(S, K, L, D)`` keys and values of one layer."""
        if number == len(self._layers):
            pair = [
                t.new_zeros(self.n_slots, t.shape[1], self.max_length, t.shape[2]) for t in (key_RKD, value_RKD)
            ]
            self._layers.append((pair[0], pair[1]))
        return self._layers[number]

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Positions ``start:stop`` of one slot into another."""
        for pair in self._layers:
            for tensor in pair:
                tensor[target, :, start:stop].copy_(tensor[source, :, start:stop])

    def take(self, slot: int, length: int) -> list[Tensor]:
        """A compact copy of the first ``length`` positions."""
        return [tensor[slot, :, :length].clone() for pair in self._layers for tensor in pair]

    def put(self, slot: int, taken: Sequence[Tensor], length: int) -> None:
        """The first ``length`` positions from what ``take`` gave."""
        tensors = [tensor for pair in self._layers for tensor in pair]
        for tensor, part in zip(tensors, taken, strict=True):
            tensor[slot, :, :length].copy_(part[:, :length])

    def clear(self, slot: int) -> None:
        """Zeros, where something that is no number may have been written."""
        for pair in self._layers:
            for tensor in pair:
                tensor[slot].zero_()


@dataclass
class SlotPass:
    """One forward pass; handed to every attention layer.

    Args:
        runs: in the order of the rows; at most one a slot. The rows behind them are padding.
        decoding: the runs are single rows in the order of their slots, to be worked on together.
        exact: work in blocks whose shape depends on positions only.
        block_slots, block_gap: decoding slots form blocks of at most so many, with at most so many idle ones between.
    """

    store: SlotStore
    runs: Sequence[Run]
    device: torch.device
    decoding: bool = False
    exact: bool = False
    block_slots: int = 8
    block_gap: int = 0
    windows: list[int | None] = field(default_factory=list)  # of the layers, in the order they ran

    def __post_init__(self) -> None:
        slots = np.array([run.slot for run in self.runs])
        starts = np.array([run.start for run in self.runs])
        counts = np.array([run.stop for run in self.runs]) - starts
        first = np.cumsum(counts) - counts
        self.n_rows = int(counts.sum())
        positions = np.arange(self.n_rows) + np.repeat(starts - first, counts)
        self.positions = torch.as_tensor(positions).to(self.device)
        self._slot_R = torch.as_tensor(np.repeat(slots, counts)).to(self.device)
        self._first = first.tolist()
        assert not self.decoding or ((counts == 1).all() and (np.diff(slots) > 0).all())
        self._blocks = self._decode_blocks(slots, starts) if self.decoding else []
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def _decode_blocks(self, slots: np.ndarray, positions: np.ndarray) -> list[_Block]:
        width = 1 if self.exact else self.block_slots
        blocks, first = [], 0
        for row in range(1, len(slots) + 1):
            if row < len(slots):
                together = slots[row] - slots[first] < width and slots[row] - slots[row - 1] <= 1 + self.block_gap
                if together:
                    continue
            low, high = int(slots[first]), int(slots[row - 1]) + 1
            places = np.zeros(high - low, dtype=np.int64)
            inside = slots[first:row] - low
            places[inside] = positions[first:row]
            dense = row - first == high - low
            index = None if dense else torch.as_tensor(inside).to(self.device)
            length = int(positions[first:row].max()) + 1
            blocks.append(_Block(first, row, low, high, length, torch.as_tensor(places).to(self.device), index))
            first = row
        return blocks

    def attend(
        self,
        query_RHD: Tensor,
        key_RKD: Tensor,
        value_RKD: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """``(R, H, D)`` of one layer; its keys and values are kept. Rows of padding give zeros."""
        keys_SKLD, values_SKLD = self.store.layer(len(self.windows), key_RKD, value_RKD)
        self.windows.append(window)
        n = self.n_rows
        keys_SKLD[self._slot_R, :, self.positions] = key_RKD[:n]
        values_SKLD[self._slot_R, :, self.positions] = value_RKD[:n]
        out_RHD = query_RHD.new_zeros(len(query_RHD), query_RHD.shape[1], value_RKD.shape[2])
        attention = _Attention(scale, window, softcap, sinks_H)
        if self.decoding:
            for number, block in enumerate(self._blocks):
                self._decode(number, block, attention, query_RHD, keys_SKLD, values_SKLD, out_RHD)
        else:
            for run, first in zip(self.runs, self._first, strict=True):
                rows = slice(first, first + run.stop - run.start)
                keys_KLD, values_KLD = keys_SKLD[run.slot], values_SKLD[run.slot]
                self._prefill(run, attention, query_RHD[rows], keys_KLD, values_KLD, out_RHD[rows])
        return out_RHD

    def _decode(
        self,
        number: int,
        block: _Block,
        attention: _Attention,
        query_RHD: Tensor,
        keys_SKLD: Tensor,
        values_SKLD: Tensor,
        out_RHD: Tensor,
    ) -> None:
        keys, values = keys_SKLD[block.low : block.high, :, : block.length], values_SKLD[block.low : block.high]
        query = query_RHD[block.first : block.last]
        if block.inside is not None:
            spread = query.new_zeros(block.high - block.low, *query.shape[1:])
            spread[block.inside] = query
            query = spread
        n_slots, heads, dim = query.shape
        query_SKGD = query.reshape(n_slots, keys.shape[1], heads // keys.shape[1], dim)
        found = attention.by_scores(
            query_SKGD, keys, values[:, :, : block.length], self._decode_mask(number, block, attention.window)
        ).reshape(n_slots, heads, -1)
        out_RHD[block.first : block.last] = found if block.inside is None else found[block.inside]

    def _decode_mask(self, number: int, block: _Block, window: int | None) -> Tensor | None:
        """``(S, 1, 1, L)`` True where a slot's row sees a position; ``None`` where each sees all. Made once a pass."""
        if (number, window) not in self._masks:
            even = bool((block.positions_S == block.length - 1).all()) if self.device.type == "cpu" else False
            if even and (window is None or window >= block.length):
                mask = None
            else:
                mask = _visible(block.positions_S, 0, block.length, window)[:, None, None]
            self._masks[number, window] = mask
        return self._masks[number, window]

    def _prefill(
        self, run: Run, attention: _Attention, query_nHD: Tensor, keys_KLD: Tensor, values_KLD: Tensor, out_nHD: Tensor
    ) -> None:
        heads, groups = query_nHD.shape[1], query_nHD.shape[1] // len(keys_KLD)
        for begin, end in self._query_blocks(run, attention):
            low, high = max(begin, run.start), min(end, run.stop)
            query = query_nHD[low - run.start : high - run.start]
            if high - low < end - begin:  # rows of the block that are no part of the run
                query = F.pad(query, (0, 0, 0, 0, low - begin, end - high))
            first_key = 0 if attention.window is None else max(0, begin - attention.window + 1)
            last_key = min(end, self.store.max_length)
            query_KGnD = query.reshape(end - begin, -1, groups, query.shape[-1]).permute(1, 2, 0, 3)
            mask_nL = self._prefill_mask(begin, end, first_key, last_key, attention.window)
            found_KGnD = attention(
                query_KGnD, keys_KLD[:, first_key:last_key], values_KLD[:, first_key:last_key], mask_nL
            )
            found_nHD = found_KGnD.permute(2, 0, 1, 3).reshape(end - begin, heads, -1)
            out_nHD[low - run.start : high - run.start] = found_nHD[low - begin : high - begin]

    def _query_blocks(self, run: Run, attention: _Attention) -> list[tuple[int, int]]:
        """Positions whose rows are worked on together."""
        if self.exact:  # whole blocks at multiples: their shape does not tell where the run began or ended
            first = run.start - run.start % QUERY_BLOCK
            return [(b, b + QUERY_BLOCK) for b in range(first, run.stop, QUERY_BLOCK)]
        step = run.stop - run.start if attention.fused else _LONGEST_BLOCK
        return [(b, min(b + step, run.stop)) for b in range(run.start, run.stop, step)]

    def _prefill_mask(self, begin: int, end: int, first_key: int, last_key: int, window: int | None) -> Tensor | None:
        """``(n, L)`` True where a row sees a position; ``None`` where it is the plain causal one."""
        if begin == first_key and end == last_key and (window is None or window >= end - begin):
            return None
        places = torch.arange(begin, end, device=self.device)
        return _visible(places, first_key, last_key, window)


def _visible(positions_n: Tensor, first_key: int, last_key: int, window: int | None) -> Tensor:
    keys_L = torch.arange(first_key, last_key, device=positions_n.device)
    visible_nL = keys_L <= positions_n[:, None]
    return visible_nL if window is None else visible_nL & (keys_L > positions_n[:, None] - window)


@dataclass(frozen=True, slots=True)
class _Attention:
    """What a layer means by attention. ``query[..., G, n, D]`` shares the keys of its K/V head."""

    scale: float
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None

    @property
    def fused(self) -> bool:
        """Whether torch's fused kernel can do it."""
        return self.softcap is None and self.sinks_H is None

    def __call__(self, query_KGnD: Tensor, keys_KLD: Tensor, values_KLD: Tensor, mask_nL: Tensor | None) -> Tensor:
        """Prefill. ``mask_nL`` None: row i sees keys 0..i."""
        kv_heads, groups, n, _ = query_KGnD.shape
        if self.fused:
            keys, values = (t[:, None].expand(-1, groups, -1, -1) for t in (keys_KLD, values_KLD))
            return F.scaled_dot_product_attention(
                query_KGnD, keys, values, attn_mask=mask_nL, is_causal=mask_nL is None, scale=self.scale
            )
        if mask_nL is None:
            places = torch.arange(n, device=query_KGnD.device)
            mask_nL = _visible(places, 0, n, None)
        # The G heads of a K/V head are rows of one product.
        query = query_KGnD.reshape(1, kv_heads, groups * n, -1)
        found = self.by_scores(query, keys_KLD[None], values_KLD[None], mask_nL.repeat(groups, 1), rows_a_head=n)
        return found.reshape(kv_heads, groups, n, -1)

    def by_scores(
        self, query_SKGD: Tensor, keys_SKLD: Tensor, values_SKLD: Tensor, mask: Tensor | None, rows_a_head: int = 1
    ) -> Tensor:
        """Scores in full, for few rows a K/V head or for what the fused kernel cannot do."""
        wide = torch.promote_types(query_SKGD.dtype, torch.float32)
        scores_SKGL = torch.matmul(query_SKGD, keys_SKLD.transpose(2, 3)).to(wide).mul_(self.scale)
        if self.softcap is not None:
            scores_SKGL = torch.tanh(scores_SKGL / self.softcap).mul_(self.softcap)
        if mask is not None:
            scores_SKGL.masked_fill_(~mask, float("-inf"))
        if self.sinks_H is None:
            weights = scores_SKGL.softmax(dim=-1)
        else:
            sinks_KG1 = self.sinks_H.to(wide).view(scores_SKGL.shape[1], -1).repeat_interleave(rows_a_head, dim=1)
            sinks = sinks_KG1[None, :, :, None].expand(len(scores_SKGL), -1, -1, -1)
            weights = torch.cat([scores_SKGL, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        return torch.matmul(weights.to(values_SKLD.dtype), values_SKLD)


def _slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    trace_fast_slots: SlotPass | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,  # what transformers passes along for other implementations (dropout is 0 in eval mode)
) -> tuple[Tensor, None]:
    """transformers' attention signature: (1, H, R, D) in, (1, R, H, D) out."""
    if trace_fast_slots is None:
        raise ModelError(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    if position_bias is not None or attention_mask is not None:
        raise ModelError(f"{type(module).__name__} adds a bias or mask of its own to its attention: not supported")
    out_RHD = trace_fast_slots.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
    )
    return out_RHD[None], None


AttentionInterface.register(SLOT_ATTENTION, _slot_attention)
