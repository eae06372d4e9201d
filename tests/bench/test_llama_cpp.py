"""The llama.cpp peer on an API that does what llama.cpp's C functions are documented to do, with the tiny model."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, random_rollout
from transformers import PreTrainedModel

from trace_fast.bench.peers import PEERS, PeerError, llama_cpp
from trace_fast.rollout import Rollout


class FakeApi:
    """Sequences of tokens in place of a cache; a decoded row must follow what its sequence holds."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module, self.sequences, self.logits = module, {}, {}
        self.batches: list[int] = []
        self.settings: Any = None
        self.freed = 0
        self.code = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        plain = {"llama_backend_init", "llama_log_set", "llama_batch_free", "llama_model_default_params"}
        handles = {"llama_model_load_from_file", "llama_model_get_vocab", "llama_get_memory"}
        if name in plain | handles:
            return lambda *_: SimpleNamespace() if name in handles else None
        if name in ("llama_free", "llama_model_free"):
            return self._free
        raise AttributeError(name)

    def _free(self, handle: Any) -> None:
        self.freed += 1

    def llama_log_callback(self, function: Any) -> Any:
        return function

    def llama_vocab_n_tokens(self, vocabulary: Any) -> int:
        return VOCABULARY

    def llama_context_default_params(self) -> Any:
        self.settings = SimpleNamespace()
        return self.settings

    def llama_init_from_model(self, model: Any, settings: Any) -> Any:
        return settings

    def llama_memory_clear(self, memory: Any, data: bool) -> None:
        self.sequences = {}

    def llama_memory_seq_cp(self, memory: Any, source: int, target: int, first: int, end: int) -> None:
        assert target < self.settings.n_seq_max
        self.sequences[target] = list(self.sequences[source][first:end])

    def llama_memory_seq_rm(self, memory: Any, sequence: int, first: int, end: int) -> bool:
        del self.sequences[sequence]
        return True

    def llama_batch_init(self, tokens: int, embeddings: int, sequences: int) -> Any:
        rows = {name: [None] * tokens for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(n_tokens=0, seq_id=[[None] for _ in range(tokens)], **rows)

    def llama_decode(self, context: Any, batch: Any) -> int:
        assert batch.n_tokens <= self.settings.n_batch
        self.batches.append(batch.n_tokens)
        for i in range(batch.n_tokens):
            tokens = self.sequences.setdefault(batch.seq_id[i][0], [])
            assert batch.pos[i] == len(tokens)
            tokens.append(batch.token[i])
            if batch.logits[i]:
                with torch.no_grad():
                    logits = self.module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
                self.logits[i] = logits.float().contiguous().numpy()
        return self.code

    def llama_get_logits_ith(self, context: Any, row: int) -> Any:
        return self.logits[row].ctypes.data_as(ctypes.POINTER(ctypes.c_float))


def test_scores_are_the_oracles(module: PreTrainedModel, rollout: Rollout, truth_S: np.ndarray) -> None:
    api = FakeApi(module)
    peer = llama_cpp.LlamaCpp(api, "tiny.gguf", threads=1)
    for _ in range(2):  # the second call finds nothing of the first
        np.testing.assert_allclose(peer.score(rollout), truth_S, rtol=0, atol=1e-5)  # float32 model
    assert api.settings.kv_unified
    assert api.settings.n_ctx >= len(rollout.input_ids) + rollout.n_states * 7
    peer.close()
    assert api.freed == 2  # context and model


def test_batches_stay_within_rows_and_sequences() -> None:
    groups = llama_cpp._groups([12] * 130)
    assert [k for group in groups for k in group] == list(range(130))
    assert [len(group) for group in groups] == [63, 63, 4]
    groups = llama_cpp._groups([1000, 1000, 1000, 2000, 100])
    assert groups == [[0, 1], [2], [3], [4]]


def test_a_longer_rollout_gets_a_larger_context(module: PreTrainedModel) -> None:
    api = FakeApi(module)
    peer = llama_cpp.LlamaCpp(api, "tiny.gguf", threads=1)
    for tokens in (40, 300):
        peer.score(random_rollout(np.random.default_rng(0), turns=1, tokens=tokens))
    assert api.settings.n_ctx == 512  # 20 + 300 + 3 branches of 6, in steps of 256
    assert api.freed == 1


def test_a_failing_decode_is_reported(module: PreTrainedModel, rollout: Rollout) -> None:
    api = FakeApi(module)
    api.code = 1
    with pytest.raises(PeerError, match=r"could not decode \d+ tokens \(code 1\)"):
        llama_cpp.LlamaCpp(api, "tiny.gguf", threads=1).score(rollout)


def test_why_not(setup_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert PEERS["llama_cpp"].why_not(setup_for(model="m.gguf")) == "llama-cpp-python is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert PEERS["llama_cpp"].why_not(setup_for(model="m.gguf")) is None
    assert PEERS["llama_cpp"].why_not(setup_for(model="folder")) == "it reads GGUF files, and the model is 'folder'"
