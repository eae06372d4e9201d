"""JSON as this project accepts it: UTF-8, no NaN, no duplicate keys, no lone surrogates, bounded depth.

The standard library parses; this file only says no where it would say something quietly wrong.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from trace_fast.errors import RolloutError
from trace_fast.formats.limits import Limits

_OPEN = b"{["
_STRUCTURE = re.compile(rb'["{}\[\]]')
_STRING_REST = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # up to the closing quote, without backtracking
_QUOTE = ord('"')
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SHOWN = 80  # characters of a key or literal that a message repeats


class LiteralFloat(float):
    """A float that remembers how the file spelled it, so that the gold answer ``1.50`` is scored as ``1.50``."""

    literal: str

    def __new__(cls, literal: str) -> LiteralFloat:
        value = super().__new__(cls, literal)
        if not math.isfinite(value):
            raise ValueError(f"the number {literal[:_SHOWN]} is out of range of a double")
        value.literal = literal
        return value

    def __reduce__(self) -> tuple[type[LiteralFloat], tuple[str]]:
        return (LiteralFloat, (self.literal,))


def _float(literal: str) -> float:
    """A float that needs no memory of its spelling where printing it gives the spelling back."""
    value = float(literal)
    return value if repr(value) == literal else LiteralFloat(literal)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write null where a number is missing")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:_SHOWN]!r} appears twice in one object")
            seen.add(key)
    return result


_decoder = json.JSONDecoder(parse_float=_float, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)


class Nesting:
    """Follows brackets and strings through bytes that arrive in pieces; values are not looked at."""

    __slots__ = ("deepest", "depth", "escaped", "in_string")

    def __init__(self) -> None:
        self.depth = 0
        self.deepest = 0
        self.in_string = False
        self.escaped = False

    def feed(self, data: bytes, start: int = 0) -> int | None:
        """Reads on; the offset just after the bracket that closes depth 0, or ``None`` when more is needed."""
        at = start
        while at < len(data):
            if self.escaped:
                self.escaped = False
                at += 1
            elif self.in_string:
                at = self._string_end(data, at)
            else:
                match = _STRUCTURE.search(data, at)
                if match is None:
                    return None
                at = match.end()
                found = match.group()
                if found == b'"':
                    self.in_string = True
                elif found in _OPEN:
                    self.depth += 1
                    self.deepest = max(self.deepest, self.depth)
                else:
                    self.depth -= 1
                    if self.depth <= 0:
                        return at
        return None

    def feed_string(self, data: bytes, start: int = 0) -> int | None:
        """As ``feed`` for one string that begins at the first ``start``: the offset just after its closing quote."""
        at = start
        if not self.in_string and not self.escaped:
            self.in_string = True
            at += 1
        if self.escaped and at < len(data):
            self.escaped = False
            at += 1
        at = self._string_end(data, at)
        return None if self.in_string else at

    def _string_end(self, data: bytes, at: int) -> int:
        rest = _STRING_REST.match(data, at)
        assert rest is not None  # it matches nothing at least
        at = rest.end()
        if at < len(data):
            if data[at] == _QUOTE:
                self.in_string = False
            else:  # a backslash is the last byte: what it escapes comes with the next piece
                self.escaped = True
            at += 1
        return at


def too_deep(raw: bytes, max_depth: int) -> bool:
    """Whether brackets in ``raw`` nest deeper than ``max_depth`` (brackets inside strings do not count)."""
    if raw.count(b"{") + raw.count(b"[") <= max_depth:
        return False  # the common case for text records, at the speed of a byte count
    nesting = Nesting()
    at: int | None = 0
    while at is not None and nesting.deepest <= max_depth:
        nesting.depth = max(nesting.depth, 0)
        at = nesting.feed(raw, at)
    return nesting.deepest > max_depth


def parse_json(raw: bytes, limits: Limits) -> Any:
    """The value of one JSON text.

    Floats whose spelling differs from Python's come as ``LiteralFloat``; the rest as the standard library has it.

    Raises:
        RolloutError: kind ``parse``, the reason names what is wrong (not the place in the file).
    """
    if len(raw) > limits.max_record_bytes:
        raise RolloutError("parse", oversize(limits))
    if too_deep(raw, limits.max_depth):
        raise RolloutError("parse", f"expected at most {limits.max_depth} levels of nesting, got more")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RolloutError("parse", not_utf8(raw, error)) from None
    try:
        value = _decoder.decode(text)
    except json.JSONDecodeError as error:
        raise RolloutError("parse", f"not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:  # the hooks above, and integers of more digits than Python converts
        raise RolloutError("parse", f"not usable JSON: {error}") from None
    if _SURROGATE_ESCAPE.search(raw) and has_lone_surrogate(value):
        raise RolloutError("parse", "a string holds a lone surrogate (half of a \\ud8xx\\udcxx pair), which is no text")
    return value


def not_utf8(raw: bytes, error: UnicodeDecodeError) -> str:
    """The reason given for bytes that are no UTF-8."""
    return f"expected UTF-8, got byte 0x{raw[error.start]:02x} at byte {error.start}"


def oversize(limits: Limits) -> str:
    """The reason given for a record beyond ``limits.max_record_bytes``."""
    return f"expected a record of at most {limits.max_record_bytes} bytes, got a longer one (Limits.max_record_bytes)"


def has_lone_surrogate(value: Any) -> bool:
    """Whether some string in a JSON value cannot be encoded as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def parse_embedded(text: str, limits: Limits) -> Any:
    """The value of JSON kept inside a string (tool arguments); raises ``ValueError`` when it is none."""
    return parse_json(text.encode("utf-8"), limits)
