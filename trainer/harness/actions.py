"""What the policy did in one turn: it called a tool, answered, tried something invalid, or did nothing.

A turn is private reasoning (the ``<think>`` block that a message begins with), then exactly one call, or an answer.
What comes of everything else is fixed here. A name alone stands for an invalid action: an error observation that says
what was wrong and costs a turn.

=============================================== ======================== ======================================
the policy wrote                                 ``strict`` (training)    ``repair`` (evaluation)
=============================================== ======================== ======================================
one call                                         the call                 the call
one call, text before it                         the call                 the call
an answer block, no call                         the answer               the answer
several answer blocks, no call                   the last one             the last one
an answer tag that is not closed                 nothing                  the answer (``unclosed_answer``)
an answer or a call in reasoning only            nothing; for a call      nothing; the last such call
                                                 ``call_in_reasoning``    (``call_in_reasoning``)
reasoning that is never closed                   all of it is reasoning   all of it is reasoning
several calls, or several objects in one tag     ``several_calls``        the first (``several_calls``)
a call and an answer                             ``call_and_answer``      the call (``call_and_answer``)
text after a call                                ``text_after_call``      the call (``text_after_call``)
a call tag that is not closed                    ``unclosed_call``        the call (``unclosed_call``)
malformed JSON, keys or tags                     ``malformed_call``       mended (``json``, ``shape``), or the same
a tool without its prefix                        the call (it fails)      the call (``tool_name``)
an integer written as text                       the call (it fails)      the call (``argument_type``)
unknown tool, missing or wrong arguments         the call (it fails)      the call (it fails)
nothing of all this                              nothing                  nothing
=============================================== ======================== ======================================

A call that fails is an error observation of the browser. Nothing ends the episode (stop reason ``parse``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trace_fast.trainer.harness.call_formats import Call, CallFormat, Written, find_calls
from trace_fast.trainer.harness.mending import mend_call, mend_payload
from trace_fast.trainer.harness.reward import OPEN, answer_blocks, well_formed

InvalidKind = Literal[
    "call_in_reasoning", "several_calls", "call_and_answer", "text_after_call", "unclosed_call", "malformed_call"
]
_THINK, _END_THINK = "<think>", "</think>"
_MESSAGES: dict[InvalidKind, str] = {
    "call_in_reasoning": "the tool call stands inside the reasoning; close the reasoning first",
    "several_calls": "expected one tool call a turn, got more; none was carried out",
    "call_and_answer": "expected a tool call or an answer, got both; the call was not carried out",
    "text_after_call": "expected nothing after the tool call; it was not carried out",
    "unclosed_call": "the tool call is not closed",
    "malformed_call": "the tool call cannot be read",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A final answer; it may be empty."""

    text: str
    well_formed: bool


@dataclass(frozen=True, slots=True)
class Invalid:
    """An action that cannot be carried out; ``message`` is what the policy gets to read."""

    kind: InvalidKind
    message: str


@dataclass(frozen=True, slots=True)
class Nothing:
    """Neither a call nor an answer."""


Action = Call | Answer | Invalid | Nothing


@dataclass(frozen=True, slots=True)
class Parsed:
    """``repairs``: names of what was mended, empty under ``strict``."""

    action: Action
    repairs: tuple[str, ...] = ()


def split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """``(reasoning, rest)``; ``opened``: the generation prompt already wrote ``<think>``."""
    begin = len(text) - len(text.lstrip())
    if text.startswith(_THINK, begin):
        begin += len(_THINK)
    elif not opened and (_END_THINK not in text or _THINK in text[: text.find(_END_THINK)]):
        return "", text
    reasoning, closing, rest = text[begin:].partition(_END_THINK)
    return (reasoning, rest) if closing else (text[begin:], "")


class ActionParser:
    """Reads what the policy wrote in a turn, without its end-of-turn token.

    Args:
        call_format: how calls are written. repair: mend what can be understood.
        thinking_open: whether the generation prompt leaves reasoning open.
    """

    def __init__(self, call_format: CallFormat, *, repair: bool, thinking_open: bool) -> None:
        self._format: CallFormat = call_format
        self._repair = repair
        self._thinking_open = thinking_open

    def parse(self, text: str) -> Parsed:
        """By the table above."""
        reasoning, visible = split_reasoning(text, self._thinking_open)
        calls = find_calls(visible, self._format)
        if calls:
            return self._mended(visible, calls) if self._repair else Parsed(self._strict(visible, calls))
        blocks = answer_blocks(visible)
        if blocks:
            return Parsed(Answer(blocks[-1], well_formed(visible)))
        if self._repair and OPEN in visible:
            return Parsed(Answer(visible.rpartition(OPEN)[2].strip(), False), ("unclosed_answer",))
        hidden = find_calls(reasoning, self._format)
        if not hidden:
            return Parsed(Nothing())
        if not self._repair:
            return Parsed(_invalid("call_in_reasoning"))
        found = self._mended(reasoning, hidden[-1:])
        return Parsed(found.action, ("call_in_reasoning", *found.repairs))

    def _strict(self, visible: str, calls: list[Written]) -> Action:
        if len(calls) > 1 or calls[0].more:
            return _invalid("several_calls")
        written = calls[0]
        if written.call is None:
            return _invalid("malformed_call", written.problem)
        if not written.closed:
            return _invalid("unclosed_call")
        before, after = visible[: written.start], visible[written.end :]
        if OPEN in before or OPEN in after:
            return _invalid("call_and_answer")
        return _invalid("text_after_call") if after.strip() else written.call

    def _mended(self, visible: str, calls: list[Written]) -> Parsed:
        written = calls[0]
        repairs: list[str] = []
        if len(calls) > 1 or written.more:
            repairs.append("several_calls")
        call = written.call
        if call is None:
            mended = mend_payload(written.payload)
            if mended is None:
                return Parsed(_invalid("malformed_call", written.problem), tuple(repairs))
            call, kinds = mended
            repairs += kinds
        if not written.closed:
            repairs.append("unclosed_call")
        after = visible[written.end :]
        if OPEN in visible[: written.start] or OPEN in after:
            repairs.append("call_and_answer")
        elif after.strip() and len(calls) == 1:
            repairs.append("text_after_call")
        call, kinds = mend_call(call)
        return Parsed(call, (*repairs, *kinds))


def _invalid(kind: InvalidKind, detail: str = "") -> Invalid:
    return Invalid(kind, f"{_MESSAGES[kind]}: {detail}" if detail else _MESSAGES[kind])
