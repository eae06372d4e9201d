"""Fixtures of the benchmark's tests: a tiny model, rollouts, servers that speak the two protocols with its numbers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from tiny_models import random_rollout, tiny_model
from transformers import PreTrainedModel

from trace_fast.bench.peers import PeerSetup
from trace_fast.bench.rows import Row
from trace_fast.model_spec import ModelSpec
from trace_fast.rollout import Rollout


@pytest.fixture(scope="session")
def module() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def rollout() -> Rollout:
    return random_rollout(np.random.default_rng(3), turns=4, tokens=60, answers=(5,), opener=3)


@pytest.fixture
def truth_S(module: PreTrainedModel, rollout: Rollout) -> np.ndarray:
    return oracle.mean_logprobs(oracle.double_precision(module), rollout)[:, 0]


@pytest.fixture
def setup_for(module: PreTrainedModel) -> Callable[..., PeerSetup]:
    """``setup_for(sglang=URL)``."""
    spec = ModelSpec.from_config(module.config, "tiny")
    return lambda model="tiny", **endpoints: PeerSetup(module, spec, model, endpoints)


@dataclass
class Server:
    """A loopback server; ``calls`` are the paths and bodies that came, ``replies`` replaces answers by path."""

    url: str
    calls: list[tuple[str, Any]] = field(default_factory=list)
    replies: dict[str, tuple[int, Any]] = field(default_factory=dict)


def _sglang(logprobs: Callable[[list[int]], np.ndarray], path: str, body: Any) -> Any:
    """As SGLang answers: the token at ``logprob_start_len`` has no number, later ones have [logprob, id, text]."""
    if path != "/generate":
        return {}
    if not body.get("return_logprob"):
        return {"text": "", "meta_info": {"prompt_tokens": len(body["input_ids"])}}
    answers = []
    for ids, start in zip(body["input_ids"], body["logprob_start_len"], strict=True):
        scored = logprobs(ids)
        entries = [[float(scored[t - 1]), ids[t], None] for t in range(start + 1, len(ids))]
        answers.append({"text": "", "meta_info": {"input_token_logprobs": [[None, ids[start], None], *entries]}})
    return answers


def _vllm(logprobs: Callable[[list[int]], np.ndarray], path: str, body: Any) -> Any:
    """As vLLM answers: the first token of a prompt has no entry; choices in any order, each with its index."""
    if path == "/v1/models":
        return {"data": [{"id": "served-name"}]}
    assert body["model"] == "served-name"
    choices = []
    for index, ids in enumerate(body["prompt"]):
        scored = logprobs(ids)
        entries = [{str(t): {"logprob": float(v), "rank": 1}} for t, v in zip(ids[1:], scored, strict=True)]
        choices.append({"index": index, "text": "x", "prompt_logprobs": [None, *entries]})
    return {"choices": choices[::-1]}


@pytest.fixture
def serve(module: PreTrainedModel) -> Iterator[Callable[[str], Server]]:
    """``serve("sglang")`` or ``serve("vllm")``: a server in a thread, stopped after the test."""
    running: list[tuple[ThreadingHTTPServer, threading.Thread]] = []
    protocols = {"sglang": _sglang, "vllm": _vllm}

    def logprobs(ids: list[int]) -> np.ndarray:
        return oracle.sequence_logprobs(module, np.array(ids))

    def start(protocol: str) -> Server:
        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                parsed = json.loads(body) if body else None
                server.calls.append((self.path, parsed))
                if self.path in server.replies:
                    status, reply = server.replies[self.path]
                else:
                    status, reply = 200, protocols[protocol](logprobs, self.path, parsed)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(reply).encode())

            do_GET = do_POST = answer

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=listener.serve_forever, daemon=True)
        thread.start()
        running.append((listener, thread))
        server = Server(f"http://127.0.0.1:{listener.server_port}")
        return server

    yield start
    for listener, thread in running:
        listener.shutdown()
        listener.server_close()
        thread.join()


@pytest.fixture
def row() -> Callable[..., Row]:
    """A row with right numbers; keywords replace its fields."""

    def make(**changes: Any) -> Row:
        fields: dict[str, Any] = dict.fromkeys(
            ("date", "machine", "python", "torch", "transformers", "triton", "trace_fast", "commit", "model"), "x"
        )
        fields |= {"backend": "torch, torch", "dtype": "float32", "gemm_gflops": 100.0, "rollout": "r", "turns": 30}
        fields |= {"states": 32, "tokens_trunk": 3820, "tokens_unique": 4192, "tokens_naive": 66824, "flops": 1e12}
        fields |= {"method": "trace_fast", "numbers": "right", "yardstick": "kv_cache", "mean_abs_error": 1e-6}
        fields |= {"max_abs_error": 2e-6, "first_seconds": 3.0, "seconds": 2.0, "runs": [2.0]}
        fields |= {"peak_extra_bytes": 5_000_000, "speedup_over_kv_cache": 2.0, "fraction_of_gemm_roofline": 0.5}
        return Row(**(fields | changes))

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products: threads only cost."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
