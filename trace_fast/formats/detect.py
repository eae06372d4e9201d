"""Which form a record has; the forms and the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trace_fast.errors import ConfigError, RolloutError
from trace_fast.formats.body import Parsed
from trace_fast.formats.chatml import START, has_call, import_chatml, is_result
from trace_fast.formats.completion import import_completion
from trace_fast.formats.fields import ANSWER_PATHS, MESSAGE_PATHS, REWARD_PATHS, FieldKeys, find, shown_keys
from trace_fast.formats.limits import Limits
from trace_fast.formats.messages import import_messages
from trace_fast.formats.react import has_react, import_react, is_observation
from trace_fast.formats.responses import import_responses, is_item
from trace_fast.formats.search_r1 import has_tags, import_search_r1
from trace_fast.formats.segments import import_segments
from trace_fast.formats.text_fields import TEXT_PATHS, text_of_record
from trace_fast.formats.tokens import KEYS as TOKEN_KEYS
from trace_fast.formats.tokens import import_tokens

Importer = Callable[[Mapping[str, Any], FieldKeys, Limits], Parsed]

IMPORTERS: Mapping[str, Importer] = {
    "tokens": import_tokens,
    "segments": import_segments,
    "responses": import_responses,
    "completion": import_completion,
    "messages": import_messages,
    "chatml": import_chatml,
    "search_r1": import_search_r1,
    "react": import_react,
}
FORMATS = ("auto", *IMPORTERS)

_RECORD_KEYS = frozenset(
    {
        *TEXT_PATHS, *MESSAGE_PATHS, *TOKEN_KEYS, *(path.split(".")[0] for path in ANSWER_PATHS), *REWARD_PATHS,
        "id", "group", "answer_ids", "prompt", "question", "input", "segments", "tools", "functions", "extra",
        "metadata", "task_id", "data_source", "responses_create_params",
    }
)  # fmt: skip


def check_format(name: str) -> None:
    """Raises ``ConfigError`` listing the names when ``name`` is no format."""
    if name not in FORMATS:
        raise ConfigError(f"format: expected one of {', '.join(FORMATS)}, got {name!r}")


def record_key_test(keys: FieldKeys) -> Callable[[str], bool]:
    """A test whether a key is one that records have (a dict whose keys are not is a dict of records)."""
    names = ("id", "group", "answer", "reward", "messages")
    own = {path.split(".")[0] for name in names if (path := keys.given(name)) is not None}
    return lambda key: key in _RECORD_KEYS or key in own


def what_format(record: Mapping[str, Any], keys: FieldKeys = FieldKeys()) -> str:  # noqa: B008 - frozen
    """The name of the form of a record.

    Order: ``input_ids`` → tokens; ``segments`` → segments; Responses API items → responses; ``prompt`` with
    ``completion`` messages → completion; a list of messages → chatml or react when its tool traffic is text of that
    kind and none of it is structured, else messages; one string → chatml, search_r1 or react by its tags.

    Raises:
        RolloutError: kind ``inexact`` for decoded-text dumps (verl), ``format`` when nothing matches.
    """
    if "input_ids" in record:
        return "tokens"
    if "segments" in record:
        return "segments"
    response = record.get("response")
    if isinstance(record.get("responses_create_params"), Mapping) or (
        isinstance(response, Mapping) and isinstance(response.get("output"), list)
    ):
        return "responses"
    output = record.get("output")
    if isinstance(output, list) and output and any(is_item(item) for item in output):
        return "responses"
    if isinstance(record.get("completion"), list) and "prompt" in record:
        return "completion"
    _refuse_decoded_dump(record)
    found = find(record, keys, "messages", ())
    candidates = [found[1]] if found is not None else [record.get(path) for path in MESSAGE_PATHS]
    for value in candidates:
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            return _chat_format(value)
    for name, matches in (("chatml", lambda text: START in text), ("search_r1", has_tags), ("react", has_react)):
        if text_of_record(record, keys, matches) is not None:
            return name
    raise RolloutError(
        "format",
        f"expected one of the forms {', '.join(IMPORTERS)}, got a record that is none of them (keys: "
        f"{shown_keys(record)}); name the place of its messages with --messages-key, or the form with --format",
    )


def _refuse_decoded_dump(record: Mapping[str, Any]) -> None:
    decoded = isinstance(record.get("input"), str) and isinstance(record.get("output"), str)
    if decoded and ("gts" in record or "score" in record):
        raise RolloutError(
            "inexact",
            "input and output are decoded text (a verl rollout dump): the token ids that the policy saw are lost and "
            "encoding the text again can give others, so exact scoring is impossible. Dump the prompt and response "
            "ids with the response mask and write them in tokens form (input_ids, boundaries, loss_mask, answer)",
        )


def _chat_format(messages: list[Any]) -> str:
    acted = called = answered = observed = False
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
            if not (role == "tool" and isinstance(content, str) and is_result(content)):
                return "messages"
            answered = True
        elif isinstance(content, str):
            if role == "assistant":
                acted = True
                called = called or has_call(content)
            elif role == "user" and acted:
                answered = answered or is_result(content)
                observed = observed or is_observation(content)
    if called or answered:
        return "chatml"
    return "react" if observed else "messages"
