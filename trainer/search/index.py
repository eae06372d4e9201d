"""A searchable corpus: documents by row and something that finds rows; built in a folder, opened from it again.

Files of an index folder: those of the document store, those of its retriever, and ``index.json``, which is written
last, so a folder without it is no index.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_fast.atomic_write import write_atomically
from trace_fast.errors import ConfigError, InputError
from trace_fast.trainer.search.bm25 import Bm25Retriever
from trace_fast.trainer.search.corpus import Document
from trace_fast.trainer.search.encoders import Encoder
from trace_fast.trainer.search.retriever import Retriever, SearchError, indexed_text
from trace_fast.trainer.search.service import QueryService
from trace_fast.trainer.search.store import DocumentStore
from trace_fast.trainer.search.vectors import Kind, VectorRetriever, plan_vectors

SETTINGS, VECTORS, BM25 = "index.json", "vectors.faiss", "bm25"
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Hit:
    """A document found, and how well it matches (scores of one retriever compare with each other only)."""

    document: Document
    score: float


class SearchIndex:
    """Documents and a retriever over them. Any number of threads may search.

    Args:
        documents: by row. retriever: finds rows; wrap it into a ``QueryService`` for many callers.
    """

    def __init__(self, documents: Sequence[Document], retriever: Retriever) -> None:
        self._documents = documents
        self._retriever = retriever

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, query: str, topn: int) -> list[Hit]:
        """At most ``topn`` documents, best first.

        Raises:
            SearchError: nothing could be searched, or the retriever named a row that is none.
        """
        lists = self._retriever.retrieve([query], topn)
        if len(lists) != 1:
            raise SearchError(f"the retriever gave {len(lists)} lists of matches for one query")
        hits = []
        for match in lists[0][:topn]:
            if not 0 <= match.row < len(self._documents):
                raise SearchError(f"the retriever found row {match.row}; the corpus has 0..{len(self) - 1}")
            hits.append(Hit(self._documents[match.row], match.score))
        return hits


def build_bm25(
    documents: Iterable[Document], folder: str | os.PathLike[str], *, report: Report, corpus: str | None = None
) -> SearchIndex:
    """Writes a BM25 index of a corpus.

    Args:
        report: gets a line before the work begins. corpus: ``corpus_hash`` of where the documents are from, kept in
            the index's settings.
    """
    path, store = _begin(documents, folder)
    report(f"BM25 index of {len(store):,} documents")
    Bm25Retriever.build(map(indexed_text, store)).save(path / BM25)
    _finish(path, {"kind": "bm25", "documents": len(store), "corpus": corpus})
    return open_index(path)


def build_vectors(
    documents: Iterable[Document],
    folder: str | os.PathLike[str],
    encoder: Encoder,
    *,
    kind: Kind = "auto",
    batch: int = 256,
    report: Report,
    corpus: str | None = None,
) -> SearchIndex:
    """Writes a FAISS index of a corpus; ``report`` gets the plan with its memory before anything is encoded.
    ``corpus``: as for ``build_bm25``."""
    path, store = _begin(documents, folder)
    plan = plan_vectors(len(store), encoder.dimension, kind)
    report(plan.describe())
    VectorRetriever.build(store, encoder, plan, batch=batch).save(path / VECTORS)
    about = {"encoder": encoder.name, "index": plan.kind, "corpus": corpus}
    _finish(path, {"kind": "vectors", "documents": len(store), **about})
    return open_index(path, encoder=encoder)


def open_index(
    folder: str | os.PathLike[str], *, encoder: Encoder | None = None, mapped: bool = True, timeout_s: float = 30.0
) -> SearchIndex:
    """Opens what ``build_bm25`` or ``build_vectors`` wrote, for many callers at once.

    Args:
        encoder: of a vector index: the one it was built with.
        mapped: memory-map the index instead of reading it.
        timeout_s: seconds that one search may take.

    Raises:
        InputError: no whole index is in the folder. ConfigError: the encoder is missing or another one.
    """
    path = Path(folder)
    settings = index_settings(path)
    store = DocumentStore(path)
    if len(store) != settings.get("documents"):
        raise InputError(f"{path}: {SETTINGS} says {settings.get('documents')} documents, the store has {len(store)}")
    retriever: Retriever
    if settings.get("kind") == "bm25":
        retriever = Bm25Retriever.load(path / BM25, mapped=mapped)
    elif settings.get("kind") == "vectors":
        if encoder is None or encoder.name != settings.get("encoder"):
            given = "none" if encoder is None else repr(encoder.name)
            raise ConfigError(f"{path}: encoder: expected {settings.get('encoder')!r}, which built it, got {given}")
        retriever = VectorRetriever.load(path / VECTORS, encoder, mapped=mapped)
    else:
        raise InputError(f"{path / SETTINGS}: kind: expected 'bm25' or 'vectors', got {settings.get('kind')!r}")
    return SearchIndex(store, QueryService(retriever, timeout_s=timeout_s))


def _begin(documents: Iterable[Document], folder: str | os.PathLike[str]) -> tuple[Path, DocumentStore]:
    path = Path(folder)
    (path / SETTINGS).unlink(missing_ok=True)  # from here on the folder is no index until this one is whole
    return path, DocumentStore.write(path, documents)


def _finish(path: Path, settings: dict[str, Any]) -> None:
    write_atomically(path / SETTINGS, json.dumps(settings) + "\n")


def index_settings(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What an index folder says of itself: ``kind``, ``documents``, ``corpus``, and of vectors ``encoder``, ``index``.

    Raises:
        InputError: no index is there, or its settings are damaged.
    """
    path = Path(folder)
    try:
        settings = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no index there ({SETTINGS} is missing); build it first") from None
    except ValueError as error:
        raise InputError(f"{path / SETTINGS}: expected JSON: {error}") from None
    if not isinstance(settings, dict):
        raise InputError(f"{path / SETTINGS}: expected an object, got {type(settings).__name__}")
    return settings
