"""The truth that engines are held to: a model in float64 that computes every prefix anew, and requests for it."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY
from transformers import PreTrainedModel

from trace_fast.trainer.engines.engine import Generation, Request


@dataclass
class Oracle:
    """``module`` in its own dtype and in float64, without any cache."""

    module: PreTrainedModel

    def __post_init__(self) -> None:
        self._wide = copy.deepcopy(self.module).double()
        if self._wide._can_set_experts_implementation():
            self._wide.set_experts_implementation("eager")  # the grouped kernels have no float64

    def logits(self, ids: np.ndarray, *, wide: bool = True) -> np.ndarray:
        """``(L, V) float64`` of one sequence."""
        with torch.no_grad():
            model = self._wide if wide else self.module
            return model(input_ids=torch.as_tensor(ids)[None], use_cache=False).logits[0].double().numpy()

    def greedy_after(self, prompt: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """``(n,)`` the most probable id after the prompt and after each of ``ids`` but the last."""
        return self.logits(np.concatenate([prompt, ids]))[len(prompt) - 1 : -1].argmax(axis=-1)

    def logprobs(
        self, prompt: np.ndarray, ids: np.ndarray, *, temperature: float = 1.0, top_p: float = 1.0, wide: bool = True
    ) -> np.ndarray:
        """``(n,) float64`` of a continuation under the distribution that is sampled from."""
        rows = self.logits(np.concatenate([prompt, ids]), wide=wide)[len(prompt) - 1 : -1]
        return np.array([distribution(row, temperature, top_p)[token] for row, token in zip(rows, ids, strict=True)])

    def bound(self, prompt: np.ndarray, ids: np.ndarray) -> float:
        """How far log-probabilities may be off: twice what the model itself is in its own dtype, since a sum of the
        same terms in another order has an error of the same size but not the same error, and eight roundings of the
        largest logit for the softmax."""
        off = np.abs(self.logprobs(prompt, ids, wide=False) - self.logprobs(prompt, ids)).max()
        largest = np.abs(self.logits(np.concatenate([prompt, ids]))).max()
        return float(2 * off + 8 * largest * torch.finfo(torch.float32).eps)


def distribution(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """``(V,)`` log-probabilities after temperature and top-p, -inf for what is cut off."""
    scaled = logits / temperature
    logp = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
    order = np.argsort(-logp, kind="stable")
    p = np.exp(logp[order])
    kept = order[: int((np.cumsum(p) - p < top_p).sum())]
    cut = np.full_like(logp, -np.inf)
    cut[kept] = logp[kept] - np.log(np.exp(logp[kept]).sum())
    return cut


@pytest.fixture(scope="session")
def oracle_of() -> Callable[[PreTrainedModel], Oracle]:
    return Oracle


@pytest.fixture(scope="session")
def true_distribution() -> Callable[[np.ndarray, float, float], np.ndarray]:
    return distribution


@pytest.fixture
def prompts() -> list[np.ndarray]:
    """Odd lengths; five that begin alike, one of them twice, and two others."""
    rng = np.random.default_rng(5)
    shared = rng.integers(3, VOCABULARY, 41)
    tails = [rng.integers(3, VOCABULARY, n) for n in (1, 7, 0, 33)]
    alike = [np.concatenate([shared, tail]) for tail in tails]
    return [*alike, alike[1], rng.integers(3, VOCABULARY, 1), rng.integers(3, VOCABULARY, 77)]


@pytest.fixture
def next_turn() -> Callable[[Sequence[np.ndarray], Sequence[Generation], int], list[np.ndarray]]:
    """Prompts of the next turn: what was there, what was written, and an observation of 1 to 9 tokens."""

    def extend(prompts: Sequence[np.ndarray], written: Sequence[Generation], seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [
            np.concatenate([prompt, generation.ids, rng.integers(3, VOCABULARY, rng.integers(1, 10))])
            for prompt, generation in zip(prompts, written, strict=True)
        ]

    return extend


@pytest.fixture
def ask() -> Callable[..., list[Request]]:
    """``ask(prompts, 9, temperature=0.0)``: a request a prompt, seeds 0, 1, ..."""

    def make(
        prompts: Sequence[np.ndarray],
        count: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop_ids: tuple[int, ...] = (),
        seed: int = 0,
    ) -> list[Request]:
        return [
            Request(prompt, count, stop_ids, temperature=temperature, top_p=top_p, seed=seed + number)
            for number, prompt in enumerate(prompts)
        ]

    return make


@dataclass
class Loopback:
    """A server on this machine. ``reply(path, body, number) -> (status, JSON or bytes)``; ``None`` hangs up."""

    reply: Callable[[str, Any, int], tuple[int, Any] | None]
    calls: list[tuple[str, Any]] = field(default_factory=list)  # path and body, in order of arrival
    under_way: int = 0
    most_under_way: int = 0

    def __post_init__(self) -> None:
        lock = threading.Lock()
        loopback = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with lock:
                    loopback.calls.append((self.path, json.loads(text) if text else None))
                    number = len(loopback.calls)
                    loopback.under_way += 1
                    loopback.most_under_way = max(loopback.most_under_way, loopback.under_way)
                try:
                    answer = loopback.reply(*loopback.calls[number - 1], number)
                finally:
                    with lock:
                        loopback.under_way -= 1
                if answer is None:
                    self.close_connection = True
                    return
                status, content = answer
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                with contextlib.suppress(ConnectionError):  # a client that did not wait
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[..., Loopback]]:
    """``serve(reply) -> Loopback``; stopped at the end."""
    servers: list[Loopback] = []

    def start(reply: Callable[[str, Any, int], tuple[int, Any] | None]) -> Loopback:
        servers.append(Loopback(reply))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
