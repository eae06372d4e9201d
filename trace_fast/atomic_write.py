"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, text: str, *, locked: bool = False) -> None:
    """Writes UTF-8 text durably: afterwards ``path`` has its old content or the new, never a part of it.

    Args:
        locked: the caller holds a lock that keeps other writers of ``path`` away. The temporary file beside it then
            has one fixed name, so that what a kill leaves is replaced by the next run.

    Raises:
        OSError: it cannot be written; what was at ``path`` before is still there and nothing else is left.
    """
    temporary = path.with_name(f".{path.name}.new" if locked else f".{path.name}.{secrets.token_hex(6)}.new")
    try:
        with temporary.open("w" if locked else "x", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """The name of a file to write in the block, which becomes ``path`` at its end; it has the same suffixes.

    Raises:
        OSError: it cannot be written; what was at ``path`` before is still there, also after an error in the block.
    """
    temporary = path.with_name(f".{secrets.token_hex(6)}.{path.name}")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """The name of a folder to make and fill in the block, which becomes ``path`` at its end, with all it holds durable.

    Raises:
        OSError: it cannot be written; the folder that was at ``path`` before is still there, also after an error in the
            block.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.new")
    old = temporary.with_suffix(".old")
    try:
        yield temporary
        for inner in [*temporary.rglob("*"), temporary]:
            sync_folder(inner) if inner.is_dir() else _sync(inner)
        if path.exists():
            path.rename(old)
        try:
            temporary.rename(path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Makes a new or renamed entry of the folder durable. Raises ``OSError``."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
