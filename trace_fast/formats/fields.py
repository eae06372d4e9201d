"""Id, group, gold answer, reward and the unknown rest of a record, wherever its format keeps them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trace_fast.errors import RolloutError
from trace_fast.formats.strict_json import LiteralFloat

ANSWER_PATHS = (
    "answer", "answers", "golden", "golden_answers", "gold", "gt", "expected_answer", "ground_truth", "info.answer",
    "info.task.outputs", "reward_model.ground_truth",
)  # fmt: skip
REQUIRED_OUTPUTS = "info.task.outputs"  # tau-bench: strings that must all be stated, not spellings of one
REWARD_PATHS = ("reward", "score", "correct")
MESSAGE_PATHS = ("messages", "traj", "trajectory", "conversation", "conversations", "history")

MAX_REWARD = 1e30  # magnitude; sums of squares over a group of such rewards are far from overflow in float64

NOTE_NESTED_ALIASES = "nested lists of gold answers read as accepted spellings"
NOTE_REQUIRED_OUTPUTS = "required outputs joined with ', ' into one gold answer"


@dataclass(frozen=True, slots=True)
class FieldKeys:
    """Where the fields sit in a record; dotted paths reach into objects (``info.task.id``) and lists (``a.0``).

    None means the usual places of each format. A path, also one that is among the usual places, is looked at alone
    and must exist in every record.
    """

    id: str | None = None
    group: str | None = None
    answer: str | None = None
    reward: str | None = None
    messages: str | None = None

    def given(self, name: str) -> str | None:
        """The path the user gave for a field, or None for the usual places."""
        path: str | None = getattr(self, name)
        return path


@dataclass(frozen=True, slots=True)
class Answers:
    """Gold answers of one record: ``texts``, or token ``ids`` (then ``texts`` may name them), one entry an alias."""

    texts: tuple[str, ...] | None
    ids: tuple[list[int], ...] | None = None
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Fields:
    """What every form of record has besides its tokens or text."""

    id: str
    group: str
    answers: Answers
    reward: float | None
    consumed: set[str] = field(default_factory=set)


_MISSING: Any = object()


def lookup(record: Any, path: str) -> Any:
    """The value at a dotted path, or ``MISSING``; a key that contains the dots itself comes first."""
    if isinstance(record, Mapping) and path in record:
        return record[path]
    value = record
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return _MISSING
    return value


def present(value: Any) -> bool:
    """Whether a looked-up value is there; null counts as absent."""
    return value is not _MISSING and value is not None


def first_present(record: Mapping[str, Any], paths: Iterable[str]) -> tuple[str, Any] | None:
    """The first of ``paths`` that has a value, with it."""
    for path in paths:
        value = lookup(record, path)
        if present(value):
            return path, value
    return None


def find(record: Mapping[str, Any], keys: FieldKeys, name: str, usual: Iterable[str]) -> tuple[str, Any] | None:
    """``(path, value)`` of a field by the user's path or the usual ones; None when it has none.

    Raises:
        RolloutError: the user named a path that this record lacks (kind ``answer`` for the answer, else ``format``).
    """
    path = keys.given(name)
    if path is None:
        return first_present(record, usual)
    value = lookup(record, path)
    if not present(value):
        raise RolloutError(
            "answer" if name == "answer" else "format",
            f"expected the {name} at {path!r} as configured, got a record without it (keys: {shown_keys(record)})",
        )
    return path, value


def shown_keys(record: Mapping[str, Any], limit: int = 12) -> str:
    """The keys of a record for a message, cut where there are many."""
    names = [repr(str(key)[:40]) for key in list(record)[:limit]]
    more = len(record) - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "") if names else "none"


def name_of(value: Any, what: str) -> str:
    """An id or group as text; raises ``RolloutError`` (format) when it is neither text nor an integer."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise RolloutError("format", f"{what}: expected a non-empty string or an integer, got {describe(value)}")


def rollout_id(record: Mapping[str, Any], keys: FieldKeys, source: str, key: str | None, *, numbered: bool) -> str:
    """The rollout's id: the record's, its key in a dict of records, or its place in the file.

    ``numbered``: the form's integer ``id`` counts examples, several rollouts share it (verifiers); it names none.
    """
    found = find(record, keys, "id", ("id",))
    if found is not None and not (numbered and keys.given("id") is None and isinstance(found[1], int)):
        return name_of(found[1], found[0])
    return key or source


def rollout_group(record: Mapping[str, Any], keys: FieldKeys, own_id: str) -> str:
    """The group: the record's, else the rollout alone."""
    found = find(record, keys, "group", ("group",))
    return own_id if found is None else name_of(found[1], found[0])


def read_reward(record: Mapping[str, Any], keys: FieldKeys) -> float | None:
    """The outcome R, of magnitude up to ``MAX_REWARD``, with true and false as 1 and 0; None when none is recorded.

    ``score`` and ``correct`` are looked at only where they are numbers or booleans: both names are also used for
    breakdowns.

    Raises:
        RolloutError: kind ``format`` when it is no number, NaN, or so large that a group's statistics could overflow.
    """
    found = find(record, keys, "reward", REWARD_PATHS[:1])
    if found is None and keys.given("reward") is None:
        others = ((path, lookup(record, path)) for path in REWARD_PATHS[1:])
        found = next((pair for pair in others if isinstance(pair[1], int | float)), None)
    if found is None:
        return None
    path, value = found
    if not isinstance(value, int | float):
        raise RolloutError("format", f"{path}: expected a number or true/false, got {describe(value)}")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not abs(reward) <= MAX_REWARD:  # NaN fails every comparison
        raise RolloutError(
            "format", f"{path}: expected a finite number of magnitude up to {MAX_REWARD:g}, got {describe(value)}"
        )
    return reward


def read_answers(record: Mapping[str, Any], keys: FieldKeys) -> tuple[Answers, set[str]]:
    """Gold answers and the top-level keys they came from.

    A list holds accepted spellings of one answer (aliases); lists within it are flattened into it, with a note.
    tau-bench's ``info.task.outputs`` are strings that must all be stated: they are joined with ``", "`` into one
    answer, with a note. Numbers are scored as the file spells them. White space around an answer is dropped, the
    rest (a no-break space within) stays. ``answer_ids`` win over text, which then only names them.

    Raises:
        RolloutError: kind ``answer`` when there is none, or one is empty or no text; ``format`` for bad ids.
    """
    consumed: set[str] = set()
    found = find(record, keys, "answer", ANSWER_PATHS)
    ids_value = record.get("answer_ids")
    texts: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    if found is not None:
        path, value = found
        consumed.add(path)
        texts, notes = _texts(value, path)
    if ids_value is not None:
        consumed.add("answer_ids")
        ids = _answer_ids(ids_value)
        if texts is not None and len(texts) != len(ids):
            raise RolloutError(
                "format", f"answer_ids: expected one list an answer ({len(texts)}), got {len(ids)} lists of ids"
            )
        return Answers(texts, ids, notes), consumed
    if texts is None:
        raise RolloutError(
            "answer",
            f"expected a gold answer at one of {', '.join(ANSWER_PATHS)} or answer_ids, got a record without "
            f"(keys: {shown_keys(record)}); name its place with --answer-key",
        )
    return Answers(texts, None, notes), consumed


def _texts(value: Any, path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if path == "reward_model.ground_truth" and isinstance(value, Mapping):
        value = value.get("target", value)
    if not isinstance(value, list):
        return (_one_text(value, path),), ()
    notes: tuple[str, ...] = ()
    flat: list[Any] = []
    for item in value:
        if isinstance(item, list):
            notes = (NOTE_NESTED_ALIASES,)
            flat.extend(item)
        else:
            flat.append(item)
    if not flat:
        raise RolloutError("answer", f"{path}: expected at least one gold answer, got an empty list")
    if len(flat) == 1:
        return (_one_text(flat[0], path),), notes
    texts = [_one_text(item, f"{path}[{i}]") for i, item in enumerate(flat)]
    if path == REQUIRED_OUTPUTS:
        return (", ".join(texts),), (*notes, NOTE_REQUIRED_OUTPUTS)
    return tuple(dict.fromkeys(texts)), notes


def _one_text(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, LiteralFloat):
        return value.literal
    if isinstance(value, float) and not math.isfinite(value):  # Parquet has them, and the text "nan" is no answer
        raise RolloutError("answer", f"{where}: expected text or a finite number, got {value}")
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str):
        raise RolloutError("answer", f"{where}: expected text, a number or a list of them, got {describe(value)}")
    text = value.strip()
    if not text:
        raise RolloutError("answer", f"{where}: the gold answer is empty; an empty answer has no log-probability")
    return text


def _answer_ids(value: Any) -> tuple[list[int], ...]:
    if not isinstance(value, list) or not value:
        raise RolloutError("answer", f"answer_ids: expected a non-empty list of token ids, got {describe(value)}")
    lists = value if isinstance(value[0], list) else [value]
    for i, ids in enumerate(lists):
        token_ids(ids, "answer_ids" if lists is not value else f"answer_ids[{i}]")
        if not ids:
            raise RolloutError("answer", f"answer_ids[{i}]: the gold answer is empty")
    return tuple(lists)


def token_ids(value: Any, name: str) -> list[int]:
    """The list itself when it holds token ids (integers in 0..2^63-1, no booleans); else ``RolloutError`` (format)."""
    if not isinstance(value, list):
        raise RolloutError("format", f"{name}: expected a list of token ids, got {describe(value)}")
    bad = next((i for i, v in enumerate(value) if type(v) is not int or not 0 <= v < 2**63), None)
    if bad is not None:
        raise RolloutError(
            "format", f"{name}[{bad}]: expected a token id (an integer >= 0), got {describe(value[bad])}"
        )
    return value


def describe(value: Any) -> str:
    """A value for a message: its type, and itself where it is short."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return f"an object with keys {shown_keys(value, 6)}"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"a string of {len(value)} characters"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 100:
        return "an integer of more than 100 bits"
    return f"{type(value).__name__.removeprefix('Literal').lower()} {value!r}"


def extra_fields(record: Mapping[str, Any], consumed: set[str]) -> dict[str, Any]:
    """The keys nothing read, as plain JSON values; an ``extra`` object (as this project writes it) is spread out."""
    rest = {key: value for key, value in record.items() if key not in consumed and key != "extra"}
    kept = record.get("extra")
    if isinstance(kept, Mapping):
        rest = {**kept, **rest}
    elif kept is not None:
        rest["extra"] = kept
    plain: dict[str, Any] = _plain(rest)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float):  # drops the remembered spelling; NaN (possible in Parquet) is no JSON
        return float(value) if math.isfinite(value) else None
    return value
