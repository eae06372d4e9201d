"""Failures of other search environments, by where they were reported; each is a test here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import faiss
import numpy as np
import pytest
import torch

from trace_fast.errors import ConfigError
from trace_fast.trainer.search import Browser, Document, Match, QueryService, SearchError, SearchIndex
from trace_fast.trainer.search.bm25 import Bm25Retriever
from trace_fast.trainer.search.encoders import TransformersEncoder
from trace_fast.trainer.search.vectors import VectorRetriever, plan_vectors


@pytest.fixture(scope="module")
def decoder() -> Any:
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=49152, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    )  # fmt: skip
    return Qwen3Model(config).eval()


def test_echo_24_last_token_pooling_under_padding_keeps_hits(decoder: Any, smollm2_tokenizer: Any) -> None:
    """Hits of a padded batch are those of texts encoded alone; taking the last column under padding loses them."""
    names = ("Ada", "Bo", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hal", "Ida", "Jon", "Kim", "Leo")
    texts = [f"{name} lives " + "in the old town by the river " * (n % 5) + f"at {n}" for n, name in enumerate(names)]
    documents = [Document(str(n), "u", "", text) for n, text in enumerate(texts)]
    encoder = TransformersEncoder(decoder, smollm2_tokenizer, name="tiny", batch_size=12)
    retriever = VectorRetriever.build(documents, encoder, plan_vectors(12, 64))
    alone = [retriever.retrieve([text], 5)[0] for text in texts]
    together = retriever.retrieve(texts, 5)
    assert [[m.row for m in found] for found in together] == [[m.row for m in found] for found in alone]
    assert [found[0].row for found in together] == list(range(12))

    batch = smollm2_tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        last_column = decoder(**batch).last_hidden_state[:, -1].numpy()
    last_column /= np.linalg.norm(last_column, axis=1, keepdims=True)
    right = encoder.encode_documents(texts)
    assert (np.abs(last_column - right).max(axis=1) > 1e-2).sum() > 6


def test_search_r1_127_an_observation_is_cut_between_lines(documents: list[Document]) -> None:
    text = "\n".join(f"Line {n} is one whole sentence." for n in range(500))
    index = SearchIndex([Document("a", "u", "A", text)], Bm25Retriever.build([text]))
    browser = Browser(index, observation_tokens=100, count_tokens=lambda shown: len(shown.split()))
    browser.call("browser.search", {"query": "sentence"})
    lines = browser.call("browser.open", {"id": 0, "loc": 0}).text.splitlines()
    assert 5 < len(lines) < 20
    assert lines[3:] == [f"{n}: Line {n} is one whole sentence." for n in range(len(lines) - 3)]


class _One:
    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Match]]:
        self.seen.append(tuple(queries))
        return [[Match(0, 2.0), Match(1, 1.0)][:k] for _ in queries]


def test_search_r1_retrieve_a_batch_of_one_query_is_not_unpacked_as_two(documents: list[Document]) -> None:
    """Two matches of one query stay one list of two, through every layer."""
    one = _One()
    with QueryService(one) as service:
        assert service.retrieve(["camel"], 2) == [[Match(0, 2.0), Match(1, 1.0)]]
        hits = SearchIndex(documents, service).search("camel", 2)
    assert [hit.document for hit in hits] == documents[:2]
    assert one.seen == [("camel",)]


def test_faiss_minus_one_is_no_document(documents: list[Document], encoder: Any) -> None:
    retriever = VectorRetriever.build(documents, encoder, plan_vectors(7, 64))
    (matches,) = retriever.retrieve(["camel"], 50)
    assert sorted(match.row for match in matches) == list(range(7))

    class Negative:
        def retrieve(self, queries: Sequence[str], k: int) -> list[list[Match]]:
            return [[Match(-1, 0.5)]]

    with pytest.raises(SearchError, match=r"found row -1; the corpus has 0\.\.6"):
        SearchIndex(documents, Negative()).search("camel", 3)


def test_faiss_default_metric_is_refused(encoder: Any) -> None:
    with pytest.raises(ConfigError, match="compares by inner product"):
        VectorRetriever(faiss.IndexFlatL2(64), encoder)


def test_trl_6973_a_search_without_an_answer_does_not_hang(documents: list[Document]) -> None:
    release = threading.Event()

    class Hanging:
        def retrieve(self, queries: Sequence[str], k: int) -> list[list[Match]]:
            release.wait(20)
            return [[] for _ in queries]

    with QueryService(Hanging(), timeout_s=0.05) as service:
        browser = Browser(
            SearchIndex(documents, service), observation_tokens=64, count_tokens=lambda shown: len(shown.split())
        )
        observation = browser.call("browser.search", {"query": "camel"})
        release.set()
    assert observation.error
    assert "no answer within 0.05 s" in observation.text


def test_verl_1948_a_rate_limit_is_an_observation(documents: list[Document]) -> None:
    class Limited:
        def retrieve(self, queries: Sequence[str], k: int) -> list[list[Match]]:
            raise SearchError("status 429")

    browser = Browser(
        SearchIndex(documents, Limited()), observation_tokens=64, count_tokens=lambda shown: len(shown.split())
    )
    for _ in range(3):
        observation = browser.call("browser.search", {"query": "camel"})
        assert observation.error
        assert observation.text == "Error: browser.search: the search failed: status 429"
