"""Records whose rollout is one string: where that string sits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trace_fast.formats.fields import MESSAGE_PATHS, FieldKeys, find

TEXT_PATHS = (
    *("full_output", "output", "response", "generation", "text", "chatml", "completion", "rollout"),
    *MESSAGE_PATHS,
)
QUESTION_PATHS = ("prompt", "question", "query")


def text_of_record(
    record: Mapping[str, Any], keys: FieldKeys, matches: Callable[[str], bool]
) -> tuple[str, str] | None:
    """``(path, text)`` of the first string that ``matches``, by the user's path (which then must match) or the usual
    ones; None when there is none."""
    found = find(record, keys, "messages", ())
    if found is not None:
        path, value = found
        return (path, value) if isinstance(value, str) and matches(value) else None
    for path in TEXT_PATHS:
        value = record.get(path)
        if isinstance(value, str) and matches(value):
            return path, value
    return None


def question_of(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """``(key, text)`` of what the policy was asked, where the record has it as text."""
    for key in QUESTION_PATHS:
        value = record.get(key)
        if isinstance(value, str) and value.strip():
            return key, value
    return None
