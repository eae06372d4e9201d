"""The completion form (verifiers): ``prompt`` and ``completion`` as two lists of chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trace_fast.errors import RolloutError
from trace_fast.formats.body import Chat, Parsed
from trace_fast.formats.fields import FieldKeys, describe, lookup, present
from trace_fast.formats.limits import Limits
from trace_fast.formats.messages import clean_messages, steps_of, tool_schemas, tools_of


def import_completion(record: Mapping[str, Any], keys: FieldKeys, limits: Limits) -> Parsed:
    """Messages of both keys in a row; the prompt ends where ``prompt`` does, even when it shows examples.

    Tool calls may be JSON strings; tool messages without ``tool_call_id`` answer the calls in order. Tools come
    from ``tools`` or ``info.oai_tools``.
    """
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, str) and isinstance(completion, list):
        prompt = [{"role": "user", "content": prompt}]
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, list):
            raise RolloutError("format", f"{name}: expected a list of messages, got {describe(value)}")
    assert isinstance(prompt, list)
    assert isinstance(completion, list)
    prompt_messages, notes = clean_messages(prompt, "prompt", limits)
    if not prompt_messages:
        raise RolloutError("format", "prompt: expected at least one message, got an empty list")
    messages, more = clean_messages(completion, "completion", limits)
    messages = prompt_messages + messages
    tools, consumed = tools_of(record, limits)
    offered = lookup(record, "info.oai_tools")
    if tools is None and present(offered):
        tools = tool_schemas(offered, "info.oai_tools", limits)
    chat = Chat(messages, steps_of(messages), tools, len(prompt_messages), tuple(dict.fromkeys((*notes, *more))))
    return Parsed(chat, frozenset({"prompt", "completion", *consumed}))
