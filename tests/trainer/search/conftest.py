"""An encoder without a model, and a small corpus."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import pytest

from trace_fast.trainer.search import Document
from trace_fast.trainer.search.bm25 import words


class HashEncoder:
    """Bags of words hashed into ``dimension`` signed buckets: texts that share words are near; not of length 1."""

    def __init__(self, dimension: int = 64, name: str = "hash") -> None:
        self.dimension = dimension
        self.name = name

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        return self.encode_documents(texts)

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.full((len(texts), self.dimension), 1e-3, dtype=np.float32)
        for row, text in enumerate(texts):
            for word in words(text):
                number = zlib.crc32(word.encode())
                vectors[row, number % self.dimension] += 1 if number & 64 else -1
        return vectors


@pytest.fixture
def encoder() -> HashEncoder:
    return HashEncoder()


@pytest.fixture
def documents() -> list[Document]:
    """Documents that differ in one word each, of which the last must never come up by accident."""
    animals = ("badger", "camel", "dolphin", "eagle", "ferret", "gecko", "heron")
    return [
        Document(f"d{i}", f"https://zoo/{name}", name.title(), f"The {name} lives here.\nIt eats at {i + 4} p.m.")
        for i, name in enumerate(animals)
    ]
