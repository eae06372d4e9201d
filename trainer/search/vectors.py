"""FAISS over unit vectors, compared by inner product (the cosine).

Flat search is exact and is the choice up to a million documents; above, IVF-PQ keeps a code instead of the vector, and
HNSW keeps vectors and a graph. What an index will need is known before it is built.

FAISS answers -1 where it found fewer than k rows; those never become matches.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import faiss
import numpy as np

from trace_fast.errors import ConfigError, InputError
from trace_fast.trainer.search.corpus import Document
from trace_fast.trainer.search.encoders import Encoder, unit_vectors
from trace_fast.trainer.search.retriever import Match, SearchError, indexed_text

Kind = Literal["auto", "flat", "ivf_pq", "hnsw"]
FLAT_UP_TO = 1_000_000  # documents
PQ_CENTROIDS = 256  # 8 bits a sub-vector; as many vectors are needed to train them
_PQ_MOST_PARTS = 128
_TRAIN_PER_LIST = 39  # vectors that FAISS wants for each list
_HNSW_LINKS = 32
_HNSW_WIDTH = 200  # candidates kept while searching and building
_LISTS_SEARCHED = 32
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class VectorPlan:
    """What will be built. ``parts`` (bytes of a code) and ``lists`` are 0 where the kind has none."""

    kind: Literal["flat", "ivf_pq", "hnsw"]
    documents: int
    dimension: int
    lists: int = 0
    parts: int = 0

    @property
    def bytes(self) -> int:
        """Memory of the finished index."""
        vector = 4 * self.dimension
        if self.kind == "flat":
            return self.documents * vector
        if self.kind == "hnsw":
            return self.documents * (vector + 4 * 2 * _HNSW_LINKS + 16)
        return self.documents * (self.parts + 8) + (self.lists + PQ_CENTROIDS) * vector

    def describe(self) -> str:
        """One line for people."""
        shape = f"{self.lists:,} lists, codes of {self.parts} bytes, " if self.kind == "ivf_pq" else ""
        return (
            f"FAISS {self.kind} index of {self.documents:,} documents x {self.dimension} dimensions, {shape}"
            f"{self.bytes / _GIB:.3f} GiB"
        )


def plan_vectors(documents: int, dimension: int, kind: Kind = "auto") -> VectorPlan:
    """Chooses the index and its sizes.

    Raises:
        ConfigError: IVF-PQ for fewer documents than its codes need to be trained.
    """
    if kind == "auto":
        kind = "flat" if documents <= FLAT_UP_TO else "ivf_pq"
    if kind != "ivf_pq":
        return VectorPlan(kind, documents, dimension)
    if documents < PQ_CENTROIDS:
        raise ConfigError(f"kind: ivf_pq needs at least {PQ_CENTROIDS} documents, got {documents}; use flat")
    lists = max(1, min(int(4 * documents**0.5), documents // _TRAIN_PER_LIST))
    most = max(1, min(dimension // 4, _PQ_MOST_PARTS))
    parts = next(m for m in range(most, 0, -1) if dimension % m == 0)
    return VectorPlan(kind, documents, dimension, lists, parts)


class VectorRetriever:
    """A ``Retriever``: the encoder's vectors of queries against those of the documents."""

    def __init__(self, index: Any, encoder: Encoder) -> None:
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise ConfigError("index: expected one that compares by inner product, got another metric")
        if index.d != encoder.dimension:
            raise ConfigError(f"encoder: expected {index.d} dimensions, as the index has, got {encoder.dimension}")
        self._index = index
        self._encoder = encoder

    @classmethod
    def build(
        cls, documents: Sequence[Document], encoder: Encoder, plan: VectorPlan, *, batch: int = 256
    ) -> VectorRetriever:
        """Encodes and adds all documents, a batch at a time; IVF-PQ is first trained on documents spread evenly."""
        assert len(documents) == plan.documents, (len(documents), plan.documents)
        index = _empty(plan)
        if not index.is_trained:
            wanted = max(plan.lists, PQ_CENTROIDS) * _TRAIN_PER_LIST
            step = max(1, plan.documents // wanted)
            sample = (documents[row] for row in range(0, plan.documents, step))
            parts = []
            while texts := [indexed_text(document) for document in islice(sample, batch)]:
                parts.append(unit_vectors(encoder.encode_documents(texts), "document"))
            index.train(np.concatenate(parts))
        for start in range(0, plan.documents, batch):
            texts = [indexed_text(document) for document in documents[start : start + batch]]
            index.add(unit_vectors(encoder.encode_documents(texts), "document"))
        return cls(index, encoder)

    def save(self, path: Path) -> None:
        """Writes the index to a file."""
        faiss.write_index(self._index, os.fspath(path))

    @classmethod
    def load(cls, path: Path, encoder: Encoder, *, mapped: bool = True) -> VectorRetriever:
        """Reads, or memory-maps, what ``save`` wrote.

        Raises:
            InputError: it is missing or no FAISS index.
        """
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        flags = (faiss.IO_FLAG_MMAP_IFC if mapped else 0) | faiss.IO_FLAG_READ_ONLY
        try:
            index = faiss.read_index(os.fspath(path), flags)
        except RuntimeError as error:
            raise InputError(f"{path}: expected a FAISS index: {error}") from error
        return cls(index, encoder)

    def on_gpu(self, device: int = 0) -> VectorRetriever:
        """The same index in a GPU's memory.

        Raises:
            ConfigError: the installed FAISS sees no such GPU.
        """
        gpus = faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else 0
        if not 0 <= device < gpus:
            raise ConfigError(f"device: the installed FAISS sees {gpus} GPUs, got {device} (faiss-gpu is needed)")
        return VectorRetriever(faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), device, self._index), self._encoder)

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Match]]:
        """As ``Retriever.retrieve``; scores are cosines."""
        if not queries:
            return []
        vectors_BD = unit_vectors(self._encoder.encode_queries(list(queries)), "query")
        if vectors_BD.shape != (len(queries), self._index.d):
            raise SearchError(f"encoder: expected {(len(queries), self._index.d)} numbers, got {vectors_BD.shape}")
        scores_BK, rows_BK = self._index.search(vectors_BD, k)
        return [
            [Match(int(row), float(score)) for row, score in zip(rows, scores, strict=True) if row >= 0]
            for rows, scores in zip(rows_BK, scores_BK, strict=True)
        ]


def _empty(plan: VectorPlan) -> Any:
    if plan.kind == "flat":
        return faiss.IndexFlatIP(plan.dimension)
    if plan.kind == "hnsw":
        graph = faiss.IndexHNSWFlat(plan.dimension, _HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        graph.hnsw.efConstruction = graph.hnsw.efSearch = _HNSW_WIDTH
        return graph
    coarse = faiss.IndexFlatIP(plan.dimension)
    codes = faiss.IndexIVFPQ(coarse, plan.dimension, plan.lists, plan.parts, 8, faiss.METRIC_INNER_PRODUCT)
    codes.nprobe = min(plan.lists, _LISTS_SEARCHED)
    return codes
