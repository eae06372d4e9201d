"""ChatML whose tool traffic is text: ``<tool_call>`` in assistant messages, ``<tool_response>`` in the answers.

The records are lists of messages, or one string of ``<|im_start|>role ... <|im_end|>`` blocks. The messages are
rendered by the tokenizer's own chat template like any others; only the turn rules look into the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trace_fast.errors import RolloutError
from trace_fast.formats.body import Chat, Parsed, Step
from trace_fast.formats.fields import FieldKeys
from trace_fast.formats.limits import Limits
from trace_fast.formats.messages import clean_messages, messages_of, steps_of, tools_of
from trace_fast.formats.text_fields import text_of_record

START, END = "<|im_start|>", "<|im_end|>"
NOTE_UNCLOSED = "the last ChatML message is not closed, so it is read as cut off"

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_CALL_NAME = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.){1,200}")')
_BLOCK = re.compile(r"<\|im_start\|>([^\n<]*)\n(.*?)(<\|im_end\|>\n?|(?=<\|im_start\|>)|\Z)", re.DOTALL)


def import_chatml(record: Mapping[str, Any], keys: FieldKeys, limits: Limits) -> Parsed:
    """Messages, or a ChatML string, with tool traffic as text; results may also sit in the user role.

    A user or tool message is an observation when it begins with ``<tool_response>`` and comes after the policy's
    first message. The policy's last message is no answer when it ends in a tool call, or is not closed.
    """
    text = text_of_record(record, keys, lambda value: START in value)
    notes: tuple[str, ...] = ()
    closed = True
    if text is not None:
        path, string = text
        items, closed = split_chatml(string)
        if not closed:
            notes = (NOTE_UNCLOSED,)
    else:
        path, items = messages_of(record, keys)
    messages, more = clean_messages(items, path, limits)
    steps = mark_tool_text(steps_of(messages))
    if not closed and steps and steps[-1].role == "assistant":
        last = steps[-1]
        steps[-1] = Step(last.role, last.text, waits=True, tool=last.tool)
    tools, consumed = tools_of(record, limits)
    return Parsed(Chat(messages, steps, tools, None, (*notes, *more)), frozenset({path, *consumed}))


def split_chatml(text: str) -> tuple[list[dict[str, Any]], bool]:
    """``(messages, closed)`` of a ChatML string; ``closed`` is False when its last block lacks ``<|im_end|>``.

    Raises:
        RolloutError: kind ``format`` for text outside the blocks.
    """
    messages: list[dict[str, Any]] = []
    at = 0
    closed = True
    for match in _BLOCK.finditer(text):
        if text[at : match.start()].strip():
            break
        role, content, end = match.groups()
        messages.append({"role": role.strip(), "content": content})
        at, closed = match.end(), end.startswith(END)
    if not messages or text[at:].strip():
        shown = text[at:].strip()[:60]
        raise RolloutError("format", f"expected ChatML blocks {START}role ... {END}, got {shown!r} outside of them")
    if not closed and messages[-1]["role"] == "assistant" and not messages[-1]["content"].strip():
        messages.pop()  # a generation prompt that nothing was written after
    return messages, closed


def mark_tool_text(steps: list[Step]) -> list[Step]:
    """The steps with tool calls and results in their text recognised."""
    marked: list[Step] = []
    acted = False
    last_tool: str | None = None
    for step in steps:
        if step.role == "assistant":
            acted = True
            calls = _CALL.findall(step.text)
            last_tool = ", ".join(filter(None, map(call_name, calls))) or step.tool
            marked.append(Step(step.role, step.text, waits=step.waits or bool(calls), tool=last_tool))
        elif step.observation or (acted and step.role == "user" and is_result(step.text)):
            marked.append(Step("tool", step.text, observation=True, tool=step.tool or last_tool))
        else:
            marked.append(step)
    return marked


def is_result(text: str) -> bool:
    """Whether a message is a tool result written as text."""
    return text.lstrip().startswith("<tool_response>")


def has_call(text: str) -> bool:
    """Whether an assistant message calls a tool in its text."""
    return "<tool_call>" in text


def call_name(payload: str) -> str | None:
    """Name of the tool in the text of one call; the text may be broken JSON."""
    match = _CALL_NAME.search(payload)
    if match is None:
        return None
    try:
        name = json.loads(match.group(1))
    except ValueError:
        return None
    return name if isinstance(name, str) else None
