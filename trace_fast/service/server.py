"""The server: one scorer, one pass at a time, requests in threads of their own.

It speaks plain HTTP to whoever reaches its address and is meant for one machine or a closed network.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trace_fast.errors import OutputError, RolloutError
from trace_fast.formats import Limits, rollouts_of
from trace_fast.formats.strict_json import parse_json
from trace_fast.rollout import Rollout
from trace_fast.scorer import Scorer
from trace_fast.service.wire import PROTOCOL, score_to_json, vocabulary_hash

LIMITS = Limits(max_record_bytes=1 << 30)  # of a request
_IDLE_S = 600.0  # a client that says nothing for so long is gone


class RefusedRequest(Exception):
    """A request that is not answered with scores."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a request under way does not keep the process


class ScoringServer:
    """Listens from construction on; ``serve`` answers until ``stop``, which another thread calls, or an exception.

    Args:
        scorer: with a tokenizer. host, port: to listen at; port 0 takes a free one.
        report: gets a line for each request.

    Raises:
        OutputError: nothing can listen there.
    """

    def __init__(self, scorer: Scorer, host: str, port: int, *, report: Callable[[str], None]) -> None:
        self._scorer = scorer
        self._report = report
        self._one_pass = threading.Lock()
        self._about = {
            "protocol": PROTOCOL,
            "reference": scorer.reference,
            "vocabulary": vocabulary_hash(scorer.tokenizer),
            "dtype": str(scorer.model.dtype).removeprefix("torch."),
            "alias": scorer.alias,
        }
        try:
            self._server = _Server((host, port), _handler(self))
        except (OSError, OverflowError) as error:
            raise OutputError(f"{host}:{port}: cannot listen there: {error}") from error

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}"

    def serve(self) -> None:
        self._server.serve_forever()

    def stop(self) -> None:
        self._server.shutdown()

    def close(self) -> None:
        """Gives the address back."""
        self._server.server_close()

    def answer(self, method: str, path: str, body: bytes) -> dict[str, Any]:
        """The JSON answer to a request.

        Raises:
            RefusedRequest: unknown address, or a body that is no request.
        """
        if (method, path) == ("GET", "/reference"):
            return self._about
        if (method, path) != ("POST", "/score"):
            raise RefusedRequest(
                HTTPStatus.NOT_FOUND, f"expected GET /reference or POST /score, got {method} {path[:80]}"
            )
        rollouts, errors, written = self._read(body)
        found: dict[int, dict[str, Any]] = {}
        with self._one_pass:
            failed: list[RolloutError] = []
            for score in self._scorer.score(rollouts, written_logprobs=written, errors=failed.append):
                found[int(score.source)] = score_to_json(score)
        errors |= {int(error.source): error for error in failed}
        self._report(f"scored {len(found)} rollouts, {len(errors)} failed")
        return {
            "reference": self._scorer.reference,
            "scores": [{"index": index, **score} for index, score in sorted(found.items())],
            "errors": [
                {"index": index, "kind": error.kind, "message": error.reason} for index, error in sorted(errors.items())
            ],
        }

    def _read(self, body: bytes) -> tuple[list[Rollout], dict[int, RolloutError], bool]:
        """Rollouts whose ``source`` is their place in the request, errors by place, and whether to score the written
        tokens too."""
        try:
            request = parse_json(body, LIMITS)
        except RolloutError as error:
            raise RefusedRequest(HTTPStatus.BAD_REQUEST, error.reason) from error
        records = request.get("rollouts") if isinstance(request, dict) else None
        written = request.get("written_logprobs", False) if isinstance(request, dict) else None
        if not isinstance(records, list) or not isinstance(written, bool):
            raise RefusedRequest(
                HTTPStatus.BAD_REQUEST, "expected an object with rollouts (a list) and written_logprobs (a boolean)"
            )
        failed: list[RolloutError] = []
        built = rollouts_of(records, self._scorer.tokenizer, format="tokens", errors=failed.append, limits=LIMITS)
        return list(built), {int(error.source): error for error in failed}, written


def _handler(server: ScoringServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _IDLE_S

        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > LIMITS.max_record_bytes:
                self.close_connection = True
                reason = f"expected a Content-Length of at most {LIMITS.max_record_bytes}, got {length[:40]!r}"
                self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": reason})
                return
            self._answer(self.rfile.read(int(length)))

        def _answer(self, body: bytes) -> None:
            try:
                answer = server.answer(self.command, self.path, body)
            except RefusedRequest as error:
                self._send(error.status, {"error": str(error)})
            except Exception as error:  # a bug or the machine's fault: the asker is told, the server goes on
                traceback.print_exc()
                self._send(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"})
            else:
                self._send(HTTPStatus.OK, answer)

        def _send(self, status: HTTPStatus, answer: dict[str, Any]) -> None:
            text = json.dumps(answer, allow_nan=False).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing: ``ScoringServer`` reports what it did."""

    return Handler
