"""The index that a config names: checked, built where there is none yet, opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trace_fast.cli_terminal import say
from trace_fast.errors import ConfigError, InputError, OutputError
from trace_fast.trainer.config import SearchConfig
from trace_fast.trainer.parallel import TrainMesh
from trace_fast.trainer.search import SearchIndex, build_bm25, build_vectors, corpus_hash, open_index, read_corpus
from trace_fast.trainer.search.encoders import Encoder, SentenceTransformerEncoder, TransformersEncoder
from trace_fast.trainer.search.index import SETTINGS, index_settings


def check_search(config: SearchConfig) -> None:
    """Every row of a corpus that an index is to be built from; of an index that is there, that it is the one meant.

    Raises:
        InputError, ConfigError: names the row, or the key of the config.
    """
    if not _is_built(config):
        corpus = _corpus(config)
        if not sum(1 for _ in read_corpus(corpus)):
            raise InputError(f"search.corpus: {corpus}: expected at least one document, got none")
        return
    built = index_settings(config.index)
    if built.get("kind") != config.kind:
        raise ConfigError(f"search.kind: expected {built.get('kind')!r}, as {config.index} is, got {config.kind!r}")
    if config.corpus is None:
        return
    remedy = "remove the index, so that it is built again, or leave out search.corpus"
    if built.get("corpus") is None:
        raise ConfigError(f"search.corpus: {config.index} does not say which corpus it was built from; {remedy}")
    if (found := corpus_hash(config.corpus)) != built["corpus"]:
        raise ConfigError(
            f"search.corpus: expected the corpus that {config.index} was built from (SHA-256 {built['corpus'][:12]}…), "
            f"got {config.corpus} ({found[:12]}…); {remedy}"
        )


def build_index(config: SearchConfig) -> None:
    """Builds the index where there is none yet.

    Raises:
        InputError, ConfigError: neither an index nor a corpus to build it from; it names the key.
        OutputError: the folder cannot be made.
    """
    if _is_built(config):
        return
    corpus, encoder = _corpus(config), _encoder(config)
    documents, source = read_corpus(corpus), corpus_hash(corpus)
    try:
        Path(config.index).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise OutputError(f"search.index: {config.index!r}: cannot be made: {error}") from error
    if encoder is None:
        build_bm25(documents, config.index, report=say, corpus=source)
    else:
        build_vectors(documents, config.index, encoder, report=say, corpus=source)


def open_config_index(config: SearchConfig) -> SearchIndex:
    """The index, built and of the config's kind."""
    return open_index(config.index, encoder=_encoder(config))


def shared_index(config: SearchConfig, mesh: TrainMesh) -> SearchIndex:
    """The index of the run; where there is none yet, the first process builds it and the others wait."""
    mesh.together(lambda: build_index(config) if mesh.is_first else None)
    return mesh.together(lambda: open_config_index(config))


def _is_built(config: SearchConfig) -> bool:
    return (Path(config.index) / SETTINGS).exists()


def _corpus(config: SearchConfig) -> str:
    if config.corpus is None:
        raise ConfigError(f"search.corpus: is required, since search.index = {config.index!r} holds no index yet")
    return config.corpus


def _encoder(config: SearchConfig) -> Encoder | None:
    if config.encoder is None:
        return None
    made: Any = {"sentence_transformers": SentenceTransformerEncoder, "transformers": TransformersEncoder}
    encoder: Encoder = made[config.encoder.kind](config.encoder.path)
    return encoder
