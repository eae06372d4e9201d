"""BM25 (Lucene's form) over words, as an alternative to vectors: no model, exact names, small.

Words are runs of letters and digits in any script, case-folded. There is no list of stop words: rare words outweigh
them anyway, and a query of stop words alone must still find something.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np

from trace_fast.errors import InputError
from trace_fast.trainer.search.retriever import Match

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """The words of a text, as documents and queries are indexed."""
    return _WORD.findall(text.casefold())


class Bm25Retriever:
    """A ``Retriever``; documents that share no word with a query are no matches."""

    def __init__(self, index: Any) -> None:
        self._index = index
        self._known = index.vocab_dict
        self._documents = int(index.scores["num_docs"])

    @classmethod
    def build(cls, texts: Iterable[str]) -> Bm25Retriever:
        """Indexes texts; text i is row i."""
        index = bm25s.BM25(method="lucene")
        index.index([words(text) for text in texts], show_progress=False)
        return cls(index)

    def save(self, folder: Path) -> None:
        """Writes the index into a folder."""
        self._index.save(str(folder), show_progress=False)

    @classmethod
    def load(cls, folder: Path, *, mapped: bool = True) -> Bm25Retriever:
        """Reads, or memory-maps, what ``save`` wrote.

        Raises:
            InputError: no whole index is in the folder.
        """
        try:
            return cls(bm25s.BM25.load(str(folder), mmap=mapped, load_corpus=False))
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"{folder}: expected a BM25 index: {error}") from error

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Match]]:
        """As ``Retriever.retrieve``; ties go to the earlier document."""
        return [self._one(query, k) for query in queries]

    def _one(self, query: str, k: int) -> list[Match]:
        known = [word for word in words(query) if word in self._known]
        if not known:
            return []
        scores_N = self._index.get_scores(known)
        rows = np.flatnonzero(scores_N > 0)
        if len(rows) > k:  # all that tie with the k-th, so that the earlier of them stay
            rows = rows[scores_N[rows] >= np.partition(scores_N[rows], -k)[-k]]
        best = rows[np.argsort(-scores_N[rows], kind="stable")][:k]
        return [Match(int(row), float(scores_N[row])) for row in best]
