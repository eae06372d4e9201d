"""The files that a command reads, read as often as the command needs (stdin through a temporary file)."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from trace_fast.credit import group_outcome_advantages
from trace_fast.errors import ConfigError, InputError, RolloutError
from trace_fast.formats import FieldKeys, read_outcomes, read_rollouts, read_transcripts
from trace_fast.output import RunInput
from trace_fast.rollout import Rollout, Segment

STDIN = "-"
STDIN_NAME = "stdin"  # as the readers name it in sources


class _Spool:
    """Standard input, copied once to a file that is gone with this object, so that it can be read again."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def path(self) -> str:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="trace-fast-")
            with open(os.path.join(self._folder.name, "stdin"), "wb") as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy, 1 << 20)
        return os.path.join(self._folder.name, "stdin")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Input files with how to read them.

    Args:
        paths: as the user gave them; ``"-"`` is standard input. Sources of records start with them.
        format: name of the format, or ``"auto"``.
        id_key, group_key, answer_key, reward_key, messages_key: dotted paths of the user, ``None`` for the
            format's usual places.
    """

    paths: tuple[str, ...]
    format: str = "auto"
    id_key: str | None = None
    group_key: str | None = None
    answer_key: str | None = None
    reward_key: str | None = None
    messages_key: str | None = None
    _spool: _Spool = field(default_factory=_Spool, compare=False, repr=False)

    def settings(self) -> dict[str, Any]:
        """What of this changes numbers besides the files' content, as plain JSON."""
        keys = ("format", "id_key", "group_key", "answer_key", "reward_key", "messages_key")
        return {key: getattr(self, key) for key in keys}

    def keys(self) -> FieldKeys:
        return FieldKeys(
            id=self.id_key,
            group=self.group_key,
            answer=self.answer_key,
            reward=self.reward_key,
            messages=self.messages_key,
        )

    def check(self, *outputs: str | None) -> None:
        """Before any work: every file is there, none is named twice, none is an output.

        Raises:
            InputError: a file is missing or is not a regular file.
            ConfigError: a file is given twice, or is one of the ``outputs``.
        """
        written = {os.path.realpath(output) for output in outputs if output is not None}
        seen: dict[str, str] = {}
        for path in self.paths:
            if path == STDIN:
                places = [STDIN_NAME]
            elif not os.path.exists(path):
                raise InputError(f"{path}: there is no such file")
            elif not os.path.isfile(path):
                raise InputError(f"{path}: expected a regular file, got something else; a stream can be piped into '-'")
            else:
                places = [path, os.path.realpath(path)]  # records are told apart by the path as given
            earlier = next((seen[place] for place in places if place in seen), None)
            if earlier is not None:
                raise ConfigError(f"{path} is given twice" + (f" (as {earlier} before)" if earlier != path else ""))
            seen |= dict.fromkeys(places, path)
            if places[-1] in written:
                raise ConfigError(f"{path} is both input and output")

    def describe(self) -> tuple[RunInput, ...]:
        """Names and contents, for ``NAME.run.json``. Reads every file once."""
        return tuple(RunInput.of(shown, actual) for shown, actual in self._files())

    def rollouts(
        self,
        tokenizer: Any,
        *,
        opener: str,
        errors: Callable[[RolloutError], None],
        unreadable: Callable[[InputError], None],
    ) -> Iterator[Rollout]:
        """Every rollout in order. A failed record goes to ``errors``; a file that breaks off goes to ``unreadable``
        after its good records, and the next file follows."""
        for shown, actual in self._files():
            naming = _Naming(shown, actual)
            reading = read_rollouts(
                actual,
                tokenizer,
                format=self.format,
                opener=opener,
                keys=self.keys(),
                errors=lambda error, naming=naming: errors(naming.error(error)),  # type: ignore[misc]
            )
            try:
                for rollout in reading:
                    yield naming.rollout(rollout)
            except InputError as error:
                unreadable(InputError(naming.text(str(error))))

    def outcome_advantages(self, std: Literal["population", "sample"]) -> dict[str, float | None]:
        """A_out of every record by source, from all rewards of its group in all files; ``None`` without a reward.

        A first pass without tokenizer, because output is streamed and A_out needs whole groups. Records and files
        that cannot be read are passed over here: the scoring pass reports them.
        """
        sources: list[str] = []
        groups: list[str] = []
        rewards: list[float | None] = []
        for shown, actual in self._files():
            naming = _Naming(shown, actual)
            try:
                for source, _, group, reward in read_outcomes(actual, keys=self.keys(), format=self.format):
                    sources.append(naming.source(source))
                    groups.append(naming.name(group, source))
                    rewards.append(reward)
            except InputError:
                continue  # reported with its place by rollouts()
        return dict(zip(sources, group_outcome_advantages(rewards, groups, std), strict=True))

    def transcripts(self, unreadable: Callable[[InputError], None]) -> Iterator[tuple[str, str, tuple[Segment, ...]]]:
        """(source, id, transcript) of every record that has one, in order; broken files as in ``rollouts``."""
        for shown, actual in self._files():
            naming = _Naming(shown, actual)
            try:
                for source, rollout_id, segments in read_transcripts(actual, keys=self.keys(), format=self.format):
                    yield naming.source(source), naming.name(rollout_id, source), segments
            except InputError as error:
                unreadable(InputError(naming.text(str(error))))

    def _files(self) -> Iterator[tuple[str, str]]:
        """(name in sources, file to open)."""
        for path in self.paths:
            if path == STDIN:
                yield STDIN_NAME, self._spool.path()
            else:
                yield path, path


@dataclass(frozen=True, slots=True)
class _Naming:
    """Puts a file's own name (``stdin``) where the reader saw the temporary copy's."""

    shown: str
    actual: str

    def text(self, text: str) -> str:
        return text if self.shown == self.actual else text.replace(self.actual, self.shown)

    def source(self, source: str) -> str:
        if self.shown == self.actual or not source.startswith(self.actual):
            return source
        return self.shown + source[len(self.actual) :]

    def name(self, name: str, source: str) -> str:
        """An id or group, which defaults to the source and else is the record's own."""
        return self.source(source) if name == source else name

    def rollout(self, rollout: Rollout) -> Rollout:
        if self.shown == self.actual:
            return rollout
        own = rollout.source
        return dataclasses.replace(
            rollout,
            id=self.name(rollout.id, own),
            group=self.name(rollout.group, own),
            source=self.source(own),
        )

    def error(self, error: RolloutError) -> RolloutError:
        if self.shown == self.actual:
            return error
        return error.at(rollout_id=self.name(error.rollout_id, error.source), source=self.source(error.source))
