"""What the importers make of a record before any tokenizer is asked: a chat, text segments, or tokens.

Turn rules (TRACE, Section 3.1): everything before the policy's first message is the prompt; a
turn is an action and the group of observations that answers it, so several tool calls in one message, with their
several tool messages, are one turn; messages of others between turns belong to the span they lie in; a last
message of the policy after the last observation is the final answer, unless it still waits for tool results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trace_fast.rollout import PROMPT_TURN, Segment


@dataclass(frozen=True, slots=True)
class Step:
    """One message or segment as the turn rules see it.

    ``role`` as in ``Segment``; ``observation``: it answers a tool call; ``waits``: it is an action (or an answer
    that was cut off), so it cannot be the final answer.
    """

    role: str
    text: str
    observation: bool = False
    waits: bool = False
    tool: str | None = None


@dataclass(frozen=True, slots=True)
class Turns:
    """Ends of the states, counted in steps: S entries, T+2 when finished, T+1 when cut off."""

    ends: tuple[int, ...]
    n_turns: int

    @property
    def finished(self) -> bool:
        return len(self.ends) == self.n_turns + 2


def find_turns(steps: Sequence[Step], n_prompt: int | None = None) -> Turns:
    """Applies the turn rules; ``n_prompt`` is the number of prompt steps where the record says it."""
    first = next((i for i, step in enumerate(steps) if step.role == "assistant"), len(steps))
    start = first if n_prompt is None else n_prompt
    ends = [start]
    acted = False
    answer: int | None = None
    waits = False
    for i in range(start, len(steps)):
        step = steps[i]
        if step.observation:
            if acted or len(ends) == 1:
                ends.append(i + 1)
            else:  # more results of the same action
                ends[-1] = i + 1
            acted, answer, waits = False, None, False
        elif step.role == "assistant":
            acted, answer, waits = True, i + 1, step.waits
    n_turns = len(ends) - 1
    if answer is not None and not waits:
        ends.append(answer)
    return Turns(tuple(ends), n_turns)


def transcript(steps: Sequence[Step], turns: Turns) -> tuple[Segment, ...]:
    """The steps as people read them, each with its turn."""
    segments: list[Segment] = []
    turn_ends = turns.ends[: turns.n_turns + 1]
    turn = PROMPT_TURN
    for i, step in enumerate(steps):
        while turn + 1 < len(turn_ends) and i >= turn_ends[turn + 1]:
            turn += 1
        segments.append(Segment(step.role, step.text, turn, step.tool))
    return tuple(segments)


@dataclass(frozen=True, slots=True)
class Chat:
    """Normalised messages for a chat template; ``steps[i]`` belongs to ``messages[i]``."""

    messages: list[dict[str, Any]]
    steps: list[Step]
    tools: list[dict[str, Any]] | None = None
    n_prompt: int | None = None
    notes: tuple[str, ...] = ()

    def turns(self) -> Turns:
        return find_turns(self.steps, self.n_prompt)

    def transcript(self) -> tuple[Segment, ...]:
        return transcript(self.steps, self.turns())


@dataclass(frozen=True, slots=True)
class Pieces:
    """Text segments, tokenised one by one, no chat template."""

    steps: list[Step]
    notes: tuple[str, ...] = ()

    def turns(self) -> Turns:
        """The prompt is what leads up to the first segment of the policy or of a tool."""
        prompt = (i for i, step in enumerate(self.steps) if step.role == "assistant" or step.observation)
        return find_turns(self.steps, next(prompt, len(self.steps)))

    def transcript(self) -> tuple[Segment, ...]:
        return transcript(self.steps, self.turns())


@dataclass(frozen=True, slots=True)
class Tokens:
    """A record that came as token ids; arrays as in ``Rollout``."""

    input_ids: np.ndarray
    boundaries: np.ndarray
    n_turns: int
    openers: tuple[np.ndarray, ...] | None = None
    state_prefixes: tuple[np.ndarray, ...] | None = None
    loss_mask: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    segments: tuple[Segment, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def transcript(self) -> tuple[Segment, ...]:
        return self.segments


Body = Chat | Pieces | Tokens


@dataclass(frozen=True, slots=True)
class Parsed:
    """An importer's result: the body and the top-level keys it read."""

    body: Body
    consumed: frozenset[str]
