"""Random choices that come out the same on every machine and Python version.

Only ``random.Random(str)`` and its ``random()`` are used, the two that Python promises never to change; ``choice``,
``shuffle`` and ``sample`` are written on top of them, because their results have changed between versions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """A stream of choices named by ``key``: equal keys give equal streams, and one stream never disturbs another."""

    def __init__(self, *key: str | int) -> None:
        self._uniform = random.Random("/".join(str(part) for part in key)).random

    def below(self, n: int) -> int:
        """An integer in ``[0, n)``."""
        assert n > 0, n
        return int(self._uniform() * n)

    def between(self, low: int, high: int) -> int:
        """An integer in ``[low, high]``."""
        return low + self.below(high - low + 1)

    def chance(self, probability: float) -> bool:
        return self._uniform() < probability

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def weighted(self, items: Sequence[T], weights: Sequence[float]) -> T:
        """One of ``items`` with probability proportional to its weight."""
        assert len(items) == len(weights), (len(items), len(weights))
        left = self._uniform() * sum(weights)
        for item, weight in zip(items, weights, strict=True):
            left -= weight
            if left < 0:
                return item
        return items[-1]  # rounding of the sum

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """All items in a random order (Fisher-Yates)."""
        out = list(items)
        for last in range(len(out) - 1, 0, -1):
            other = self.below(last + 1)
            out[last], out[other] = out[other], out[last]
        return out
