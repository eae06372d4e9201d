"""FAISS indexes against NumPy in float64, and what is known about them before they are built."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest

from trace_fast.errors import ConfigError, InputError, ModelError
from trace_fast.trainer.search import Document
from trace_fast.trainer.search.vectors import FLAT_UP_TO, VectorRetriever, plan_vectors

WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "islet", "jetty", "knoll", "lagoon")


def _many(count: int) -> list[Document]:
    rng = np.random.default_rng(3)
    return [Document(str(i), "u", "", " ".join(rng.choice(WORDS, 6)) + f" w{i} w{i} w{i}") for i in range(count)]


def _truth(documents: list[Document], encoder, query: str, k: int) -> list[tuple[int, float]]:
    vectors = encoder.encode_documents([document.text for document in documents]).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    asked = encoder.encode_queries([query])[0].astype(np.float64)
    cosines = vectors @ (asked / np.linalg.norm(asked))
    order = np.argsort(-cosines, kind="stable")[:k]
    return [(int(row), float(cosines[row])) for row in order]


def test_flat_search_is_the_cosine(encoder) -> None:
    documents = _many(61)
    retriever = VectorRetriever.build(documents, encoder, plan_vectors(61, 64), batch=8)
    queries = ["amber birch w5", "lagoon", "w60 w59"]
    for query, matches in zip(queries, retriever.retrieve(queries, 7), strict=True):
        wanted = _truth(documents, encoder, query, 7)
        # float32 sums of 64 products of numbers of length 1
        assert [match.score for match in matches] == pytest.approx([score for _, score in wanted], abs=64 * 2**-24)
        assert matches[0].row == wanted[0][0]


def test_documents_are_indexed_with_their_title(encoder) -> None:
    documents = [Document("0", "u", "amber", "birch"), Document("1", "u", "", "birch")]
    retriever = VectorRetriever.build(documents, encoder, plan_vectors(2, 64))
    assert retriever.retrieve(["amber"], 1)[0][0].row == 0


@pytest.mark.parametrize("kind", ["hnsw", "ivf_pq"])
def test_approximate_indexes_find_the_document_itself(encoder, kind) -> None:
    documents = _many(400)
    plan = plan_vectors(400, 64, kind)
    retriever = VectorRetriever.build(documents, encoder, plan, batch=64)
    lists = retriever.retrieve([document.text for document in documents], 5)
    found = sum(row in [match.row for match in matches] for row, matches in enumerate(lists))
    assert found >= 0.9 * 400
    assert all(match.row >= 0 for matches in lists for match in matches)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf_pq"])
def test_a_saved_index_answers_the_same(tmp_path: Path, encoder, kind, mapped: bool) -> None:
    documents = _many(300)
    built = VectorRetriever.build(documents, encoder, plan_vectors(300, 64, kind))
    built.save(tmp_path / "v")
    opened = VectorRetriever.load(tmp_path / "v", encoder, mapped=mapped)
    queries = ["amber w3", "w250", "knoll jetty"]
    assert opened.retrieve(queries, 6) == built.retrieve(queries, 6)


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf_pq"])
def test_memory_is_known_before_the_index_is_built(tmp_path: Path, encoder, kind) -> None:
    plan = plan_vectors(600, 64, kind)
    VectorRetriever.build(_many(600), encoder, plan).save(tmp_path / "v")
    assert plan.bytes == pytest.approx((tmp_path / "v").stat().st_size, rel=0.1)
    assert f"{plan.bytes / 2**30:.3f} GiB" in plan.describe()


def test_the_kind_follows_from_the_size() -> None:
    assert plan_vectors(FLAT_UP_TO, 4096).kind == "flat"
    large = plan_vectors(FLAT_UP_TO + 1, 4096)
    assert (large.kind, large.parts) == ("ivf_pq", 128)
    assert large.bytes < 0.1 * plan_vectors(FLAT_UP_TO + 1, 4096, "flat").bytes
    assert plan_vectors(2_000_000, 384, "hnsw").kind == "hnsw"
    for dimension in (1, 7, 63, 384, 1000):
        assert dimension % plan_vectors(300, dimension, "ivf_pq").parts == 0


def test_too_few_documents_for_codes_are_refused() -> None:
    with pytest.raises(ConfigError, match="ivf_pq needs at least 256 documents, got 255"):
        plan_vectors(255, 64, "ivf_pq")


def test_other_dimensions_and_other_files_are_refused(tmp_path: Path, encoder) -> None:
    VectorRetriever.build(_many(3), encoder, plan_vectors(3, 64)).save(tmp_path / "v")
    encoder.dimension = 32
    with pytest.raises(ConfigError, match="expected 64 dimensions, as the index has, got 32"):
        VectorRetriever.load(tmp_path / "v", encoder)
    (tmp_path / "w").write_bytes(b"no index at all")
    with pytest.raises(InputError, match="expected a FAISS index"):
        VectorRetriever.load(tmp_path / "w", encoder)
    with pytest.raises(InputError, match="no such file"):
        VectorRetriever.load(tmp_path / "x", encoder)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_vectors_without_a_direction_are_refused(encoder, value: float) -> None:
    encoder.encode_documents = lambda texts: np.full((len(texts), 64), value, dtype=np.float32)
    with pytest.raises(ModelError, match="document 0: expected a finite vector"):
        VectorRetriever.build(_many(2), encoder, plan_vectors(2, 64))


def test_a_gpu_that_is_not_there_is_refused(encoder) -> None:
    gpus = faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else 0
    retriever = VectorRetriever.build(_many(2), encoder, plan_vectors(2, 64))
    with pytest.raises(ConfigError, match=f"sees {gpus} GPUs, got {gpus}"):
        retriever.on_gpu(gpus)
