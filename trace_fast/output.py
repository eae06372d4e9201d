"""Score records and what their numbers depend on; the files are ``trace_fast.score_writer``'s."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trace_fast.errors import InputError, RolloutError
from trace_fast.rollout_score import RolloutScore

if TYPE_CHECKING:
    from trace_fast.credit import TurnCredit


# --- records ------------------------------------------------------------------------------------------------------


def score_record(score: RolloutScore, credit: TurnCredit) -> dict[str, Any]:
    """The score record of one rollout, of plain JSON types.

    Keys: ``id``, ``source``, ``group``, ``n_turns``, ``boundaries`` (S), ``answer`` (text of the reported alias, or
    null when answers came as ids), ``answer_ids``, ``alias`` (S, index of the alias used at each state),
    ``mean_logprobs`` (S, nats), ``values`` (S), ``deltas`` (S-1), ``turn_rewards`` (T), ``reward``,
    ``outcome_advantage`` (null without a reward), ``secured_at`` (state index or null), ``trunk_logprobs`` (N-1, nats;
    only when they were asked for), ``extra``, ``model`` (``name@hash``), ``status`` = ``"ok"``.
    """
    assert (score.id, score.group) == (credit.id, credit.group), (score.id, credit.id)
    record: dict[str, Any] = {
        "id": score.id,
        "source": score.source,
        "group": score.group,
        "n_turns": int(score.n_turns),
        "boundaries": [int(b) for b in score.boundaries],
        "answer": score.answer,
        "answer_ids": [int(i) for i in score.answer_ids],
        "alias": [int(a) for a in score.alias],
        "mean_logprobs": [float(v) for v in score.mean_logprobs],
        "values": [float(v) for v in credit.values],
        "deltas": [float(v) for v in credit.deltas],
        "turn_rewards": [float(v) for v in credit.rewards],
        "reward": None if score.reward is None else float(score.reward),
        "outcome_advantage": None if credit.outcome_advantage is None else float(credit.outcome_advantage),
        "secured_at": None if credit.secured_at is None else int(credit.secured_at),
    }
    if score.trunk_logprobs is not None:
        record["trunk_logprobs"] = shortest_float32(score.trunk_logprobs)
    return record | {"extra": score.extra, "model": score.model, "status": "ok"}


def shortest_float32(values: Iterable[np.float32]) -> list[float]:
    """The shortest decimals that are the same float32s: half the bytes of their float64 expansions, nothing lost."""
    return [float(str(value)) for value in values]


def encode_record(record: Mapping[str, Any]) -> bytes:
    """One line of JSON with its newline; pure printable ASCII, so that it can be shown on any terminal.

    Raises:
        RolloutError: kind ``format`` when the record holds something that JSON cannot (NaN or infinity in ``extra``).
    """
    try:
        text = json.dumps(record, allow_nan=False, ensure_ascii=True)
    except (ValueError, TypeError, RecursionError) as error:
        raise RolloutError(
            "format",
            f"expected a record of finite JSON values, got one that JSON cannot hold ({error})",
            rollout_id=str(record.get("id", "?")),
            source=str(record.get("source", "<memory>")),
        ) from error
    return text.replace("\x7f", "\\u007f").encode("ascii") + b"\n"


def read_score_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The score records of a file, in order; a torn last line (a run was killed, or still writes) ends the iteration.

    Raises:
        InputError: the file cannot be read, or a line before the last is not a score record.
    """
    for number, line, last in numbered_lines(Path(path)):
        record = parse_object(line)
        if record is None and last and not line.endswith(b"\n"):
            return
        if record is None or record.get("status") != "ok" or "mean_logprobs" not in record:
            raise InputError(f"{os.fspath(path)}:{number}: expected a score record, got something else")
        yield record


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """(1-based number, line, whether it is the last) of a file's lines, in constant memory.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            previous: bytes | None = None
            number = 0
            for line in stream:
                if previous is not None:
                    yield number, previous, False
                previous, number = line, number + 1
            if previous is not None:
                yield number, previous, True
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def parse_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line, or ``None`` when it holds anything else (also a torn one)."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, no UTF-8, or nested too deep: not a record, the caller judges
        return None
    return value if isinstance(value, dict) else None


# --- what a run's numbers depend on -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunInput:
    """An input file by name and content; ``path`` is as given by the user, because records' sources start with it."""

    path: str
    size: int
    sha256: str

    @classmethod
    def of(cls, path: str, file: str | os.PathLike[str] | None = None) -> RunInput:
        """Reads ``file`` (default: ``path``) once. Raises ``InputError`` when that fails."""
        try:
            with open(path if file is None else file, "rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                return cls(path, stream.tell(), digest)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class RunDescription:
    """Everything that a run's numbers depend on; a run only resumes into output of an equal description."""

    version: str
    reference: str
    inputs: tuple[RunInput, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        inputs = [{"path": i.path, "bytes": i.size, "sha256": i.sha256} for i in self.inputs]
        return {
            "version": self.version,
            "reference": self.reference,
            "inputs": inputs,
            "settings": dict(self.settings),
        }

    def first_difference(self, earlier: Mapping[str, Any]) -> str | None:
        """Words for the first thing in which the ``earlier`` description (JSON) differs from this one."""
        then, now = _flatten(earlier), _flatten(json.loads(json.dumps(self.to_json())))
        for key in [*now, *(k for k in then if k not in now)]:
            if key not in then or key not in now or then[key] != now[key]:
                return f"{key} was {_shown(then, key)} and is {_shown(now, key)} now"
        return None


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested JSON as dotted keys: {"inputs.0.path": ..., "settings.dtype": ...}."""
    if isinstance(value, Mapping):
        items = [(str(k), v) for k, v in value.items()]
    elif isinstance(value, list):
        items = [(str(i), v) for i, v in enumerate(value)]
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else key)
    return flat


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return json.dumps(flat[key]) if key in flat else "absent"
