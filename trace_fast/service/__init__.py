"""Scoring by another process, over HTTP: ``trace-fast serve`` answers, a trainer with ``placement = "remote"`` asks.

``GET /reference``: ``{"reference", "vocabulary", "dtype", "alias", "protocol"}``, what scores depend on.
``POST /score``: ``{"rollouts": [records in tokens form], "written_logprobs": bool}``, answered by ``{"reference",
"scores": [{"index", ...}], "errors": [{"index", "kind", "message"}]}``; every rollout has one entry in one of the two
lists. Numbers are JSON and come back the same, bit for bit. A request as a whole is refused with 4xx and ``{"error"}``.
"""

from trace_fast.service.server import ScoringServer
from trace_fast.service.wire import PROTOCOL, vocabulary_hash

__all__ = ["PROTOCOL", "ScoringServer", "vocabulary_hash"]
