"""The three browser tools: their schemas, as chat templates render them, and the check of a call against them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from trace_fast.errors import TraceFastError

SEARCH, OPEN, FIND = "browser.search", "browser.open", "browser.find"
MAX_RESULTS = 50
_SHOWN = 60  # characters of a value that a message repeats


class ToolCallError(TraceFastError):
    """A call that cannot be carried out; the message is what the policy gets to read."""


def _integer(least: int, most: int | None, default: int, description: str) -> dict[str, Any]:
    bounds = {"minimum": least} if most is None else {"minimum": least, "maximum": most}
    return {"type": "integer", **bounds, "default": default, "description": description}


def _tool(name: str, description: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TOOLS: tuple[dict[str, Any], ...] = (
    _tool(
        SEARCH,
        "Searches the collection and lists the best documents with title, address and a summary.",
        {
            "query": {"type": "string", "description": "What to search for."},
            "topn": _integer(1, MAX_RESULTS, 10, "How many documents to list."),
        },
        ["query"],
    ),
    _tool(
        OPEN,
        "Opens a document of the last search, or moves within the page that is open.",
        {
            "id": _integer(-1, None, -1, "Number of a document in the last search, from 0; -1 is the open page."),
            "loc": _integer(-1, None, -1, "First line to show; -1 is the passage that matches the search, or the top."),
            "num_lines": _integer(-1, None, -1, "How many lines to show; -1 shows as many as fit."),
        },
        [],
    ),
    _tool(
        FIND,
        "Lists the lines of a page that hold a text exactly as it is written.",
        {
            "pattern": {"type": "string", "description": "The text to find."},
            "cursor": _integer(-1, None, -1, "Number of a page opened before; -1 is the open page."),
        },
        ["pattern"],
    ),
)


def tool_schemas() -> list[dict[str, Any]]:
    """The tools in OpenAI's chat shape; a copy that the caller may change."""
    return copy.deepcopy(list(_TOOLS))


def parameters_of(name: str) -> Mapping[str, Any] | None:
    """The JSON schema of a tool's arguments; None for an unknown tool."""
    return next((tool["function"]["parameters"] for tool in _TOOLS if tool["function"]["name"] == name), None)


def check_arguments(name: str, arguments: Any) -> dict[str, Any]:
    """The arguments with defaults filled in.

    Raises:
        ToolCallError: unknown tool, arguments that are no object, missing, unknown, of a wrong type, out of range.
    """
    parameters = parameters_of(name)
    if parameters is None:
        known = ", ".join(tool["function"]["name"] for tool in _TOOLS)
        raise ToolCallError(f"unknown tool {_shown(name)}; the tools are {known}")
    if not isinstance(arguments, Mapping):
        raise ToolCallError(f"{name}: arguments: expected an object, got {_shown(arguments)}")
    properties = parameters["properties"]
    unknown = [key for key in arguments if key not in properties]
    if unknown:
        raise ToolCallError(f"{name}: unknown argument {_shown(unknown[0])}; it takes {', '.join(properties)}")
    complete: dict[str, Any] = {}
    for key, schema in properties.items():
        if key in arguments:
            complete[key] = _checked(f"{name}: {key}", arguments[key], schema)
        elif key in parameters["required"]:
            raise ToolCallError(f"{name}: the argument {key} is missing")
        else:
            complete[key] = schema["default"]
    return complete


def _checked(where: str, value: Any, schema: Mapping[str, Any]) -> Any:
    if schema["type"] == "string":
        if not isinstance(value, str) or not value.strip():
            raise ToolCallError(f"{where}: expected text that is not blank, got {_shown(value)}")
        return value
    assert schema["type"] == "integer", schema
    least, most = schema["minimum"], schema.get("maximum")
    allowed = f"an integer of at least {least}" if most is None else f"an integer in {least}..{most}"
    if type(value) is not int or value < least or (most is not None and value > most):
        raise ToolCallError(f"{where}: expected {allowed}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return "a huge integer"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
