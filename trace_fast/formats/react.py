"""ReAct: Thought / Action / Observation, as one string, as a plain-text log, or as chat messages.

``Action: finish[...]`` (or ``Final Answer:``) is the final answer when no action of the policy follows it. What
the environment says after it (``Episode finished, reward = True``) would give the outcome away and was never read
by the policy, so it is left out, with a note.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trace_fast.errors import RolloutError
from trace_fast.formats.body import Chat, Parsed, Pieces, Step
from trace_fast.formats.fields import FieldKeys
from trace_fast.formats.limits import Limits
from trace_fast.formats.messages import clean_messages, messages_of, steps_of, tools_of
from trace_fast.formats.search_r1 import NOTE_NO_PROMPT, NOTE_QUESTION
from trace_fast.formats.text_fields import question_of, text_of_record

NOTE_AFTER_FINISH = "what the environment said after the final answer is left out"

_TAG = re.compile(r"^[ \t]*(Thought|Action Input|Action|Observation|Final Answer)(?:[ \t]+(\d+))?[ \t]*:", re.MULTILINE)
_FINISH = re.compile(r"\s*finish\s*[\[(]", re.IGNORECASE)
_TOOL = re.compile(r"\s*([A-Za-z_][\w.\-]{0,60})")
_GOLD = re.compile(r"^Correct answer:(.*)$", re.MULTILINE)
_VERDICTS = (("Answer is INCORRECT", False), ("Answer is CORRECT", True))


def has_react(text: str) -> bool:
    """Whether a string is ReAct text: some line begins a thought or an action."""
    return any(match.group(1) in ("Thought", "Action") for match in _TAG.finditer(text))


def is_observation(text: str) -> bool:
    """Whether a message of the user role is the environment's answer to an action."""
    match = _TAG.match(text.lstrip())
    return match is not None and match.group(1) == "Observation"


def import_react(record: Mapping[str, Any], keys: FieldKeys, limits: Limits) -> Parsed:
    """ReAct text at one of the usual places or the user's path, else ReAct chat messages."""
    found = text_of_record(record, keys, has_react)
    if found is None:
        return _chat(record, keys, limits)
    path, text = found
    consumed = {path}
    steps: list[Step] = []
    notes: list[str] = []
    start = 0
    question = question_of(record)
    if question is not None:
        key, asked = question
        consumed.add(key)
        if key == "prompt" and text.startswith(asked):
            start = len(asked)
            steps.append(Step("prompt", asked))
        elif key == "prompt":
            steps.append(Step("prompt", asked))
        elif not text[: _first_tag(text, 0)].strip():
            steps.append(Step("prompt", asked + "\n"))
            notes.append(NOTE_QUESTION)
    if not steps:
        start = _first_tag(text, 0)
        head = text[:start]
        if head:
            steps.append(Step("prompt", head))
        if not head.strip():
            notes.append(NOTE_NO_PROMPT)
    steps += _cut(text, start)
    if _drop_after_finish(steps):
        notes.append(NOTE_AFTER_FINISH)
    return Parsed(Pieces(steps, tuple(notes)), frozenset(consumed))


def log_record(log: str) -> dict[str, Any]:
    """A plain-text log as a record: ``text``, ``answer`` (the line ``Correct answer:``) and ``reward`` where the log
    says ``Answer is CORRECT`` or ``INCORRECT``.

    Raises:
        RolloutError: kind ``answer`` without that line, ``format`` when the log does not begin at its first thought.
    """
    gold = None
    for gold in _GOLD.finditer(log):  # noqa: B007 - the last one counts
        pass
    if gold is None:
        raise RolloutError("answer", 'expected a line "Correct answer: ..." in the log, got none')
    text = log[: gold.start()]
    tags = list(_TAG.finditer(text))
    if not tags:
        raise RolloutError("format", 'expected lines that begin "Thought", "Action" or "Observation", got none')
    number = tags[0].group(2)
    if number is not None and int(number[:9]) != 1:
        raise RolloutError(
            "format", f"expected a log that begins with {tags[0].group(1)} 1, got number {number[:9]}; it was cut apart"
        )
    record: dict[str, Any] = {"text": text, "answer": gold.group(1)}
    last = tags[-1]
    if last.group(1) == "Observation":
        verdict = next((ok for words, ok in _VERDICTS if text[last.end() :].strip() == words), None)
        if verdict is not None:
            record["reward"] = verdict
    return record


def _first_tag(text: str, start: int) -> int:
    match = _TAG.search(text, start)
    return len(text) if match is None else match.start()


def _cut(text: str, start: int) -> list[Step]:
    """Policy and observation pieces of ``text[start:]``, edges at the tags.

    In numbered logs only tags with the running number count, so a line of an observation that looks like a tag
    does not cut it.
    """
    tags = list(_TAG.finditer(text, start))
    numbered = bool(tags) and tags[0].group(2) is not None
    steps: list[Step] = []
    at, observing, current = start, False, 0
    for tag in tags:
        name, number = tag.group(1), tag.group(2)
        if numbered and name != "Final Answer":
            if number is None or int(number[:9]) not in (current, current + 1):
                continue
            current = int(number[:9])
        if (name == "Observation") == observing:
            continue
        _append(steps, text[at : tag.start()], observing)
        at, observing = tag.start(), not observing
    _append(steps, text[at:], observing)
    return steps


def _append(steps: list[Step], text: str, observing: bool) -> None:
    if not text:
        return
    if observing:
        tool = steps[-1].tool if steps and steps[-1].role == "assistant" else None
        steps.append(Step("tool", text, observation=True, tool=tool))
    else:
        steps.append(policy_step(text))


def policy_step(text: str) -> Step:
    """A piece of the policy's ReAct text; it waits for an observation unless it finishes."""
    tags = list(_TAG.finditer(text))
    actions = [tag for tag in tags if tag.group(1) == "Action"]
    final = any(tag.group(1) == "Final Answer" for tag in tags)
    payload = text[actions[-1].end() :] if actions else ""
    finished = final or _FINISH.match(payload) is not None
    name = _TOOL.match(payload)
    tool = name.group(1) if name is not None and not finished else None
    return Step("assistant", text, waits=not finished, tool=tool)


def _drop_after_finish(steps: list[Step]) -> bool:
    """Cuts the steps after a finishing last step of the policy; whether there were any."""
    last = max((i for i, step in enumerate(steps) if step.role == "assistant"), default=None)
    if last is None or steps[last].waits or last == len(steps) - 1:
        return False
    del steps[last + 1 :]
    return True


def _chat(record: Mapping[str, Any], keys: FieldKeys, limits: Limits) -> Parsed:
    path, value = messages_of(record, keys)
    messages, notes = clean_messages(value, path, limits)
    steps: list[Step] = []
    tool: str | None = None
    acted = False
    for step in steps_of(messages):
        if step.role == "assistant":
            acted = True
            action = policy_step(step.text)
            tool = action.tool
            steps.append(action)
        elif step.observation or (acted and step.role == "user" and is_observation(step.text)):
            steps.append(Step("tool", step.text, observation=True, tool=tool))
        else:
            steps.append(step)
    if _drop_after_finish(steps):
        notes = (*notes, NOTE_AFTER_FINISH)
    tools, consumed = tools_of(record, limits)
    return Parsed(Chat(messages[: len(steps)], steps, tools, None, notes), frozenset({path, *consumed}))
