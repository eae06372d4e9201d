"""JSON over HTTP with the standard library, for the peers that are servers."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from trace_fast.bench.peers.peer import PeerError
from trace_fast.errors import ConfigError

SECONDS_TO_CONNECT = 5.0
SECONDS_TO_SCORE = 1800.0


def check_url(peer: str, url: str) -> str:
    """``url`` without a trailing slash. Raises ``ConfigError`` for what is no http(s) address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"endpoint {peer}: expected a URL such as http://localhost:30000, got {url!r}")
    return url.rstrip("/")


def request(url: str, body: object | None = None, *, seconds: float = SECONDS_TO_SCORE) -> Any:
    """GET, or POST with a JSON body; the answer as JSON, ``None`` where it is none.

    Raises:
        PeerError: no connection, a status other than 2xx (with what the server said), or no answer in time.
    """
    data = None if body is None else json.dumps(body).encode()
    call = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(call, timeout=seconds) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        said = " ".join(error.read(400).decode(errors="replace").split())
        raise PeerError(f"{url} answered {error.code} {error.reason}: {said}") from error
    except (OSError, http.client.HTTPException) as error:  # URLError and time-outs are OSErrors
        raise PeerError(f"cannot reach {url}: {getattr(error, 'reason', error)}") from error
    try:
        return json.loads(text)
    except ValueError:
        return None
