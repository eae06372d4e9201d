"""What every command shares: safe text for terminals, messages and progress on stderr, signals, exit codes.

Exit codes: 0 all done; 1 done, but some records failed; 2 nothing could be done (usage, missing file, no model);
130 and 143 stopped by Ctrl-C (SIGINT) and SIGTERM.
"""

from __future__ import annotations

import signal
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, TracebackType
from typing import Any, TypeVar

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from trace_fast.errors import ConfigError, TraceFastError

Settings = TypeVar("Settings")

EXIT_DONE, EXIT_SOME_FAILED, EXIT_NOTHING_DONE = 0, 1, 2
PLAIN_PROGRESS_SECONDS = 10.0  # between two progress lines where stderr is not a terminal

# Controls, formats (bidi, zero-width), surrogates, private use, unassigned, line and paragraph separators.
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


# --- text ---------------------------------------------------------------------------------------------------------


def printable(value: object, limit: int | None = None) -> str:
    """``value`` as one line that is safe on any terminal: unsafe characters become visible escapes (``\\x1b``).

    ``limit`` shortens to that many characters before escaping, the last one then being an ellipsis.
    """
    text = str(value)
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(c) if unicodedata.category(c) in _UNSAFE_CATEGORIES else c for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def plural(count: int, noun: str) -> str:
    """``1 record``, ``2 records``, ``12,345 records``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def say(text: str) -> None:
    """One line on stderr; ``text`` may hold data."""
    typer.echo(printable(text), err=True)


# --- progress -----------------------------------------------------------------------------------------------------


class ProgressReporter(AbstractContextManager["ProgressReporter"]):
    """A bar on a terminal, a plain line now and then elsewhere; both on stderr.

    Args:
        verb: what is being done, such as ``"scored"``.
        total: number of records to come.
        clock: seconds, monotonic.
    """

    def __init__(self, verb: str, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._verb, self._total, self._clock = verb, total, clock
        self._done = 0
        self._next_line = clock() + PLAIN_PROGRESS_SECONDS
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressReporter:
        console = Console(stderr=True)
        if console.is_terminal:
            columns = (TextColumn(self._verb), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(self._verb, total=self._total)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        self._done += count
        if self._bar is not None:
            assert self._task is not None
            self._bar.advance(self._task, count)
        elif self._clock() >= self._next_line:
            say(f"{self._verb} {self._done:,} of {plural(self._total, 'record')}")
            self._next_line = self._clock() + PLAIN_PROGRESS_SECONDS

    def say(self, text: str) -> None:
        """A message that does not tear the bar."""
        if self._bar is None:
            say(text)
        else:
            self._bar.console.print(Text(printable(text)), soft_wrap=True)


# --- signals ------------------------------------------------------------------------------------------------------


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived; ``exit_code`` is 128 + the signal's number, as shells have it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum


class Interrupts(AbstractContextManager["Interrupts"]):
    """Turns SIGINT and SIGTERM into ``Interrupted``, held back while output is being written.

    Only the main thread can set signal handlers; elsewhere (embedded use) signals stay as they are.
    """

    def __init__(self) -> None:
        self._holding = False
        self._arrived: int | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for which in (signal.SIGINT, signal.SIGTERM):
                self._previous[which] = signal.signal(which, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for which, handler in self._previous.items():
            signal.signal(which, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._arrived = signum
        if not self._holding:
            raise Interrupted(signum)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal inside the block takes effect when it ends (an error in the block goes first)."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        self.check()

    def check(self) -> None:
        """Raises ``Interrupted`` for a signal that was held back, or whose exception some library swallowed."""
        if self._arrived is not None:
            raise Interrupted(self._arrived)


# --- exit codes ---------------------------------------------------------------------------------------------------


@contextmanager
def command_errors() -> Iterator[Interrupts]:
    """Body of every command: errors for users become one line and exit code 2, signals 130 or 143.

    Anything else is a defect of this program and keeps its traceback.
    """
    try:
        with Interrupts() as interrupts:
            yield interrupts
    except Interrupted as stop:
        say("interrupted")
        raise typer.Exit(stop.exit_code) from stop
    except BrokenPipeError:
        raise  # typer's own: it also silences the flush at exit
    except (TraceFastError, OSError) as error:
        say(f"error: {error}")
        raise typer.Exit(EXIT_NOTHING_DONE) from error


def validated(build: Callable[[], Settings]) -> Settings:
    """``build()`` with pydantic's report of bad settings as one ``ConfigError`` that names each of them."""
    try:
        return build()
    except ValidationError as error:
        problems = [
            f"--{'-'.join(str(part) for part in p['loc']).replace('_', '-')}: {p['msg']}, got {p['input']!r}"
            for p in error.errors()
        ]
        raise ConfigError("; ".join(problems)) from error
