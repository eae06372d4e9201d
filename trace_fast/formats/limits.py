"""Bounds on one record, so that a hostile or broken file costs one error and not the process."""

from __future__ import annotations

from dataclasses import dataclass

from trace_fast.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """What one record may be at most; anything beyond is a record error of kind ``parse``.

    Args:
        max_record_bytes: bytes of one record as stored, decompressed (JSON text, or one plain-text log).
        max_text: characters of rollout text and gold answers that go to the tokenizer (some 2 million tokens at the
            default, beyond any model's positions; tokenizers need 150 bytes of memory and more a character).
        max_depth: nesting of objects and lists within one record; the record itself counts as 1.

    Raises:
        ConfigError: a bound below 1, or ``max_depth`` above 500 (beyond that the JSON parser recurses too deep).
    """

    max_record_bytes: int = 256 * 2**20
    max_text: int = 8 * 2**20
    max_depth: int = 64

    def __post_init__(self) -> None:
        for name in ("max_record_bytes", "max_text"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not 1 <= self.max_depth <= 500:
            raise ConfigError(f"max_depth: expected 1..500, got {self.max_depth}")
