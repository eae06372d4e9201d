"""JSON as this project accepts it: UTF-8, no NaN, no duplicate keys, no lone surrogates, bounded depth.

The standard library parses; this file only says no where it would say something quietly wrong. The document
splitter finds where the records of a JSON list or dict begin and end without parsing them, so each record is
parsed, bounded and reported by itself: one bad record does not cost the ones after it. (Event parsers stop at the
first bad record, keep one of two duplicate keys, and yajl turns a lone surrogate into ``?``.)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from trace_fast.errors import InputError, RolloutError
from trace_fast.formats.limits import Limits

_CHUNK = 1 << 20
_OPEN = b"{["
_STRUCTURE = re.compile(rb'["{}\[\]]')
_STRING_END = re.compile(rb'["\\]')
_SCALAR_END = re.compile(rb"[,\]}\s]")
_NOT_SPACE = re.compile(rb"[^ \t\r\n]")
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


_decoder = json.JSONDecoder(parse_float=LiteralFloat, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)


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
                match = _STRING_END.search(data, at)
                if match is None:
                    return None
                at = match.end()
                self.in_string = match.group() != b'"'
                self.escaped = self.in_string
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

    Floats come as ``LiteralFloat``; everything else as the standard library has it.

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


# --- documents --------------------------------------------------------------------------------------------------


class _Buffer:
    """Bytes of a stream with a read position, refilled by the chunk."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.data = b""
        self.at = 0

    def refill(self) -> bool:
        """Drops what was read, reads one more chunk; False at the end of the stream."""
        chunk = self._stream.read(_CHUNK)
        self.data = self.data[self.at :] + chunk
        self.at = 0
        return bool(chunk)

    def peek(self) -> bytes:
        """The next byte that is not white space, not consumed; empty at the end."""
        while True:
            match = _NOT_SPACE.search(self.data, self.at)
            if match is not None:
                self.at = match.start()
                return match.group()
            self.at = len(self.data)
            if not self.refill():
                return b""

    def value(self, limits: Limits) -> bytes | RolloutError:
        """The next JSON value as bytes, or why it cannot be had; the position is after it either way."""
        first = self.peek()
        if first and first in b"{[":
            return self._nested(limits)
        if first == b'"':
            return self._string(limits)
        return self._scalar(limits)

    def _take(self, limits: Limits, end_of: Callable[[bytes, int], int | None]) -> bytes | RolloutError:
        pieces: list[bytes] = []
        size = 0
        while True:
            end = end_of(self.data, self.at)
            piece = self.data[self.at : len(self.data) if end is None else end]
            size += len(piece)
            if size <= limits.max_record_bytes:
                pieces.append(piece)
            else:
                pieces.clear()
            if end is not None:
                self.at = end
                break
            self.at = len(self.data)
            if not self.refill():
                return RolloutError("parse", "the file ends within this record")
        if size > limits.max_record_bytes:
            return RolloutError("parse", oversize(limits))
        return b"".join(pieces)

    def _nested(self, limits: Limits) -> bytes | RolloutError:
        return self._take(limits, Nesting().feed)

    def _string(self, limits: Limits) -> bytes | RolloutError:
        nesting = Nesting()

        def end_of(data: bytes, at: int) -> int | None:
            # A string is its own bracket: feed it quote by quote, never into what follows.
            while at < len(data):
                if nesting.escaped:
                    nesting.escaped = False
                    at += 1
                    continue
                match = _STRING_END.search(data, at)
                if match is None:
                    return None
                at = match.end()
                if match.group() == b"\\":
                    nesting.escaped = True
                elif nesting.in_string:
                    return at
                else:
                    nesting.in_string = True
            return None

        return self._take(limits, end_of)

    def _scalar(self, limits: Limits) -> bytes | RolloutError:
        def end_of(data: bytes, at: int) -> int | None:
            match = _SCALAR_END.search(data, at)
            return None if match is None else match.start()

        return self._take(limits, end_of)


Element = tuple[str | None, bytes | RolloutError]


def split_document(
    stream: BinaryIO, name: str, is_record_key: Callable[[str], bool], limits: Limits
) -> Iterator[Element]:
    """Yields ``(key, raw JSON)`` of each record of a JSON document; ``key`` is None outside dicts of records.

    Accepted: a list of records, a dict id -> record, a single record, and several of those one after the other.
    A dict is a single record when its first key is one that records have (``is_record_key``) or its first value
    is no object. One record at a time is in memory.

    Raises:
        InputError: the text is not such a document, or the file ends before the list or dict is closed.
    """
    buffer = _Buffer(stream)
    while first := buffer.peek():
        if first == b"[":
            buffer.at += 1
            yield from _members(buffer, name, b"]", limits, keyed=False)
        elif first == b"{":
            buffer.at += 1
            yield from _dict(buffer, name, is_record_key, limits)
        else:
            raise InputError(f"{name}: expected a JSON list or object, got {first!r}")


def _dict(buffer: _Buffer, name: str, is_record_key: Callable[[str], bool], limits: Limits) -> Iterator[Element]:
    members = _members(buffer, name, b"}", limits, keyed=True)
    first = next(members, None)
    if first is None:
        yield None, b"{}"
        return
    key, raw = first
    assert key is not None
    if isinstance(raw, bytes) and raw.startswith(b"{") and not is_record_key(key):
        yield first
        yield from members
        return
    pieces: list[bytes] = []
    size = 0
    error: RolloutError | None = None
    for key, raw in _chain(first, members):
        if isinstance(raw, RolloutError):
            error = error or raw
            continue
        piece = json.dumps(key).encode() + b":" + raw
        size += len(piece) + 1
        if size > limits.max_record_bytes:
            error = error or RolloutError("parse", oversize(limits))
            pieces.clear()
        elif error is None:
            pieces.append(piece)
    yield None, error or b"{" + b",".join(pieces) + b"}"


def _chain(first: Element, rest: Iterator[Element]) -> Iterator[Element]:
    yield first
    yield from rest


def _members(buffer: _Buffer, name: str, close: bytes, limits: Limits, *, keyed: bool) -> Iterator[Element]:
    what = "dict" if keyed else "list"
    after_value = False
    while True:
        found = buffer.peek()
        if not found:
            raise InputError(f"{name}: the file ends before its JSON {what} is closed; it is truncated")
        if found == close:
            buffer.at += 1
            return
        if after_value:
            if found != b",":
                raise InputError(f"{name}: expected ',' or {close.decode()!r} between records, got {found!r}")
            buffer.at += 1
            after_value = False
            continue
        key = _key(buffer, name, limits) if keyed else None
        raw = buffer.value(limits)
        yield key, raw
        if not isinstance(raw, bytes) and not buffer.peek():
            return  # the record that the file ends in was reported; nothing is known to be missing after it
        if raw == b"":
            raise InputError(f"{name}: expected a record, got {buffer.peek()!r}")
        after_value = True


def _key(buffer: _Buffer, name: str, limits: Limits) -> str:
    if buffer.peek() != b'"':
        raise InputError(f"{name}: expected a quoted key in its JSON dict, got {buffer.peek()!r}")
    raw = buffer.value(limits)
    try:
        if isinstance(raw, RolloutError):
            raise raw
        key = parse_json(raw, limits)
    except RolloutError as error:
        raise InputError(f"{name}: unreadable key in its JSON dict: {error.reason}") from None
    if buffer.peek() != b":":
        raise InputError(f"{name}: expected ':' after the key {key[:_SHOWN]!r}, got {buffer.peek()!r}")
    buffer.at += 1
    return str(key)
