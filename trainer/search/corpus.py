"""Documents of a corpus, read as a stream from JSONL, Parquet, or a folder that ``datasets`` saved.

Columns: ``docid`` (text or integer), ``url``, ``text``, and ``title`` where there is one. Other columns are left out.
Memory stays at one record (one small batch for Parquet and Arrow), however large the corpus is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_fast.errors import InputError
from trace_fast.formats.files import Paths, as_paths, read_records
from trace_fast.formats.limits import Limits

COLUMNS = ("docid", "url", "title", "text")
_FILES = (".jsonl", ".ndjson", ".json", ".parquet")
_COMPRESSED = (".gz", ".zst", ".zstd")
_SHOWN = 60  # characters of a value that a message repeats


@dataclass(frozen=True, slots=True)
class Document:
    """One document. ``title`` is empty where the corpus has none; lines of ``text`` end in ``\\n``."""

    docid: str
    url: str
    title: str
    text: str


def read_corpus(paths: Paths) -> Iterator[Document]:
    """Yields the documents of every path, in order: files (``.gz`` and ``.zst`` too) and folders.

    A folder is one that ``datasets.Dataset.save_to_disk`` wrote, or one of JSONL and Parquet files (by name).

    Raises:
        InputError: names the file and the row (1-based; the line for JSONL) of the first record that is no document,
            or the path that cannot be read.
    """
    for path in as_paths(paths):
        yield from _read_folder(Path(path)) if os.path.isdir(path) else _read_files(path)


def corpus_hash(path: str | os.PathLike[str]) -> str:
    """SHA-256 over the SHA-256 of a corpus file, or of each file right in a corpus folder, by name.

    Raises:
        InputError: the path cannot be read.
    """
    place = Path(path)
    total = hashlib.sha256()
    try:
        for file in sorted(entry for entry in place.iterdir() if entry.is_file()) if place.is_dir() else [place]:
            with file.open("rb") as stream:
                total.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    return total.hexdigest()


def _read_files(paths: Paths) -> Iterator[Document]:
    for record in read_records(paths, Limits(), lambda key: key in COLUMNS):
        if record.error is not None:
            raise InputError(f"{record.source}: {record.error.reason}")
        yield document_of(record.value, record.source)


def _read_folder(folder: Path) -> Iterator[Document]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if (entry / "state.json").is_file())
        raise InputError(f"{folder}: holds several splits; name one of them: {', '.join(splits)}")
    if (folder / "state.json").is_file():
        yield from _read_dataset(folder)
        return
    files = sorted(str(entry) for entry in folder.iterdir() if entry.is_file() and _is_corpus_file(entry))
    if not files:
        raise InputError(f"{folder}: expected a saved dataset, or {', '.join(_FILES)} files, got neither")
    yield from _read_files(files)


def _is_corpus_file(path: Path) -> bool:
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED]
    return bool(suffixes) and suffixes[-1] in _FILES


def _read_dataset(folder: Path) -> Iterator[Document]:
    import datasets
    import pyarrow as pa

    try:
        rows = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise InputError(f"{folder}: cannot be read as a saved dataset: {error}") from error
    missing = [name for name in COLUMNS if name != "title" and name not in rows.column_names]
    if missing:
        raise InputError(f"{folder}: column {missing[0]!r} is missing; got {', '.join(rows.column_names)}")
    kept = rows.select_columns([name for name in COLUMNS if name in rows.column_names])
    for number, row in enumerate(kept, start=1):
        yield document_of(row, f"{folder}:{number}")


def document_of(record: Any, source: str) -> Document:
    """The document of one record.

    Raises:
        InputError: names ``source``, the column, what was expected and what came.
    """
    if not isinstance(record, Mapping):
        raise InputError(f"{source}: expected an object with {', '.join(COLUMNS)}, got {type(record).__name__}")
    docid = record.get("docid")
    if isinstance(docid, int) and not isinstance(docid, bool):
        docid = str(docid)
    if not isinstance(docid, str) or not docid:
        raise InputError(f"{source}: docid: expected text or an integer, got {_shown(docid)}")
    texts: dict[str, str] = {}
    for column in COLUMNS[1:]:
        value = record.get(column)
        if value is None and column == "title":
            value = ""
        if not isinstance(value, str):
            raise InputError(f"{source}: {column}: expected text, got {_shown(value)}")
        texts[column] = value
    return Document(docid, **texts)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
