"""Search-R1 text: ``<think>``, ``<search>``, ``<information>`` and ``<answer>`` in one string.

``<information>`` blocks are what the environment put in, with the line breaks around them; the rest is the
policy's. The text is cut at those edges and each piece is tokenised by itself, without a chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trace_fast.errors import RolloutError
from trace_fast.formats.body import Parsed, Pieces, Step
from trace_fast.formats.fields import FieldKeys
from trace_fast.formats.limits import Limits
from trace_fast.formats.text_fields import question_of, text_of_record

NOTE_QUESTION = "the prompt was not recorded; the question stands for it"
NOTE_NO_PROMPT = "no prompt was recorded"

_TAG = re.compile(r"<(?:search|information|answer)>")
_OBSERVATION = re.compile(r"\s*<information>.*?(?:</information>\s*|\Z)", re.DOTALL)


def has_tags(text: str) -> bool:
    """Whether a string is Search-R1 text."""
    return _TAG.search(text) is not None


def import_search_r1(record: Mapping[str, Any], keys: FieldKeys, limits: Limits) -> Parsed:
    """One string with tags at ``full_output``, ``output``, ``response`` or the user's path.

    The prompt is ``prompt``, else ``question`` and a line break (with a note). T = number of ``<information>``
    blocks; finished when ``<answer>`` comes after the last one.
    """
    found = text_of_record(record, keys, has_tags)
    if found is None:
        raise RolloutError("format", "expected a string with <search>, <information> or <answer> tags, got none")
    path, text = found
    consumed = {path}
    steps: list[Step] = []
    notes: tuple[str, ...] = (NOTE_NO_PROMPT,)
    question = question_of(record)
    if question is not None:
        key, asked = question
        consumed.add(key)
        notes = () if key == "prompt" else (NOTE_QUESTION,)
        steps.append(Step("prompt", asked if key == "prompt" else asked + "\n"))
    at = 0
    for match in _OBSERVATION.finditer(text):
        _policy(text[at : match.start()], steps)
        steps.append(Step("tool", match.group(), observation=True, tool="search"))
        at = match.end()
    _policy(text[at:], steps)
    return Parsed(Pieces(steps, notes), frozenset(consumed))


def _policy(text: str, steps: list[Step]) -> None:
    if text:
        answered = "<answer>" in text
        steps.append(Step("assistant", text, waits=not answered, tool=None if answered else "search"))
