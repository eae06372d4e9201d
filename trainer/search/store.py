"""Documents by row, read from a memory-mapped file: a corpus larger than memory costs the pages that are looked at.

Files of a store: ``documents.jsonl`` (one record a line, in row order) and ``offsets.npy`` (``(N+1,) int64``, where
each line begins; the last entry is the file's size). Any number of threads may read.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from trace_fast.errors import InputError
from trace_fast.trainer.search.corpus import Document

TEXTS, OFFSETS = "documents.jsonl", "offsets.npy"


class DocumentStore(Sequence[Document]):
    """The documents of a folder that ``write`` made. Rows are 0..N-1; there is no row -1.

    Raises:
        InputError: the folder holds no store, or one whose two files do not belong together.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder)
        try:
            self._offsets = np.load(path / OFFSETS, mmap_mode="r", allow_pickle=False)
            with (path / TEXTS).open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                self._texts = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: expected a document store ({TEXTS}, {OFFSETS}): {error}") from error
        if self._offsets.ndim != 1 or not len(self._offsets) or int(self._offsets[-1]) != size:
            raise InputError(f"{path}: {OFFSETS} does not belong to {TEXTS} ({size} bytes); build the index again")

    @classmethod
    def write(cls, folder: str | os.PathLike[str], documents: Iterable[Document]) -> DocumentStore:
        """Writes the documents, one at a time, and opens them.

        Raises:
            InputError: no document at all, or a docid that two documents have.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        offsets = [0]
        rows: dict[str, int] = {}
        with (path / TEXTS).open("wb") as stream:
            for row, document in enumerate(documents):
                earlier = rows.setdefault(document.docid, row)
                if earlier != row:
                    raise InputError(f"docid {document.docid!r}: documents {earlier + 1} and {row + 1} both have it")
                values = [document.docid, document.url, document.title, document.text]
                stream.write(json.dumps(values, ensure_ascii=False).encode("utf-8") + b"\n")
                offsets.append(stream.tell())
        if not rows:
            raise InputError(f"{path}: expected at least one document, got none")
        np.save(path / OFFSETS, np.asarray(offsets, dtype=np.int64))
        return cls(path)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, row: int) -> Document: ...
    @overload
    def __getitem__(self, row: slice) -> list[Document]: ...
    def __getitem__(self, row: int | slice) -> Document | list[Document]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        if not 0 <= row < len(self):  # -1 is what an index answers for "nothing found"; it must never be a document
            raise IndexError(f"row {row}: expected 0..{len(self) - 1}")
        return Document(*json.loads(self._texts[int(self._offsets[row]) : int(self._offsets[row + 1])]))

    def __iter__(self) -> Iterator[Document]:
        return (self[row] for row in range(len(self)))
