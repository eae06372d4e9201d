"""Rollout engines that are servers: token ids in, token ids and log-probabilities out, over HTTP.

What servers have in common is here: every attempt has a timeout and every request a deadline; connection errors, 408,
429 and 5xx are tried again with growing pauses; answers are checked before anything is believed. What a request or an
answer looks like is its server's ``Dialect`` (``vllm``, ``sglang``). Whatever goes wrong with one request becomes its
error and touches no other; a server that dies costs the requests that it had.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import urllib3

from trace_fast.errors import ConfigError, TraceFastError
from trace_fast.trainer.engines.engine import FinishReason, Generation, Request, failed, why_refused
from trace_fast.trainer.engines.weights import Bystander, Weights, WeightSink

_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_LONGEST_ANSWER = 256 << 20  # bytes
_CHUNK = 1 << 16


class ServerError(TraceFastError):
    """A server did not do what it was asked to. ``again``: whether the same request may succeed later."""

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


class BadAnswer(TraceFastError):
    """An answer that does not say what the protocol promises."""


class JsonClient:
    """JSON over HTTP, used by many threads.

    Args:
        url: such as ``http://host:30000``. connections: kept open at most.

    Raises:
        ConfigError: no http(s) URL.
    """

    def __init__(self, url: str, *, connections: int = 8) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url: expected one such as http://localhost:30000, got {url!r}")
        self.url = url.rstrip("/")
        self._pool = urllib3.PoolManager(maxsize=connections, retries=False)

    def call(self, path: str, body: object | None = None, *, timeout_s: float, method: str = "POST") -> Any:
        """The answer as JSON, ``None`` where it has no body.

        Raises:
            ServerError: no connection, no whole answer within ``timeout_s``, or a status other than 2xx.
            BadAnswer: no JSON.
        """
        address = self.url + path
        limit = time.monotonic() + timeout_s
        try:
            response = self._pool.request(
                method,
                address,
                body=None if body is None else json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
                timeout=urllib3.Timeout(connect=timeout_s, read=timeout_s),
                preload_content=False,
                redirect=False,
            )
            text = self._read(response, address, limit)
        except urllib3.exceptions.HTTPError as error:
            raise ServerError(f"{address}: {_reason(error)}", again=True) from error
        if not 200 <= response.status < 300:
            said = " ".join(text[:400].decode(errors="replace").split())
            raise ServerError(f"{address} answered {response.status}: {said}", again=response.status in _RETRIED)
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise BadAnswer(f"{address}: expected JSON, got {text[:80]!r} ({error})") from error

    def patiently(self, path: str, body: object, *, timeout_s: float, deadline_s: float) -> Any:
        """``call``, tried again with growing pauses where that may help, for ``deadline_s`` in all.

        Raises:
            ServerError, BadAnswer: as ``call``; the last one.
        """
        limit = time.monotonic() + deadline_s
        pause = _FIRST_PAUSE_S
        while True:
            left = limit - time.monotonic()
            try:
                return self.call(path, body, timeout_s=min(timeout_s, max(left, 0.01)))
            except ServerError as error:
                if not error.again or time.monotonic() + pause >= limit:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    @staticmethod
    def _read(response: urllib3.BaseHTTPResponse, address: str, limit: float) -> bytes:
        parts, size = [], 0
        for part in response.stream(_CHUNK):
            parts.append(part)
            size += len(part)
            late = time.monotonic() > limit
            if late or size > _LONGEST_ANSWER:
                response.close()
                what = "no whole answer in time" if late else f"an answer of more than {_LONGEST_ANSWER} bytes"
                raise ServerError(f"{address}: {what}", again=late)
        response.release_conn()
        return b"".join(parts)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Dialect(Protocol):
    """How one kind of server is asked to continue a sequence, and what it answers."""

    path: str

    def refuses(self, request: Request) -> str | None:
        """Why this server's log-probabilities would not be those of the distribution sampled from."""
        ...

    def body(self, request: Request, max_new_tokens: int) -> dict[str, Any]:
        """Of the request to ``path``."""
        ...

    def read(self, answer: Any) -> Answer:
        """What was answered. Raises ``KeyError``, ``TypeError``, ``ValueError`` or ``IndexError`` where fields are
        missing or of another kind, ``BadAnswer`` with a reason."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """As the server gave it. ``finish``: ``stop``, ``length``, or something else that went wrong."""

    ids: list[int]
    logprobs: list[float]
    finish: str


class HttpEngine:
    """An engine that is a server.

    Args:
        max_length: tokens of a sequence on the server, prompt and continuation.
        concurrency: requests under way at the same time.
        timeout_s: of one attempt. deadline_s: of a request with all its attempts.
        weights: how the server gets new ones; ``None`` where another process sees to it.

    Raises:
        ConfigError: a URL or a number that cannot be.
    """

    def __init__(
        self,
        dialect: Dialect,
        url: str,
        *,
        max_length: int,
        concurrency: int = 64,
        timeout_s: float = 120.0,
        deadline_s: float = 240.0,
        weights: WeightSink | None = None,
    ) -> None:
        if min(max_length, concurrency) < 1 or not 0 < timeout_s <= deadline_s:
            raise ConfigError(
                "engine: expected max_length >= 1, concurrency >= 1 and 0 < timeout_s <= deadline_s, got "
                f"{max_length}, {concurrency}, {timeout_s} and {deadline_s}"
            )
        self._dialect = dialect
        self._client = JsonClient(url, connections=concurrency)
        self._max_length = max_length
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._weights: WeightSink = weights or Bystander()

    def update_weights(self, weights: Weights, version: int) -> None:
        """As ``WeightSink``."""
        self._weights.update_weights(weights, version)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """One generation a request, in order; never raises for one of them."""
        if not requests:
            return []
        with ThreadPoolExecutor(min(self._concurrency, len(requests)), thread_name_prefix="rollouts") as threads:
            return list(threads.map(self._one, requests))

    def _one(self, request: Request) -> Generation:
        problem = why_refused(request, max_length=self._max_length) or self._dialect.refuses(request)
        if problem is not None:
            return failed(problem)
        room = self._max_length - len(request.prompt_ids)
        if not room:
            return Generation(np.empty(0, np.int64), np.empty(0, np.float32), FinishReason.LENGTH)
        limit = min(request.max_new_tokens, room)
        try:
            body = self._dialect.body(request, limit)
            raw = self._client.patiently(
                self._dialect.path, body, timeout_s=self._timeout_s, deadline_s=self._deadline_s
            )
        except (ServerError, BadAnswer) as error:
            return failed(str(error))
        try:
            return checked(self._dialect.read(raw), request, limit)
        except BadAnswer as error:
            return failed(f"{self._client.url}: {error}")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            return failed(f"{self._client.url}: an answer with missing or odd fields: {error!r}")


def checked(answer: Answer, request: Request, limit: int) -> Generation:
    """An answer as a generation. A server that stops at an end token of its own, which is none of ``stop_ids``, has
    written a message without an end: ``FinishReason.LENGTH``.

    Raises:
        BadAnswer: no ids, more than asked for, ids that go on after a stop, another number of log-probabilities, or one
            that is not finite or is positive.
    """
    ids = np.array(answer.ids, dtype=np.int64).reshape(-1)
    logprobs = np.array(answer.logprobs, dtype=np.float32).reshape(-1)
    if answer.finish not in ("stop", "length"):
        raise BadAnswer(f"the server ended the request with {answer.finish!r}")
    if not 1 <= len(ids) <= limit or (ids < 0).any():
        raise BadAnswer(f"expected 1..{limit} token ids >= 0, got {len(ids)}")
    if len(logprobs) != len(ids):
        raise BadAnswer(f"expected one log-probability an id, got {len(logprobs)} for {len(ids)} ids")
    good = np.isfinite(logprobs) & (logprobs <= 0)
    if not good.all():
        at = int(np.argmin(good))
        raise BadAnswer(f"expected finite log-probabilities <= 0, got {logprobs[at]} at id {at}")
    stops = np.flatnonzero(np.isin(ids, np.array(request.stop_ids, dtype=np.int64)))
    if len(stops) and stops[0] != len(ids) - 1:
        raise BadAnswer(f"expected nothing after the stop id {ids[stops[0]]}, got {len(ids) - 1 - stops[0]} more")
    return Generation(ids, logprobs, FinishReason.STOP if len(stops) else FinishReason.LENGTH)
