"""How tool calls are written: three formats, one of which is a template's own.

================ ===================================================================================
``json_tag``     ``<tool_call>{"name": N, "arguments": {...}}</tool_call>``
``function_tag`` ``<tool_call><function=N><parameter=K>V</parameter></function></tool_call>``
``bare_json``    ``{"name": N, "parameters": {...}}`` as the whole message
================ ===================================================================================

Values between tags carry no type: text of an integer is read as one where the tool's schema asks for an integer.
This file finds calls and says what is wrong with them; what follows from that is ``actions``' to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trace_fast.errors import ConfigError, RolloutError
from trace_fast.formats.limits import Limits
from trace_fast.formats.strict_json import parse_embedded, too_deep
from trace_fast.formats.template import ChatTemplate
from trace_fast.trainer.search.tools import parameters_of

CallFormat = Literal["json_tag", "function_tag", "bare_json"]

TAG, END_TAG = "<tool_call>", "</tool_call>"
MAX_DEPTH = 32  # of a call's JSON

_SPAN = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_BARE = re.compile(r"\s*(?:<\|python_tag\|>)?\s*(?=\{)")


@dataclass(frozen=True, slots=True)
class Call:
    """A call as the policy meant it. Names and arguments are not checked against the tools yet."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Written:
    """One place where the policy wrote a call.

    Args:
        start, end: characters that it takes.
        payload: the text inside the tags.
        call: what it says; None where ``problem`` tells why it says nothing.
        closed: whether its end tag was written.
        more: another object follows in the same tag.
    """

    start: int
    end: int
    payload: str
    call: Call | None = None
    problem: str = ""
    closed: bool = True
    more: bool = False


def find_calls(text: str, call_format: CallFormat) -> list[Written]:
    """All calls that a text holds, in order."""
    if call_format == "bare_json":
        begin = _BARE.match(text)
        return [] if begin is None else [_bare_json(text, begin.end())]
    if call_format == "json_tag":
        return _json_tags(text)
    written = []
    for match in _SPAN.finditer(text):
        payload, closed = match.group(1), bool(match.group(2))
        parsed = _function_call(payload)
        call, problem = (parsed, "") if isinstance(parsed, Call) else (None, parsed)
        written.append(Written(match.start(), match.end(), payload, call, problem, closed))
    return written


def detect_call_format(template: ChatTemplate) -> CallFormat:
    """The format that a template writes calls in; ``json_tag`` where it writes none.

    Raises:
        ConfigError: it writes them in a format not known here.
    """
    if "tool_calls" in template.drops:
        return "json_tag"
    function = {"name": "look7", "arguments": {"q": "sentinel7"}}
    call = {"id": "call00007", "type": "function", "function": function}
    ask, act = {"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}
    messages, _ = template.adapt([ask, act], None)
    try:
        text = template.render(messages, None, prompt=False)
    except RolloutError as error:
        raise ConfigError(f"call_format: the chat template refuses a tool call: {error.reason}") from None
    shapes: dict[CallFormat, str] = {
        "function_tag": r"<tool_call>\s*<function=look7>",
        "json_tag": r'<tool_call>\s*\{"name": "look7", "arguments"',
        "bare_json": r'(?<!>)\s*\{"name": "look7", "parameters"',
    }
    for name, shape in shapes.items():
        if re.search(shape, text):
            return name
    shown = text[max(text.find("look7") - 60, 0) : text.find("sentinel7") + 40]
    raise ConfigError(f"call_format: expected one of {', '.join(shapes)}; the chat template writes {shown!r}")


# --- JSON -------------------------------------------------------------------------------------------------------


def _json_tags(text: str) -> list[Written]:
    written: list[Written] = []
    at = text.find(TAG)
    while at >= 0:
        written.append(_json_tag(text, at))
        at = text.find(TAG, written[-1].end)
    return written


def _json_tag(text: str, at: int) -> Written:
    """The call whose tag begins at ``at``. The JSON's own end counts, so a string in it may hold an end tag."""
    begin = at + len(TAG)
    decoded = _decode(text, begin)
    closing = text.find(END_TAG, begin if isinstance(decoded, str) else decoded[1])
    stop, end = (closing, closing + len(END_TAG)) if closing >= 0 else (len(text), len(text))
    if isinstance(decoded, str):
        return Written(at, end, text[begin:stop], problem=decoded, closed=closing >= 0)
    return _read(text[begin:stop], decoded[0], text[decoded[1] : stop], "arguments", (at, end), closing >= 0)


def _bare_json(text: str, begin: int) -> Written:
    """The call of a message that begins with a JSON object."""
    decoded = _decode(text, begin)
    if isinstance(decoded, str):
        return Written(begin, len(text), text[begin:], problem=decoded)
    return _read(text[begin:], decoded[0], text[decoded[1] :], "parameters", (begin, len(text)), True)


def _read(payload: str, value: Any, rest: str, key: str, span: tuple[int, int], closed: bool) -> Written:
    """What a decoded value says; ``rest`` is what stands behind it in the same place."""
    more = rest.strip()[:1] in tuple("{[,;")
    parsed: Call | str = call_of(value, key)
    if rest.strip() and not more:
        parsed = "text follows the JSON object"
    call, problem = (parsed, "") if isinstance(parsed, Call) else (None, parsed)
    return Written(*span, payload, call, problem, closed, more)


def _decode(text: str, begin: int) -> tuple[Any, int] | str:
    """``(value, end)`` of the JSON value that begins there after white space, or what is wrong with it."""
    start = begin + len(text[begin:]) - len(text[begin:].lstrip())
    if too_deep(text[start:].encode("utf-8"), MAX_DEPTH):
        return f"it nests deeper than {MAX_DEPTH} levels"
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
        return parse_embedded(text[start:end], Limits(max_depth=MAX_DEPTH)), end
    except RolloutError as error:
        return error.reason
    except ValueError as error:
        return f"not JSON: {error}"


def call_of(value: Any, key: str) -> Call | str:
    """The call that a JSON value spells, or what is wrong with it."""
    if not isinstance(value, Mapping) or set(value) != {"name", key}:
        got = ", ".join(map(str, value))[:80] if isinstance(value, Mapping) else type(value).__name__
        return f'expected an object with "name" and "{key}", got {got or "an empty one"}'
    if not isinstance(value["name"], str):
        return f'"name": expected text, got {type(value["name"]).__name__}'
    if not isinstance(value[key], Mapping):
        return f'"{key}": expected an object, got {type(value[key]).__name__}'
    return Call(value["name"], dict(value[key]))


# --- tags -------------------------------------------------------------------------------------------------------


def _function_call(payload: str) -> Call | str:
    match = _FUNCTION.fullmatch(payload)
    if match is None:
        return "expected <function=name>...</function>"
    name, body = match.group(1).strip(), match.group(2)
    arguments: dict[str, Any] = {}
    at = 0
    while parameter := _PARAMETER.match(body, at):
        key = parameter.group(1).strip()
        if key in arguments:
            return f"the argument {key} is given twice"
        arguments[key] = parameter.group(2)
        at = parameter.end()
    if body[at:].strip():
        return f"expected <parameter=name>value</parameter>, got {body[at:].strip()[:60]!r}"
    return Call(name, typed(name, arguments))


def typed(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with text of integers as integers, where the schema of the tool says integer."""
    parameters = parameters_of(name)
    if parameters is None:
        return arguments
    integers = {key for key, schema in parameters["properties"].items() if schema["type"] == "integer"}
    return {
        key: int(value) if key in integers and isinstance(value, str) and _INTEGER.fullmatch(value.strip()) else value
        for key, value in arguments.items()
    }
