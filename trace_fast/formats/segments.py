"""The segments form: text pieces with roles, no chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trace_fast.errors import RolloutError
from trace_fast.formats.body import Parsed, Pieces, Step
from trace_fast.formats.fields import FieldKeys, describe
from trace_fast.formats.limits import Limits

ROLES = ("prompt", "system", "user", "assistant", "tool")


def import_segments(record: Mapping[str, Any], keys: FieldKeys, limits: Limits) -> Parsed:
    """``segments``: ``[{"role", "text", "tool"?}]``.

    The prompt is what comes before the first assistant or tool segment; consecutive tool segments end one turn; an
    assistant segment after the last of them is the final answer.
    """
    value = record.get("segments")
    if not isinstance(value, list) or not value:
        raise RolloutError("format", f"segments: expected a non-empty list of segments, got {describe(value)}")
    steps: list[Step] = []
    for i, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise RolloutError("format", f"segments[{i}]: expected a segment object, got {describe(item)}")
        role, text, tool = item.get("role"), item.get("text"), item.get("tool")
        if role not in ROLES:
            raise RolloutError(
                "format", f"segments[{i}].role: expected one of {', '.join(ROLES)}, got {describe(role)}"
            )
        if not isinstance(text, str):
            raise RolloutError("format", f"segments[{i}].text: expected text, got {describe(text)}")
        if tool is not None and not isinstance(tool, str):
            raise RolloutError("format", f"segments[{i}].tool: expected text, got {describe(tool)}")
        steps.append(Step(role, text, observation=role == "tool", tool=tool))
    return Parsed(Pieces(steps), frozenset({"segments"}))
