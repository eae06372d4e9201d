"""From paths to raw records: compression, containers and places; nothing here knows what a rollout is.

Memory stays at one record (one batch of records for Parquet), however long the file is.
"""

from __future__ import annotations

import base64
import gzip
import io
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, cast
from uuid import UUID

import zstandard

from trace_fast.errors import InputError, RolloutError
from trace_fast.formats.json_document import split_document
from trace_fast.formats.limits import Limits
from trace_fast.formats.react_log import split_logs
from trace_fast.formats.strict_json import Nesting, oversize, parse_json

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_PEEK = 1 << 16
_ZSTD_INPUT = 1 << 12  # bytes a step; even run-length frames (128 KiB from 4 bytes) then stay near 128 MiB
_PARQUET_ROWS = 16  # rollouts are large: a batch of a thousand could be gigabytes
_PARQUET_BUFFER = 1 << 20  # bytes read at a time of each column
_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
_UTF8_BOM = b"\xef\xbb\xbf"
_OTHER_BOMS = (b"\xff\xfe", b"\xfe\xff")
_READ_ERRORS = (OSError, EOFError, zlib.error, zstandard.ZstdError)


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record as parsed JSON, or the text of a plain-text log (``log``), or the error that stands for it.

    ``source`` is ``file:n``; n is the line of JSONL and text (1-based), else the record's number (1-based).
    ``key`` is the record's key in a dict of records.
    """

    source: str
    value: Any
    key: str | None = None
    error: RolloutError | None = None
    log: bool = False


def as_paths(paths: Paths) -> list[str]:
    """The paths as a list of strings; a single path is a list of one."""
    if isinstance(paths, str | os.PathLike):
        return [os.fspath(paths)]
    return [os.fspath(path) for path in paths]


def read_records(paths: Paths, limits: Limits, is_record_key: Any) -> Iterator[RawRecord]:
    """Yields every record of every file, in order; a broken record comes as one with ``error`` set.

    Args:
        is_record_key: ``str -> bool``, tells a single record from a dict of records (see ``split_document``).

    Raises:
        InputError: a file cannot be read as a whole (missing, a directory, truncated, corrupt); records before
            the broken place have been yielded.
    """
    for path in as_paths(paths):
        name = "stdin" if path == "-" else path
        with ExitStack() as stack:
            try:
                yield from _read(path, name, limits, is_record_key, stack)
            except FileNotFoundError:
                raise InputError(f"{name}: no such file") from None
            except IsADirectoryError:
                raise InputError(f"{name}: expected a file, got a directory") from None
            except _READ_ERRORS as error:
                raise InputError(f"{name}: cannot be read (on): {error or type(error).__name__}") from error


def _read(path: str, name: str, limits: Limits, is_record_key: Any, stack: ExitStack) -> Iterator[RawRecord]:
    raw: BinaryIO = sys.stdin.buffer
    if path != "-":
        raw = stack.enter_context(open(path, "rb"))  # noqa: SIM115 - the stack closes it
    stream = _decompressed(_peekable(raw))
    head = stream.peek(_PEEK)
    if head.startswith(_OTHER_BOMS):
        raise InputError(f"{name}: expected UTF-8, got a UTF-16 byte order mark")
    if head.startswith(_UTF8_BOM):
        stream.read(len(_UTF8_BOM))
        head = head[len(_UTF8_BOM) :]
    container = _container(name, head)
    if container == "parquet":
        yield from _parquet(stream, raw, name, stack)
    elif container == "text":
        yield from _text(stream, name, limits)
    elif container == "lines":
        yield from _lines(stream, name, limits)
    else:
        yield from _document(stream, name, limits, is_record_key)


def _container(name: str, head: bytes) -> str:
    """``lines``, ``document``, ``text`` or ``parquet``: by magic bytes, then by name, then by the first bytes."""
    if head.startswith(_PARQUET):
        return "parquet"
    suffixes = [s.lower() for s in Path(name).suffixes if s.lower() not in (".gz", ".zst", ".zstd")]
    suffix = suffixes[-1] if suffixes else ""
    known = {".jsonl": "lines", ".ndjson": "lines", ".json": "document", ".txt": "text", ".log": "text"}
    if suffix in known:
        return known[suffix]
    if suffix == ".parquet":
        raise InputError(f"{name}: expected a Parquet file, got other bytes")
    text = head.lstrip()
    if text.startswith(b"["):
        return "document"
    if not text.startswith(b"{"):
        return "text" if text else "lines"
    first_line = text.split(b"\n", 1)
    whole = len(first_line) == 1 or Nesting().feed(first_line[0]) is not None
    return "lines" if whole else "document"


# --- compression ------------------------------------------------------------------------------------------------


def _peekable(stream: Any) -> io.BufferedReader:
    return stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream, _PEEK)


def _decompressed(stream: io.BufferedReader) -> io.BufferedReader:
    magic = stream.peek(4)
    if magic.startswith(_GZIP):
        return io.BufferedReader(cast(Any, gzip.GzipFile(fileobj=stream)), _PEEK)
    if magic.startswith(_ZSTD):
        return io.BufferedReader(_ZstdFrames(stream), _PEEK)
    return stream


class _ZstdFrames(io.RawIOBase):
    """Decompressed bytes of all frames; a truncated frame raises ``EOFError`` (zstandard's own reader just ends)."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._in_frame = False
        self._input = b""
        self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._output:
            if not self._input:
                self._input = self._stream.read(_ZSTD_INPUT)
                if not self._input:
                    if self._in_frame:
                        raise EOFError("the zstd frame is truncated")
                    return 0
            self._in_frame = True
            self._output = self._frame.decompress(self._input)
            self._input = b""
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = zstandard.ZstdDecompressor().decompressobj()
                self._in_frame = False
        count = min(len(target), len(self._output))
        target[:count] = self._output[:count]
        self._output = self._output[count:]
        return count


# --- containers -------------------------------------------------------------------------------------------------


def _bounded_lines(stream: BinaryIO, limits: Limits) -> Iterator[bytes | None]:
    """Lines without a bound on their number; one that is too long comes as None and is skipped over."""
    bound = limits.max_record_bytes + 2  # the line end does not count
    while line := stream.readline(bound):
        if len(line) == bound and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(_PEEK)
            yield None
        else:
            yield line


def _lines(stream: BinaryIO, name: str, limits: Limits) -> Iterator[RawRecord]:
    for number, line in enumerate(_bounded_lines(stream, limits), start=1):
        if line is None:
            yield RawRecord(f"{name}:{number}", None, error=RolloutError("parse", oversize(limits)))
        elif line := line.strip():
            yield _parsed(f"{name}:{number}", None, line, limits)


def _document(stream: BinaryIO, name: str, limits: Limits, is_record_key: Any) -> Iterator[RawRecord]:
    for number, (key, raw) in enumerate(split_document(stream, name, is_record_key, limits), start=1):
        if isinstance(raw, RolloutError):
            yield RawRecord(f"{name}:{number}", None, key, raw)
        else:
            yield _parsed(f"{name}:{number}", key, raw, limits)


def _text(stream: BinaryIO, name: str, limits: Limits) -> Iterator[RawRecord]:
    for number, log in split_logs(_bounded_lines(stream, limits), limits):
        if isinstance(log, RolloutError):
            yield RawRecord(f"{name}:{number}", None, error=log)
        else:
            yield RawRecord(f"{name}:{number}", log, log=True)


def _parsed(source: str, key: str | None, raw: bytes, limits: Limits) -> RawRecord:
    try:
        return RawRecord(source, parse_json(raw, limits), key)
    except RolloutError as error:
        return RawRecord(source, None, key, error)


def _parquet(stream: BinaryIO, raw: BinaryIO, name: str, stack: ExitStack) -> Iterator[RawRecord]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if stream is raw and raw.seekable():
        raw.seek(0)
        file: BinaryIO = raw
    else:  # Parquet is read from its end: a pipe or a compressed file goes through the disk, not through memory
        file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        while chunk := stream.read(_PEEK):
            file.write(chunk)
        file.seek(0)
    number = 0
    try:
        # Buffered, and not a row group ahead: a column chunk as a whole may be larger than memory.
        with pq.ParquetFile(file, buffer_size=_PARQUET_BUFFER, pre_buffer=False) as table:
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield RawRecord(f"{name}:{number}", _plain(row))
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{name}: not readable as Parquet after record {number}: {error}") from error


def _plain(value: Any) -> Any:
    """A Parquet value as JSON would have it; null fields are absent (struct columns name every field of any row)."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal | UUID | timedelta):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, tuple):  # an entry of a map column
        return [_plain(item) for item in value]
    return value
