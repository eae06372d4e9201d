"""The messages form, and the clean shape of chat messages that every chat importer ends in.

A clean message has ``role`` (system, user, assistant, tool), ``content`` (always text), and where they exist
``reasoning_content``, ``tool_calls`` (``{"id"?, "type": "function", "function": {"name", "arguments"}}``, arguments
parsed where they are JSON objects), ``tool_call_id`` and ``name``. Other keys of a message mean nothing to chat
templates and are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trace_fast.errors import RolloutError
from trace_fast.formats.body import Chat, Parsed, Step
from trace_fast.formats.fields import MESSAGE_PATHS, FieldKeys, describe, find
from trace_fast.formats.limits import Limits
from trace_fast.formats.strict_json import parse_embedded

ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip
TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
NOTE_DEVELOPER = "role developer read as system"


def import_messages(record: Mapping[str, Any], keys: FieldKeys, limits: Limits) -> Parsed:
    """``messages`` (or ``traj``, ...) in OpenAI's chat shape; ``tools`` or legacy ``functions`` beside them."""
    path, value = messages_of(record, keys)
    messages, notes = clean_messages(value, path, limits)
    tools, consumed = tools_of(record, limits)
    chat = Chat(messages, steps_of(messages), tools, None, notes)
    return Parsed(chat, frozenset({path, *consumed}))


def messages_of(record: Mapping[str, Any], keys: FieldKeys) -> tuple[str, list[Any]]:
    """``(path, messages)``: the list of messages by the user's path or the usual places.

    Raises:
        RolloutError: kind ``format`` when there is none.
    """
    found = find(record, keys, "messages", ())
    if found is None:
        usual = ((path, record.get(path)) for path in MESSAGE_PATHS)
        found = next(((path, value) for path, value in usual if isinstance(value, list) and value), None)
    if found is None:
        raise RolloutError("format", f"expected a list of messages at one of {', '.join(MESSAGE_PATHS)}, got none")
    path, value = found
    if not isinstance(value, list) or not value:
        raise RolloutError("format", f"{path}: expected a non-empty list of messages, got {describe(value)}")
    return path, value


def clean_messages(value: list[Any], where: str, limits: Limits) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Messages in the clean shape (see the module), and notes.

    Raises:
        RolloutError: kind ``format`` (the message and key are named), ``inexact`` for parts that are not text.
    """
    messages: list[dict[str, Any]] = []
    notes: tuple[str, ...] = ()
    for i, item in enumerate(value):
        at = f"{where}[{i}]"
        if not isinstance(item, Mapping):
            raise RolloutError("format", f"{at}: expected a message object, got {describe(item)}")
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise RolloutError("format", f"{at}.role: expected one of {', '.join(ROLES)}, got {describe(role)}")
        if role == "developer":
            notes = (NOTE_DEVELOPER,)
        message: dict[str, Any] = {"role": ROLES[role], "content": text_of(item.get("content"), f"{at}.content")}
        if role == "assistant":
            reasoning = next((item[k] for k in REASONING_KEYS if isinstance(item.get(k), str) and item[k]), None)
            if reasoning is not None:
                message["reasoning_content"] = reasoning
            calls = tool_calls_of(item, at, limits)
            if calls:
                message["tool_calls"] = calls
        elif message["role"] == "tool":
            for key in ("tool_call_id", "name"):
                if isinstance(item.get(key), str) and item[key]:
                    message[key] = item[key]
        messages.append(message)
    _match_results(messages)
    return messages, notes


def text_of(content: Any, where: str) -> str:
    """Message content as text: null is empty, text parts are joined as they are.

    Raises:
        RolloutError: ``inexact`` for parts that are not text (images, audio), ``format`` for other values.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RolloutError("format", f"{where}: expected text or a list of parts, got {describe(content)}")
    texts: list[str] = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise RolloutError("format", f"{where}[{i}]: expected a content part, got {describe(part)}")
        kind = part.get("type", "text")
        if kind not in TEXT_PARTS:
            raise RolloutError(
                "inexact",
                f"{where}[{i}]: a part of type {str(kind)[:40]!r} is no text, so its tokens are not in the record; "
                "only text rollouts can be scored",
            )
        text = part.get("refusal") if kind == "refusal" else part.get("text")
        if not isinstance(text, str):
            raise RolloutError("format", f"{where}[{i}].text: expected text, got {describe(text)}")
        texts.append(text)
    return "".join(texts)


def tool_calls_of(message: Mapping[str, Any], where: str, limits: Limits) -> list[dict[str, Any]]:
    """The tool calls of an assistant message in the clean shape, legacy ``function_call`` included."""
    calls = message.get("tool_calls")
    legacy = message.get("function_call")
    if calls is None:
        calls = [] if legacy is None else [{"function": legacy}]
    if not isinstance(calls, list):
        raise RolloutError("format", f"{where}.tool_calls: expected a list, got {describe(calls)}")
    return [tool_call(call, f"{where}.tool_calls[{i}]", limits) for i, call in enumerate(calls)]


def tool_call(call: Any, where: str, limits: Limits) -> dict[str, Any]:
    """One tool call in the clean shape; it may come as an object or as JSON text of one."""
    if isinstance(call, str):
        try:
            call = parse_embedded(call, limits)
        except ValueError as error:
            raise RolloutError("format", f"{where}: expected JSON of a tool call in the string: {error}") from None
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RolloutError("format", f"{where}: expected a tool call with a function name, got {describe(call)}")
    cleaned: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": _arguments(function.get("arguments"), where, limits)},
    }
    call_id = call.get("id") or call.get("call_id")
    if isinstance(call_id, str):
        cleaned["id"] = call_id
    return cleaned


def _arguments(value: Any, where: str, limits: Limits) -> Any:
    """Arguments as an object, as chat templates expect; text that is no JSON object stays text."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        raise RolloutError("format", f"{where}.arguments: expected an object or text, got {describe(value)}")
    if not value.lstrip().startswith("{"):
        return value
    try:
        return parse_embedded(value, limits)
    except ValueError:
        return value  # what the policy wrote is no JSON; it is text all the same


def _match_results(messages: list[dict[str, Any]]) -> None:
    """Gives tool messages without ``tool_call_id`` the id of the call they answer, in order."""
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "assistant":
            waiting = [call.get("id", "") for call in message.get("tool_calls", ())]
        elif message["role"] == "tool" and waiting:
            call_id = message.get("tool_call_id")
            if call_id in waiting:
                waiting.remove(call_id)
            elif call_id is None:
                matched = waiting.pop(0)
                if matched:
                    message["tool_call_id"] = matched


def tools_of(record: Mapping[str, Any], limits: Limits) -> tuple[list[dict[str, Any]] | None, set[str]]:
    """``(tools, keys read)``: the tool schemas a chat template may render, in OpenAI's chat shape.

    ``tools`` may be JSON text or Responses API tools; ``functions`` is read where it is OpenAI's legacy list.
    """
    value = record.get("tools")
    if value is not None:
        return tool_schemas(value, "tools", limits), {"tools"}
    legacy = record.get("functions")
    if isinstance(legacy, list) and legacy and all(isinstance(f, Mapping) and "name" in f for f in legacy):
        return tool_schemas(legacy, "functions", limits), {"functions"}
    return None, set()


def tool_schemas(value: Any, where: str, limits: Limits) -> list[dict[str, Any]] | None:
    """Tool schemas as ``{"type": "function", "function": {...}}``; None for an empty list."""
    if isinstance(value, str):
        try:
            value = parse_embedded(value, limits)
        except ValueError as error:
            raise RolloutError("format", f"{where}: expected a list of tools, got text that is none: {error}") from None
    if not isinstance(value, list):
        raise RolloutError("format", f"{where}: expected a list of tool schemas, got {describe(value)}")
    schemas: list[dict[str, Any]] = []
    for i, tool in enumerate(value):
        if not isinstance(tool, Mapping):
            raise RolloutError("format", f"{where}[{i}]: expected a tool schema, got {describe(tool)}")
        if isinstance(tool.get("function"), Mapping):
            schemas.append(dict(tool))
        elif isinstance(tool.get("name"), str):
            function = {key: item for key, item in tool.items() if key not in ("type", "strict")}
            schemas.append({"type": "function", "function": function})
        else:  # a built-in tool: templates of open models do not know it, but it is not ours to hide
            schemas.append(dict(tool))
    return schemas or None


def steps_of(messages: list[dict[str, Any]]) -> list[Step]:
    """The messages as the turn rules and the transcript see them; tool results are the messages of role tool."""
    names: dict[str, str] = {}
    last: list[str] = []
    steps: list[Step] = []
    for message in messages:
        if message["role"] == "assistant":
            calls = message.get("tool_calls", [])
            last = [call["function"]["name"] for call in calls]
            names.update({call["id"]: call["function"]["name"] for call in calls if "id" in call})
            tool = ", ".join(last) or None
            steps.append(Step("assistant", assistant_text(message), waits=bool(calls), tool=tool))
        elif message["role"] == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id", ""))
            if name is None and len(set(last)) == 1:
                name = last[0]
            steps.append(Step("tool", message["content"], observation=True, tool=name))
        else:
            steps.append(Step(message["role"], message["content"]))
    return steps


def think_block(reasoning: str) -> str:
    """Reasoning as text before the content, in the form that most reasoning models write."""
    return f"<think>\n{reasoning}\n</think>\n\n"


def tool_call_text(call: Mapping[str, Any]) -> str:
    """A tool call as text, Hermes style."""
    arguments = call["function"]["arguments"]
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(call["function"]["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {shown}}}\n</tool_call>'


def assistant_text(message: Mapping[str, Any]) -> str:
    """An assistant message as one text: reasoning, content, tool calls."""
    reasoning = message.get("reasoning_content")
    parts = [(think_block(reasoning) if reasoning else "") + message["content"]]
    parts += [tool_call_text(call) for call in message.get("tool_calls", ())]
    return "\n".join(part for part in parts if part)
