"""What finds documents: queries in, one list of matches a query out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from trace_fast.errors import TraceFastError
from trace_fast.trainer.search.corpus import Document


class SearchError(TraceFastError):
    """A search failed or took too long; the next one may succeed. The browser shows it to the policy."""


class Match(NamedTuple):
    """Row of a document and its score; larger is better, and scores of different retrievers do not compare."""

    row: int
    score: float


class Retriever(Protocol):
    """Finds rows for queries. Any number of threads may call it."""

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Match]]:
        """One list a query, in order, of at most ``k`` matches, best first; fewer where fewer were found.

        Raises:
            SearchError: nothing could be searched.
        """
        ...


def indexed_text(document: Document) -> str:
    """The text of a document that is searched: its title and what it says."""
    return f"{document.title}\n{document.text}" if document.title else document.text
