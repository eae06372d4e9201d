"""Responses API items (also inside NeMo-Gym records): reasoning, messages, function calls and their outputs.

Items between two groups of outputs are one assistant message: its reasoning, its text and all its calls, so
parallel calls followed by their outputs are one turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trace_fast.errors import RolloutError
from trace_fast.formats.body import Chat, Parsed
from trace_fast.formats.fields import FieldKeys, describe
from trace_fast.formats.limits import Limits
from trace_fast.formats.messages import clean_messages, steps_of, text_of, tool_schemas

NOTE_HIDDEN_REASONING = "reasoning items without text: what the policy thought there is not in the record"


def import_responses(record: Mapping[str, Any], keys: FieldKeys, limits: Limits) -> Parsed:
    """``responses_create_params.input`` + ``response.output``, or ``input`` + ``output`` at the top.

    The input (with ``instructions`` as its system message) is the prompt, whatever it holds.
    """
    params, response = record.get("responses_create_params"), record.get("response")
    request = params if isinstance(params, Mapping) else record
    answer = response if isinstance(response, Mapping) else record
    consumed = {key for key in ("responses_create_params", "response") if isinstance(record.get(key), Mapping)}
    if request is record:
        consumed |= {"input", "instructions", "tools"}
    if answer is record:
        consumed.add("output")

    output = answer.get("output")
    if not isinstance(output, list):
        raise RolloutError("format", f"output: expected a list of Responses API items, got {describe(output)}")
    given = request.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise RolloutError("format", f"input: expected text or a list of Responses API items, got {describe(given)}")
    notes: list[str] = []
    prompt = _to_messages(given, "input", notes)
    instructions = request.get("instructions")
    if isinstance(instructions, str) and instructions:
        prompt.insert(0, {"role": "system", "content": instructions})
    items = prompt + _to_messages(output, "output", notes)
    messages, more = clean_messages(items, "messages", limits)
    tools = request.get("tools") or answer.get("tools")
    schemas = tool_schemas(tools, "tools", limits) if tools else None
    chat = Chat(messages, steps_of(messages), schemas, len(prompt), (*dict.fromkeys(notes), *more))
    return Parsed(chat, frozenset(consumed))


def is_item(value: Any) -> bool:
    """Whether a value looks like one Responses API item."""
    return isinstance(value, Mapping) and isinstance(value.get("type"), str) and value["type"] in _KNOWN


class _Pending:
    """The assistant message being put together."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.reasoning: list[str] = []
        self.content: str | None = None
        self.calls: list[dict[str, Any]] = []

    def flush(self, messages: list[dict[str, Any]]) -> None:
        if self.content is None and not self.calls and not self.reasoning:
            return
        message: dict[str, Any] = {"role": "assistant", "content": self.content or ""}
        if self.reasoning:
            message["reasoning_content"] = "\n\n".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        messages.append(message)
        self.clear()


_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_KNOWN = ("message", "reasoning", *_CALLS, *_OUTPUTS)


def _to_messages(items: list[Any], where: str, notes: list[str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    pending = _Pending()
    for i, item in enumerate(items):
        at = f"{where}[{i}]"
        if not isinstance(item, Mapping):
            raise RolloutError("format", f"{at}: expected a Responses API item, got {describe(item)}")
        kind = item.get("type", "message")
        if not isinstance(kind, str):
            raise RolloutError("format", f"{at}.type: expected text, got {describe(kind)}")
        if kind == "reasoning":
            text = _reasoning(item, at)
            if text:
                pending.reasoning.append(text)
            else:
                notes.append(NOTE_HIDDEN_REASONING)
        elif kind in _CALLS:
            arguments = item.get(_CALLS[kind])
            call = {"function": {"name": item.get("name"), "arguments": arguments}, "id": item.get("call_id")}
            pending.calls.append(call)
        elif kind in _OUTPUTS:
            pending.flush(messages)
            content = text_of(item.get("output"), f"{at}.output")
            messages.append({"role": "tool", "content": content, "tool_call_id": item.get("call_id")})
        elif kind == "message":
            text = text_of(item.get("content"), f"{at}.content")
            if item.get("role") == "assistant":
                if pending.content is not None or pending.calls:
                    pending.flush(messages)
                pending.content = text
            else:
                pending.flush(messages)
                messages.append({"role": item.get("role"), "content": text})
        else:
            raise RolloutError(
                "inexact",
                f"{at}: an item of type {str(kind)[:40]!r} hides what the policy read, so its tokens are not in the "
                f"record; known types are {', '.join(_KNOWN)}",
            )
    pending.flush(messages)
    return messages


def _reasoning(item: Mapping[str, Any], at: str) -> str:
    """Text of a reasoning item: its content where it is open, else its summary."""
    for key in ("content", "summary"):
        parts = item.get(key)
        if isinstance(parts, list | str):
            text = text_of(parts, f"{at}.{key}")
            if text:
                return text
    return ""
