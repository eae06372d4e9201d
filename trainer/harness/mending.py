"""What the repairing parser mends in a call, each kind by its name, so that an evaluation can count them.

``json``: a code fence, Python's spelling of a literal, a key given twice (the last counts), or brackets and quotes that
were never closed. ``shape``: other usual names of the two keys, or arguments as JSON text. ``tool_name``: a tool
without its prefix. ``argument_type``: an integer written as text. Nothing is guessed about what a call means.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from trace_fast.formats.limits import Limits
from trace_fast.formats.strict_json import parse_embedded, too_deep
from trace_fast.trainer.harness.call_formats import MAX_DEPTH, Call, typed
from trace_fast.trainer.search.tools import tool_schemas

_FENCE = re.compile(r"\s*```(?:json)?\s*(.*?)\s*(?:```\s*)?", re.DOTALL)
_NAME_KEYS = ("name", "tool", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")


def mend_payload(payload: str) -> tuple[Call, tuple[str, ...]] | None:
    """The call that a payload was meant to be, and the kinds of repair it took; None where that is not clear."""
    value = _json(payload)
    if value is None:
        return None
    shaped = _shape(value)
    if shaped is None:
        return None
    mended = [] if _parsed(payload) is not None else ["json"]
    if value != {"name": shaped.name, "arguments": shaped.arguments}:
        mended.append("shape")
    return shaped, tuple(mended or ["shape"])  # well-formed JSON where the template has another format


def mend_call(call: Call) -> tuple[Call, tuple[str, ...]]:
    """The call with the full name of its tool and integers that were written as text."""
    kinds: list[str] = []
    name = call.name
    known = [tool["function"]["name"] for tool in tool_schemas()]
    if name not in known:
        full = [candidate for candidate in known if candidate.rpartition(".")[2] == name.strip().casefold()]
        if full:
            name = full[0]
            kinds.append("tool_name")
    arguments = typed(name, call.arguments)
    if arguments != call.arguments:
        kinds.append("argument_type")
    return Call(name, arguments), tuple(kinds)


def _json(payload: str) -> Any:
    """The value of the payload, mended where it must be; None where it cannot be read."""
    fenced = _FENCE.fullmatch(payload)
    text = (payload if fenced is None else fenced.group(1)).strip()
    if too_deep(text.encode("utf-8"), MAX_DEPTH):
        return None
    value = _parsed(text)
    if value is None:
        value = _literal(text)
    return value if value is not None else _parsed(_closed(text))


def _parsed(text: str) -> Any:
    try:
        return parse_embedded(text, Limits(max_depth=MAX_DEPTH))
    except ValueError:
        return None


def _literal(text: str) -> Any:
    """The value of a Python literal of plain types: single quotes, trailing commas, ``True`` and ``None``."""
    try:
        value = ast.literal_eval(text)
        return json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # what literal_eval says of odd text
        return None


def _closed(text: str) -> str:
    """The text with the quote and the brackets closed that are open at its end; superfluous ones there are left out."""
    waiting: list[str] = []
    in_string = escaped = False
    for at, character in enumerate(text):
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in "{[":
            waiting.append("}" if character == "{" else "]")
        elif character in "}]" and (not waiting or waiting.pop() != character):
            return text[:at]
    return text + ('"' if in_string else "") + "".join(reversed(waiting))


def _shape(value: Any) -> Call | None:
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping):
        return None
    name = next((value[key] for key in _NAME_KEYS if isinstance(value.get(key), str)), None)
    arguments: Any = next((value[key] for key in _ARGUMENT_KEYS if key in value), {})
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    return Call(name, dict(arguments)) if name is not None and isinstance(arguments, Mapping) else None
