"""Building, saving and opening an index; the document store under it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trace_fast.errors import ConfigError, InputError
from trace_fast.trainer.search import Document, SearchIndex, build_bm25, build_vectors, open_index
from trace_fast.trainer.search.bm25 import Bm25Retriever
from trace_fast.trainer.search.store import DocumentStore


def test_store_gives_back_every_document_by_row(tmp_path: Path, documents: list[Document]) -> None:
    odd = [*documents, Document("odd", "u", "", 'tabs\t"quotes"\nlines\r\n\u2028 and 日本\U0001f600')]
    store = DocumentStore.write(tmp_path, iter(odd))
    assert len(store) == len(odd)
    assert list(store) == odd
    assert list(DocumentStore(tmp_path)) == odd
    assert store[2:4] == odd[2:4]


@pytest.mark.parametrize("row", [-1, 7, -8])
def test_store_has_no_row_minus_one(tmp_path: Path, documents: list[Document], row: int) -> None:
    store = DocumentStore.write(tmp_path, documents)
    with pytest.raises(IndexError, match=r"expected 0\.\.6"):
        store[row]


def test_store_refuses_a_docid_twice_and_no_documents(tmp_path: Path, documents: list[Document]) -> None:
    with pytest.raises(InputError, match="docid 'd1': documents 2 and 8 both have it"):
        DocumentStore.write(tmp_path, [*documents, documents[1]])
    with pytest.raises(InputError, match="at least one document"):
        DocumentStore.write(tmp_path, [])


def test_a_store_of_two_builds_is_refused(tmp_path: Path, documents: list[Document]) -> None:
    DocumentStore.write(tmp_path, documents)
    with (tmp_path / "documents.jsonl").open("ab") as stream:
        stream.write(b"[]\n")
    with pytest.raises(InputError, match=r"offsets\.npy does not belong"):
        DocumentStore(tmp_path)


@pytest.mark.parametrize("mapped", [True, False])
def test_bm25_index_opens_with_the_same_results(tmp_path: Path, documents: list[Document], mapped: bool) -> None:
    lines: list[str] = []
    built = build_bm25(documents, tmp_path, report=lines.append)
    opened = open_index(tmp_path, mapped=mapped)
    assert lines == ["BM25 index of 7 documents"]
    for query in ("camel", "heron eats at 10", "lives"):
        assert built.search(query, 3) == opened.search(query, 3)
    assert [hit.document.docid for hit in opened.search("the eagle", 1)] == ["d3"]


def test_bm25_scores_are_the_formula(documents: list[Document]) -> None:
    """Lucene's BM25, k1 1.5 and b 0.75, in float64 by hand."""
    texts = ["red fox red", "red hen", "blue hen eats corn"]
    retriever = Bm25Retriever.build(texts)
    tokens = [text.split() for text in texts]
    mean_length = np.mean([len(words) for words in tokens])

    def score(query: str, words: list[str]) -> float:
        total = 0.0
        for word in query.split():
            holding = sum(word in other for other in tokens)
            weight = np.log(1 + (len(tokens) - holding + 0.5) / (holding + 0.5))
            count = words.count(word)
            total += weight * count / (count + 1.5 * (1 - 0.75 + 0.75 * len(words) / mean_length))
        return float(total)

    for query in ("red", "hen corn", "red hen blue"):
        (matches,) = retriever.retrieve([query], 3)
        wanted = {row: score(query, words) for row, words in enumerate(tokens) if score(query, words) > 0}
        assert {match.row for match in matches} == set(wanted)
        for match in matches:
            assert match.score == pytest.approx(wanted[match.row], rel=1e-5)
        assert [match.score for match in matches] == sorted((match.score for match in matches), reverse=True)


@pytest.mark.parametrize("query", ["", "?!", "zebra"])
def test_bm25_finds_nothing_where_no_word_is_shared(documents: list[Document], query: str) -> None:
    retriever = Bm25Retriever.build(document.text for document in documents)
    assert retriever.retrieve([query, "camel"], 5)[0] == []
    assert len(retriever.retrieve([query, "camel"], 5)[1]) == 1


def test_bm25_ties_go_to_the_earlier_document() -> None:
    retriever = Bm25Retriever.build(["same words"] * 9)
    assert [match.row for match in retriever.retrieve(["words"], 4)[0]] == [0, 1, 2, 3]


def test_vector_index_reports_its_plan_before_it_encodes(tmp_path: Path, documents: list[Document], encoder) -> None:
    events: list[str] = []
    encode = encoder.encode_documents
    encoder.encode_documents = lambda texts: events.append("encode") or encode(texts)
    index = build_vectors(documents, tmp_path, encoder, report=events.append)
    assert events[0].startswith("FAISS flat index of 7 documents x 64 dimensions")
    assert "encode" in events[1:]
    assert index.search("where does the gecko live", 2)[0].document.docid == "d5"


def test_a_vector_index_wants_its_own_encoder(tmp_path: Path, documents: list[Document], encoder) -> None:
    build_vectors(documents, tmp_path, encoder, report=lambda line: None)
    with pytest.raises(ConfigError, match="encoder: expected 'hash', which built it, got none"):
        open_index(tmp_path)
    encoder.name = "other"
    with pytest.raises(ConfigError, match="got 'other'"):
        open_index(tmp_path, encoder=encoder)


def test_a_build_that_fails_leaves_no_index(tmp_path: Path, documents: list[Document]) -> None:
    build_bm25(documents, tmp_path, report=lambda line: None)
    with pytest.raises(InputError):
        build_bm25([documents[0], documents[0]], tmp_path, report=lambda line: None)
    with pytest.raises(InputError, match="no index there"):
        open_index(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "expected JSON"),
        ("[]", "expected an object"),
        (json.dumps({"kind": "?", "documents": 7}), "expected 'bm25' or 'vectors'"),
        (json.dumps({"kind": "bm25", "documents": 6}), "says 6 documents, the store has 7"),
    ],
)
def test_damaged_settings_are_named(tmp_path: Path, documents: list[Document], text: str, reason: str) -> None:
    build_bm25(documents, tmp_path, report=lambda line: None)
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(InputError, match=reason):
        open_index(tmp_path)


def test_a_missing_bm25_folder_is_named(tmp_path: Path, documents: list[Document]) -> None:
    build_bm25(documents, tmp_path, report=lambda line: None)
    for file in (tmp_path / "bm25").iterdir():
        file.unlink()
    with pytest.raises(InputError, match="expected a BM25 index"):
        open_index(tmp_path)


def test_an_index_in_memory_is_searched_alike(tmp_path: Path, documents: list[Document]) -> None:
    kept = SearchIndex(documents, Bm25Retriever.build(f"{d.title}\n{d.text}" for d in documents))
    written = build_bm25(documents, tmp_path, report=lambda line: None)
    assert kept.search("ferret p.m.", 5) == written.search("ferret p.m.", 5)
