"""llama.cpp on the same GGUF file (package llama-cpp-python): the trunk once, then branches on copies of its cache.

A copy of the cache shares its cells; as many branches as fit run in one batch, and logits are asked for answer rows
only. The file's quantised weights are multiplied as they are, so its numbers are those of another arithmetic than
transformers', which expands the weights: whether they are close enough, the run's rule decides.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trace_fast.bench.peers.peer import Peer, PeerError, PeerSetup, branch, mean_logprob
from trace_fast.rollout import Rollout

WHAT = "llama.cpp, trunk once, branches on copies of its KV cache"
BATCH = 2048  # tokens a call; llama.cpp cuts them into its own smaller ones
SEQUENCES = 64  # the trunk's and up to 63 branches'; older versions have no more


def why_not(setup: PeerSetup) -> str | None:
    if importlib.util.find_spec("llama_cpp") is None:
        return "llama-cpp-python is not installed"
    if not setup.model.endswith(".gguf"):
        return f"it reads GGUF files, and the model is {setup.model!r}"
    return None


def open_peer(setup: PeerSetup) -> LlamaCpp:
    return LlamaCpp(importlib.import_module("llama_cpp"), setup.model, torch.get_num_threads())


class LlamaCpp(Peer):
    """``api`` is the module ``llama_cpp`` with its C functions; a context is made for each length that comes."""

    def __init__(self, api: Any, path: str, threads: int) -> None:
        self._api, self._threads = api, threads
        api.llama_backend_init()
        self._quiet = api.llama_log_callback(_no_log)  # kept: ctypes does not
        api.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self._model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        if not self._model:
            raise PeerError(f"llama.cpp cannot load {path!r}")
        self._vocabulary = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model)))
        self._context: Any = None
        self._size = 0

    def score(self, rollout: Rollout) -> np.ndarray:
        branches = [branch(rollout, k) for k in range(rollout.n_states)]
        self._open(len(rollout.input_ids) + sum(len(b) for b in branches))
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_clear(memory, False)
        for first in range(0, len(rollout.input_ids), BATCH):
            ids = rollout.input_ids[first : first + BATCH]
            self._decode([(int(t), first + i, 0, False) for i, t in enumerate(ids)])
        found: list[float] = []
        for group in _groups([len(b) for b in branches]):
            rows = []
            for sequence, k in enumerate(group, start=1):
                boundary = int(rollout.boundaries[k])
                self._api.llama_memory_seq_cp(memory, 0, sequence, 0, boundary)
                scored = len(branches[k]) - len(rollout.answers[0])
                rows += [(int(t), boundary + i, sequence, i >= scored) for i, t in enumerate(branches[k])]
            logits = self._decode(rows)
            found += [mean_logprob(part, rollout.answers[0]) for part in logits.split(len(rollout.answers[0]))]
            for sequence in range(1, len(group) + 1):
                self._api.llama_memory_seq_rm(memory, sequence, -1, -1)
        return np.array(found)

    def _open(self, tokens: int) -> None:
        if tokens <= self._size:
            return
        if self._context is not None:
            self._api.llama_free(self._context)
        settings = self._api.llama_context_default_params()
        settings.n_ctx = self._size = -(-tokens // 256) * 256
        settings.n_batch, settings.n_seq_max = BATCH, SEQUENCES
        settings.n_threads = settings.n_threads_batch = self._threads
        settings.kv_unified = True  # else every sequence has cells of its own, and a copy is one
        self._context = self._api.llama_init_from_model(self._model, settings)
        if not self._context:
            self._context, self._size = None, 0
            raise PeerError(f"llama.cpp cannot make a context of {tokens} tokens")

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> torch.Tensor:
        """Runs (token, position, sequence, scored) rows and returns the logits of the scored ones."""
        api = self._api
        batch = api.llama_batch_init(len(rows), 0, 1)
        try:
            batch.n_tokens = len(rows)
            for i, (token, position, sequence, scored) in enumerate(rows):
                batch.token[i], batch.pos[i] = token, position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = scored
            code = api.llama_decode(self._context, batch)
        finally:
            api.llama_batch_free(batch)
        if code:
            raise PeerError(f"llama.cpp could not decode {len(rows)} tokens (code {code})")
        shape = (self._vocabulary,)
        found = [
            np.ctypeslib.as_array(api.llama_get_logits_ith(self._context, i), shape).copy()
            for i, row in enumerate(rows)
            if row[3]
        ]
        return torch.from_numpy(np.array(found)) if found else torch.empty(0, self._vocabulary)

    def close(self) -> None:
        if self._context is not None:
            self._api.llama_free(self._context)
            self._context, self._size = None, 0
        self._api.llama_model_free(self._model)


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Consecutive branches whose rows fit into one batch and whose number into the sequences."""
    groups: list[list[int]] = []
    used = 0
    for k, length in enumerate(lengths):
        if not groups or used + length > BATCH or len(groups[-1]) == SEQUENCES - 1:
            groups.append([])
            used = 0
        groups[-1].append(k)
        used += length
    return groups


def _no_log(level: int, text: bytes, user_data: object) -> None:
    return None
