"""Every error this package raises on purpose.

All of them are ``ValueError``s: something that the caller gave is not usable, and the message says what was
expected, what came and where. Violated invariants of our own are ``assert``s, never these.
"""

from __future__ import annotations

from typing import Any


class TraceFastError(ValueError):
    """Base of all errors raised on purpose; catch this one to catch them all."""


class ConfigError(TraceFastError):
    """A setting is unknown, out of range or contradicts another one."""


class ModelError(TraceFastError):
    """A model (or its tokenizer) cannot be loaded or cannot be scored exactly; the message names the reason."""


class OutputError(TraceFastError):
    """An output file cannot be written, or a run refuses to resume into it."""


class InputError(TraceFastError):
    """A whole input file cannot be read (missing, not of the named format, truncated archive)."""


class RolloutError(TraceFastError):
    """One rollout cannot be read or scored; the others are not affected.

    Attributes:
        kind: machine-readable reason, one of ``RolloutError.KINDS``.
        rollout_id: id of the rollout, or its ``file:line`` when it has none yet.
        source: ``file:line`` (1-based; record number for JSON lists and Parquet) or ``"<memory>"``.
        reason: the message without the place.
    """

    KINDS = (
        "parse",  # not JSON, not UTF-8, too large, too deep
        "format",  # a key is missing or has the wrong type
        "boundary",  # boundaries out of order or out of range, empty state
        "answer",  # the gold answer is empty or missing
        "seam",  # one token spans opener and answer
        "vocabulary",  # token ids outside the vocabulary
        "template",  # the chat template refuses these messages
        "length",  # longer than the model's positions
        "inexact",  # the record's format does not allow exact scoring
        "non_finite",  # the model produced NaN, Inf or a positive log-probability
        "config",  # the record needs something that was not configured (opener, tokenizer)
    )

    def __init__(self, kind: str, reason: str, *, rollout_id: str = "?", source: str = "<memory>") -> None:
        assert kind in self.KINDS, kind
        self.kind = kind
        self.reason = reason
        self.rollout_id = rollout_id
        self.source = source
        super().__init__(f"{source}: rollout {rollout_id!r}: {reason}")

    def at(self, *, rollout_id: str, source: str) -> RolloutError:
        """The same error, placed: used where the raising code did not know the record."""
        return type(self)(self.kind, self.reason, rollout_id=rollout_id, source=source)

    def __reduce__(self) -> tuple[Any, ...]:  # keeps keyword-only arguments through pickle (worker processes)
        return (_rebuild, (self.kind, self.reason, self.rollout_id, self.source))

    def to_record(self) -> dict:
        """The error record of the errors file, of plain JSON types."""
        return {
            "id": self.rollout_id,
            "source": self.source,
            "status": "error",
            "error": {"kind": self.kind, "message": self.reason},
        }


def _rebuild(kind: str, reason: str, rollout_id: str, source: str) -> RolloutError:
    return RolloutError(kind, reason, rollout_id=rollout_id, source=source)
