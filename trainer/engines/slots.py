"""Which sequence's keys and values lie where: host-side bookkeeping of slots, and what is kept beside them.

A slot knows the ids whose keys and values it holds. A prompt is served by the longest common prefix with any slot,
busy ones included, or with a sequence that was kept aside when its slot was needed. Prompts of one round that begin
alike wait for one another in *waves*, so that a common beginning is computed once.

Shapes: S slots, L positions, B rows of a pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from trace_fast.trainer.engines.slot_attention import SlotStore

LEAST_SHARED = 32  # tokens; to copy fewer, or to wait for fewer, costs more than to compute them again


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt was put: ``reused`` of its tokens are there already. Its first ``shared`` tokens are those of slot
    ``after`` too, which are computed in an earlier wave."""

    slot: int
    reused: int
    wave: int = 0
    after: int | None = None
    shared: int = 0


@dataclass(frozen=True, slots=True)
class _Kept:
    ids: np.ndarray
    tensors: list[Tensor]


class SlotBook:
    """All slots of a store.

    Args:
        cache_tokens: how many tokens of sequences without a slot are kept aside, oldest out first.
    """

    def __init__(self, store: SlotStore, cache_tokens: int) -> None:
        self._store = store
        self._cache_tokens = cache_tokens
        self._ids = np.zeros((store.n_slots, store.max_length), dtype=np.int32)
        self._lengths = np.zeros(store.n_slots, dtype=np.int64)  # tokens that are there, for whoever begins alike
        self._planned = np.zeros(store.n_slots, dtype=np.int64)  # tokens that will be there after this round
        self._waves = np.zeros(store.n_slots, dtype=np.int64)
        self._busy = np.zeros(store.n_slots, dtype=bool)
        self._used = np.zeros(store.n_slots, dtype=np.int64)
        self._aside: OrderedDict[int, _Kept] = OrderedDict()  # oldest first
        self.tokens_aside = 0
        self._tick = 0

    def forget(self) -> None:
        """Drops everything: what is kept belongs to other weights, or a call broke off. The book is then as a new one,
        so that what comes next does not depend on what was."""
        self._lengths[:] = 0
        self._used[:] = 0
        self._tick = 0
        self._busy[:] = False
        self._aside.clear()
        self.tokens_aside = 0

    def reserve(self, prompts: Sequence[np.ndarray]) -> dict[int, int]:
        """``{prompt: slot}`` for prompts that continue all of what a slot holds; each takes the fullest one left."""
        taken = np.zeros(len(self._lengths), dtype=bool)
        found: dict[int, int] = {}
        for number, prompt in enumerate(prompts):
            common = self._common(prompt, self._lengths)
            whole = np.where((common == self._lengths) & (common < len(prompt)) & ~taken, common, 0)
            slot = int(whole.argmax())
            if whole[slot]:
                found[number] = slot
                taken[slot] = True
        return found

    def free_slot(self) -> int | None:
        """An idle slot: an empty one, else the one used longest ago."""
        idle = np.flatnonzero(~self._busy).tolist()
        return min(idle, key=lambda slot: (self._lengths[slot] > 0, self._used[slot]), default=None)

    # --- a round of prompts that are put into slots at the same time --------------------------------------------

    def begin_round(self) -> None:
        """Forgets who waits for whom."""
        self._planned[:] = 0

    def place(self, prompt: np.ndarray, slot: int) -> Place:
        """Puts a prompt into an idle slot, and brings there what is known of its beginning."""
        limit = len(prompt) - 1  # the last token always runs: its logits are wanted
        reused = self._fetch(prompt, slot, limit)
        self._ids[slot, : len(prompt)] = prompt
        self._lengths[slot] = reused
        self._busy[slot] = True
        common = np.minimum(self._common(prompt, self._planned), limit)
        shared = int(common.max())
        after, wave = None, 0
        if shared >= reused + LEAST_SHARED:
            alike = np.flatnonzero(common == shared)
            after = int(alike[self._waves[alike].argmin()])
            wave = int(self._waves[after]) + 1
        self._planned[slot] = len(prompt)
        self._waves[slot] = wave
        return Place(slot, reused, wave, after, shared)

    def join(self, place: Place) -> int:
        """Copies what a place waited for; how many of its tokens are there now."""
        have = int(self._lengths[place.slot])
        if place.after is not None:
            ready = min(place.shared, int(self._lengths[place.after]))  # 0 where that one failed
            if ready > have:
                self._store.copy(place.after, place.slot, have, ready)
                self._lengths[place.slot] = have = ready
        return have

    # --- running and release ------------------------------------------------------------------------------------

    def computed(self, slot: int, length: int) -> None:
        """The first ``length`` tokens of the slot's prompt are there."""
        self._lengths[slot] = length

    def append(self, slots_B: np.ndarray, positions_B: np.ndarray, ids_B: np.ndarray) -> None:
        """One more token a slot is there."""
        self._ids[slots_B, positions_B] = ids_B
        self._lengths[slots_B] = positions_B + 1

    def release(self, slot: int) -> None:
        """The slot's sequence ended; what it holds stays until the slot is needed."""
        self._tick += 1
        self._used[slot] = self._tick
        self._busy[slot] = False

    def discard(self, slot: int) -> None:
        """As ``release``, for a slot that may hold what is no number."""
        self.release(slot)
        self._lengths[slot] = 0
        self._store.clear(slot)

    # --- parts --------------------------------------------------------------------------------------------------

    def _fetch(self, prompt: np.ndarray, slot: int, limit: int) -> int:
        """Brings the longest known beginning of a prompt into a slot; its length."""
        known = np.minimum(self._common(prompt, self._lengths), limit)
        source, own = int(known.argmax()), int(known[slot])
        aside = {key: min(_common_prefix(prompt, kept.ids), limit) for key, kept in self._aside.items()}
        key = max(aside, key=lambda k: aside[k], default=None)
        best = max(int(known[source]), 0 if key is None else aside[key])
        if best < own + LEAST_SHARED:
            if self._lengths[slot] > own:
                self._keep_aside(slot)
            return own
        if key is not None and aside[key] == best:
            kept = self._aside[key]
            if best == len(kept.ids):
                self._drop(key)  # its own continuation takes it over
            self._keep_aside(slot)
            self._store.put(slot, kept.tensors, best)
        else:
            self._keep_aside(slot)
            self._store.copy(source, slot, 0, best)
        return best

    def _keep_aside(self, slot: int) -> None:
        length = int(self._lengths[slot])
        if not LEAST_SHARED <= length <= self._cache_tokens:
            return
        self._tick += 1
        self._aside[self._tick] = _Kept(self._ids[slot, :length].copy(), self._store.take(slot, length))
        self.tokens_aside += length
        while self.tokens_aside > self._cache_tokens:
            self._drop(next(iter(self._aside)))

    def _drop(self, key: int) -> None:
        self.tokens_aside -= len(self._aside.pop(key).ids)

    def _common(self, prompt: np.ndarray, lengths_S: np.ndarray) -> np.ndarray:
        """``(S,)`` common prefix of a prompt with the first ``lengths`` ids of each slot."""
        width = min(len(prompt), int(lengths_S.max()))
        if not width:
            return np.zeros_like(lengths_S)
        differs_SL = self._ids[:, :width] != prompt[:width]
        first_S = np.where(differs_SL.any(axis=1), differs_SL.argmax(axis=1), width)
        return np.minimum(first_S, lengths_S)


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    width = min(len(a), len(b))
    differs = np.flatnonzero(a[:width] != b[:width])
    return int(differs[0]) if len(differs) else width
