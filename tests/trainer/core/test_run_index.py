"""The index that a config names is the one of its kind and of its corpus, or refused."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from trace_fast.errors import ConfigError, InputError, OutputError
from trace_fast.trainer.config import EncoderConfig, SearchConfig
from trace_fast.trainer.run_index import build_index, check_search, open_config_index
from trace_fast.trainer.search import build_bm25, corpus_hash, read_corpus

ROWS = [{"docid": str(n), "url": f"u{n}", "title": "", "text": text} for n, text in enumerate(("heron", "gecko"))]


def write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def built(tmp_path: Path) -> SearchConfig:
    config = SearchConfig(index=str(tmp_path / "index"), corpus=write(tmp_path / "corpus.jsonl", ROWS))
    check_search(config)
    build_index(config)
    return config


def test_an_index_of_this_corpus_is_taken_as_it_is(built: SearchConfig, tmp_path: Path) -> None:
    settings = tmp_path / "index" / "index.json"
    before = settings.stat().st_mtime_ns
    (tmp_path / "corpus.jsonl").rename(tmp_path / "moved.jsonl")
    for corpus in (str(tmp_path / "moved.jsonl"), None):
        config = built.model_copy(update={"corpus": corpus})
        check_search(config)
        build_index(config)
        assert open_config_index(config).search("gecko", 1)[0].document.docid == "1"
    assert settings.stat().st_mtime_ns == before


def test_an_index_of_another_corpus_is_refused(built: SearchConfig, tmp_path: Path) -> None:
    """Documents of one world under the questions of another: every answer would be missing."""
    write(tmp_path / "corpus.jsonl", [*ROWS[:1], ROWS[1] | {"text": "emu!!"}])  # of the same size
    with pytest.raises(ConfigError, match=r"search.corpus: expected the corpus that .*index was built from \(SHA-256 "):
        check_search(built)
    with pytest.raises(InputError, match=r"nowhere.jsonl: cannot be read: .*No such file"):
        check_search(built.model_copy(update={"corpus": str(tmp_path / "nowhere.jsonl")}))


def test_an_index_of_another_kind_is_refused(built: SearchConfig) -> None:
    """It would be searched by words where the config says vectors."""
    encoder = EncoderConfig(path="encoder")
    with pytest.raises(ConfigError, match=r"search.kind: expected 'bm25', as .*index is, got 'vectors'"):
        check_search(SearchConfig(index=built.index, kind="vectors", encoder=encoder))


def test_an_index_of_unknown_origin_goes_without_a_corpus_only(tmp_path: Path) -> None:
    corpus = write(tmp_path / "corpus.jsonl", ROWS)
    build_bm25(read_corpus(corpus), tmp_path / "index", report=lambda line: None)
    check_search(SearchConfig(index=str(tmp_path / "index")))
    message = "index does not say which corpus it was built from; remove the index, so that it is built again, or leave"
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_search(SearchConfig(index=str(tmp_path / "index"), corpus=corpus))


@pytest.mark.parametrize("index", ["a\0b", "corpus.jsonl/index"])
def test_a_folder_that_cannot_be_made_is_named(index: str, tmp_path: Path) -> None:
    corpus = write(tmp_path / "corpus.jsonl", ROWS)
    with pytest.raises(OutputError, match=r"search.index: .*: cannot be made: "):
        build_index(SearchConfig(index=f"{tmp_path}/{index}", corpus=corpus))


def test_the_hash_is_of_bytes_in_the_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in (("b.jsonl", b"two"), ("a.jsonl", b"one")):
        (folder / name).write_bytes(text)
    parts = [hashlib.sha256(text).digest() for text in (b"one", b"two")]
    assert corpus_hash(folder) == hashlib.sha256(b"".join(parts)).hexdigest()
    assert corpus_hash(folder / "a.jsonl") == hashlib.sha256(parts[0]).hexdigest()
