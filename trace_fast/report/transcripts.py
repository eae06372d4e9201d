"""Transcripts under a byte budget: in full while they fit, else every long segment cut to the same size.

A page is opened as a whole, so what bounds it is the number of bytes its texts take *as embedded* (UTF-8, with
escapes). Cutting is even: one cap for all segments, so short segments stay whole and no rollout is favoured. A
cut segment keeps its head and its tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trace_fast.report.text import embed_json


@dataclass(slots=True)
class _Text:
    role: str
    turn: int
    name: str | None
    head: str
    tail: str
    omitted: int  # characters cut out between head and tail
    size: int  # bytes of head and tail as embedded

    def cut(self, cap: int) -> None:
        if self.size <= cap:
            return
        length = len(self.head) + self.omitted + len(self.tail)
        tail_source = self.tail if self.omitted else self.head
        tail = _fitting(tail_source, cap // 3, from_end=True)
        head = _fitting(self.head if self.omitted else self.head[: len(self.head) - len(tail)], cap - cap // 3)
        self.head, self.tail, self.omitted = head, tail, length - len(head) - len(tail)
        self.size = _embedded_size(head) + _embedded_size(tail)


@dataclass(frozen=True, slots=True)
class CutSummary:
    """How much of the text is in the page: ``kept_chars`` of ``total_chars``, ``cut_segments`` of ``segments``."""

    segments: int
    cut_segments: int
    total_chars: int
    kept_chars: int


class TranscriptStore:
    """Collects the texts of all rollouts while holding about twice ``budget`` bytes at most.

    Args:
        budget: the most bytes that all texts together may take in the page.
    """

    def __init__(self, budget: int) -> None:
        self._budget = max(budget, 0)
        self._rollouts: list[list[_Text]] = []
        self._held = 0

    def add(self, texts: Iterable[tuple[str, int, str | None, str]]) -> None:
        """Adds one rollout's texts as (role, turn, name of tool or key, text), already made visible."""
        rollout = [_Text(role, turn, name, text, "", 0, _embedded_size(text)) for role, turn, name, text in texts]
        self._rollouts.append(rollout)
        self._held += sum(text.size for text in rollout)
        if self._held > 2 * self._budget:
            self._cut(self._budget)  # a later, smaller cap cuts the same heads and tails further

    @property
    def structure_bytes(self) -> int:
        """Bytes of the page that go to roles, names and brackets around the texts, whatever is cut."""
        return sum(_structure_size(text) for rollout in self._rollouts for text in rollout)

    def finish(self, budget: int) -> CutSummary:
        """Cuts everything to ``budget`` bytes (at most the one given at first)."""
        self._cut(min(max(budget, 0), self._budget))
        texts = [text for rollout in self._rollouts for text in rollout]
        kept = sum(len(text.head) + len(text.tail) for text in texts)
        return CutSummary(
            segments=len(texts),
            cut_segments=sum(text.omitted > 0 for text in texts),
            total_chars=kept + sum(text.omitted for text in texts),
            kept_chars=kept,
        )

    def embedded(self) -> list[str]:
        """One JSON document a rollout: a list of [role, turn, name, head, tail, omitted characters]."""
        return [embed_json([_row(text) for text in rollout]) for rollout in self._rollouts]

    def _cut(self, budget: int) -> None:
        texts = [text for rollout in self._rollouts for text in rollout]
        cap = even_cap([text.size for text in texts], budget)
        if cap is None:
            return
        for text in texts:
            text.cut(cap)
        self._held = sum(text.size for text in texts)


def even_cap(sizes: Sequence[int], budget: int) -> int | None:
    """Largest cap c with sum(min(size, c)) <= budget, or ``None`` when everything fits uncut."""
    remaining = budget
    ordered = sorted(sizes)
    if sum(ordered) <= budget:
        return None
    for i, size in enumerate(ordered):
        share = remaining // (len(ordered) - i)
        if size > share:
            return share
        remaining -= size
    raise AssertionError("sizes above the budget always meet a share that is too small")


def _row(text: _Text) -> list[Any]:
    return [text.role, text.turn, text.name, text.head, text.tail, text.omitted]


def _structure_size(text: _Text) -> int:
    length = len(text.head) + text.omitted + len(text.tail)  # no number of omitted characters is longer than this
    return len(embed_json([text.role, text.turn, text.name, "", "", length]).encode()) + 1  # and a comma


def _embedded_size(text: str) -> int:
    return len(embed_json(text).encode()) - 2 if text else 0


def _fitting(text: str, limit: int, *, from_end: bool = False) -> str:
    """A longest-or-slightly-shorter start (or end) of ``text`` that takes at most ``limit`` bytes as embedded."""
    size = _embedded_size(text)
    while size > limit:
        keep = min(len(text) * limit // size, len(text) - 1)
        text = text[len(text) - keep :] if from_end else text[:keep]
        size = _embedded_size(text)
    return text
