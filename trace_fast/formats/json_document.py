"""Where the records of a JSON document begin and end, without parsing them.

Each record is then parsed, bounded and reported by itself, so one bad record does not cost the ones after it, and
one record is in memory at a time. (Event parsers stop at the first bad record, keep one of two duplicate keys, and
yajl turns a lone surrogate into ``?``.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

from trace_fast.errors import InputError, RolloutError
from trace_fast.formats.limits import Limits
from trace_fast.formats.strict_json import Nesting, oversize, parse_json

_CHUNK = 1 << 20
_SCALAR_END = re.compile(rb"[,\]}\s]")
_NOT_SPACE = re.compile(rb"[^ \t\r\n]")
_SHOWN = 80  # characters of a key that a message repeats


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
            return self._take(limits, Nesting().feed)
        if first == b'"':
            return self._take(limits, Nesting().feed_string)
        return self._take(limits, _scalar_end)

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


def _scalar_end(data: bytes, at: int) -> int | None:
    match = _SCALAR_END.search(data, at)
    return None if match is None else match.start()


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
