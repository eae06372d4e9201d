"""Score files, appended a pack at a time, so that a run killed at any moment can be resumed.

Three files belong to a run that writes ``NAME.jsonl``:

- ``NAME.jsonl``: one score record a line, in input order;
- ``NAME.errors.jsonl``: one error record a line, in input order;
- ``NAME.run.json``: what the numbers depend on (settings, inputs, reference, version), written atomically first.

Order of writing, and why recovery is right: each batch goes to the errors file first (one write, flush, fsync), then to
the score file (the same). A record's ``source`` stands in at most one of the files and at most once, and records are
written in input order, so after a kill each file is a prefix of what an uninterrupted run writes, plus at most one torn
line. Resuming cuts the torn line, skips every source found in either file and appends what is missing: the result is
the uninterrupted run's, byte for byte.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from trace_fast.atomic_write import sync_folder, write_atomically
from trace_fast.errors import OutputError
from trace_fast.output import RunDescription, numbered_lines, parse_object

STDOUT = "-"


def run_files(path: Path) -> tuple[Path, Path, Path]:
    """The files of the run that writes ``path``: scores, errors, description."""
    return path, path.with_suffix(".errors.jsonl"), path.with_suffix(".run.json")


class ScoreWriter:
    """Appends records to one run's files, a batch at a time, durably (see the module's docstring for the order).

    A context manager that closes the files. ``done`` holds the sources that earlier runs have written; ``n_scored``
    and ``n_failed`` count the records in the files, earlier ones included.

    Args:
        path: ``NAME.jsonl``, or ``"-"`` for standard output (no errors file, no resume, nothing kept).
        resume: continue into existing output. overwrite: replace existing output. Without either, existing output
            is refused.

    Raises:
        OutputError: the name does not end in ``.jsonl``; the folder is missing; output exists; both ``resume`` and
            ``overwrite``; ``resume`` with standard output. Nothing on disk has been changed then.
    """

    def __init__(self, path: str, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = path
        self.resume = resume
        self.overwrite = overwrite
        self.done: frozenset[str] = frozenset()
        self.n_scored = 0
        self.n_failed = 0
        self._scores: _AppendFile | _StandardOutput | None = None
        self._errors: _AppendFile | None = None
        if resume and overwrite:
            raise OutputError("expected one of --resume and --overwrite, got both")
        if self.to_stdout:
            if resume or overwrite:
                raise OutputError("--resume and --overwrite need an output file, got '-' (standard output)")
            return
        target = Path(path)
        if target.suffix != ".jsonl":
            raise OutputError(f"--out: expected a name ending in .jsonl, or '-', got {path!r}")
        _, self.errors_path, self.run_path = run_files(target)
        self._check()

    @property
    def to_stdout(self) -> bool:
        return self.path == STDOUT

    @property
    def files(self) -> tuple[str, ...]:
        """Every file that belongs to the run; none for standard output."""
        return () if self.to_stdout else (self.path, str(self.errors_path), str(self.run_path))

    def _check(self) -> None:
        target = Path(self.path)
        if not target.parent.is_dir():
            raise OutputError(f"{self.path}: the folder {str(target.parent)!r} does not exist")
        for file in (target, self.errors_path, self.run_path):
            if file.exists() and not stat.S_ISREG(file.stat().st_mode):
                raise OutputError(f"{file}: expected a regular file, got something else; '-' writes to standard output")
        if not self.resume and not self.overwrite:
            for file in (target, self.errors_path):
                if _size(file):
                    raise OutputError(
                        f"{file} exists and is not empty; continue it with --resume, replace it with --overwrite, or "
                        "give another --out"
                    )

    def begin(self, run: RunDescription) -> None:
        """Locks and opens the files, recovers what an earlier run left, and writes ``NAME.run.json``.

        Raises:
            OutputError: another process writes there; ``resume`` into output of other settings, inputs, reference or
                version (the first difference is named); damaged output; the disk's own errors.
        """
        if self.to_stdout:
            self._scores = _StandardOutput()
            return
        try:
            self._scores = _AppendFile(Path(self.path))
            self._scores.lock()
            self._check()  # again under the lock: another run may have written since
            if self.overwrite:
                self._scores.truncate(0)
                self.errors_path.unlink(missing_ok=True)
            if _size(Path(self.path)) or _size(self.errors_path):
                self._recover(run)
            else:
                text = json.dumps(run.to_json(), indent=2, allow_nan=False) + "\n"
                write_atomically(self.run_path, text, locked=True)
        except OSError as error:
            self.close()
            raise OutputError(f"{error.filename or self.path}: cannot be written: {error.strerror}") from error
        except OutputError:
            self.close()
            raise

    def _recover(self, run: RunDescription) -> None:
        try:
            earlier = json.loads(self.run_path.read_bytes())
        except FileNotFoundError as error:
            raise OutputError(
                f"{self.path}: cannot resume without {self.run_path}, which says how its records were made"
            ) from error
        except (ValueError, RecursionError) as error:
            raise OutputError(f"{self.run_path}: expected JSON, got something else ({error})") from error
        difference = run.first_difference(earlier)
        if difference is not None:
            raise OutputError(
                f"{self.path}: refusing to resume: {difference}. Give what it was started with, another --out, or "
                "--overwrite"
            )
        done: set[str] = set()
        self.n_scored = _recover_lines(Path(self.path), done)
        self.n_failed = _recover_lines(self.errors_path, done)
        self.done = frozenset(done)

    def write(self, scores: Sequence[bytes], errors: Sequence[bytes]) -> None:
        """Appends one batch of encoded records (``encode_record``), errors first; returns when they are on disk.

        Raises:
            OutputError: the disk refused; the files then end with the last whole batch.
        """
        assert self._scores is not None, "begin() first"
        try:
            if errors and not self.to_stdout:
                if self._errors is None:  # no record failed: no file that makes one look
                    self._errors = _AppendFile(self.errors_path)
                self._errors.append(b"".join(errors))
            self.n_failed += len(errors)
            if scores:
                self._scores.append(b"".join(scores))
            self.n_scored += len(scores)
        except OSError as error:
            where = "standard output" if self.to_stdout else error.filename or self.path
            raise OutputError(f"{where}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        for file in (self._errors, self._scores):
            if file is not None:
                file.close()
        self._errors = self._scores = None

    def __enter__(self) -> ScoreWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _AppendFile:
    """A file that grows by whole batches: one write, fsync; a batch that does not fit is taken back."""

    def __init__(self, path: Path) -> None:
        created = not path.exists()
        self.path = path
        self._stream: IO[bytes] = path.open("ab", buffering=0)
        if created:
            sync_folder(path.parent)

    def lock(self) -> None:
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(f"{self.path}: another process is writing into it") from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            print(
                f"note: {self.path}: this file system has no locks; make sure that no other run writes into it",
                file=sys.stderr,
            )

    def append(self, data: bytes) -> None:
        start = os.fstat(self._stream.fileno()).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[self._stream.write(view) :]
            os.fsync(self._stream.fileno())
        except OSError as error:
            error.filename = str(self.path)
            self.truncate(start)
            raise

    def truncate(self, size: int) -> None:
        self._stream.truncate(size)
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()


class _StandardOutput:
    """Standard output with the same interface; a pipe has nothing to fsync."""

    def append(self, data: bytes) -> None:
        sys.stdout.flush()
        try:
            handle = sys.stdout.fileno()
        except io.UnsupportedOperation:  # an embedding program gave a stream of its own
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            return
        view = memoryview(data)  # past Python's buffer, whose rest would be written again at exit when this fails
        while view:
            view = view[os.write(handle, view) :]

    def close(self) -> None:
        return


def _recover_lines(path: Path, done: set[str]) -> int:
    """Cuts a torn last line, adds every line's source to ``done`` and returns the number of records."""
    if not path.exists():
        return 0
    count = end = 0
    repair: bytes | None = None
    for number, line, last in numbered_lines(path):
        record = parse_object(line)
        torn = last and not line.endswith(b"\n")
        if record is None and torn:
            repair = b""
            break
        if record is None or not isinstance(record.get("source"), str):
            raise OutputError(
                f"{path}:{number}: expected a record of an earlier run, got a damaged line; remove it and all lines "
                "after it to resume, or give another --out"
            )
        if record["source"] in done:
            raise OutputError(f"{path}:{number}: {record['source']} stands in the output twice; it cannot be resumed")
        done.add(record["source"])
        count, end = count + 1, end + len(line)
        if torn:  # complete but for its newline
            repair = b"\n"
    if repair is not None:
        with path.open("r+b") as stream:
            stream.truncate(end)
            stream.seek(end)
            stream.write(repair)
            stream.flush()
            os.fsync(stream.fileno())
    return count


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
