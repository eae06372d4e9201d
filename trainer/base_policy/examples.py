"""Token ids with a weight each: what the policy learns from.

Shapes: an example has ids (L,) and weights (L,); the weight of a token counts for its prediction from those before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trace_fast.formats.answers import encode
from trace_fast.trainer.harness import ChatFrame

READ = 0.1  # weight of text that is read: enough to learn how names repeat, too little to drown what is written


@dataclass(frozen=True, slots=True)
class Example:
    """Args: ids: ``(L,) int64``. weights: ``(L,) float32``, 0 where nothing is learned."""

    ids: np.ndarray
    weights: np.ndarray


class ExampleWriter:
    """Puts pieces together; what is written by the policy has weight 1 and ends with the end-of-turn token."""

    def __init__(self, frame: ChatFrame) -> None:
        self._frame = frame
        self._ids: list[np.ndarray] = []
        self._weights: list[float] = []

    def text(self, text: str, weight: float) -> None:
        self.add(encode(self._frame.tokenizer, text), weight)

    def written(self, text: str) -> None:
        self.text(text + self._frame.end_text, 1.0)

    def add(self, ids: np.ndarray, weight: float) -> None:
        self._ids.append(ids)
        self._weights.append(weight)

    def __len__(self) -> int:
        return sum(map(len, self._ids))

    def example(self) -> Example:
        weights = [np.full(len(ids), weight, np.float32) for ids, weight in zip(self._ids, self._weights, strict=True)]
        return Example(np.concatenate(self._ids), np.concatenate(weights))
