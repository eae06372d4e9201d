"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
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


def sync_folder(folder: Path) -> None:
    """Makes a new or renamed entry of the folder durable. Raises ``OSError``."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
