"""What is scored: a rollout's tokens, its tool-call boundaries, its gold answers and its outcome.

A rollout is prompt, T tool turns (assistant action + tool observation) and, when it finished, a final answer.
``boundaries[k]`` counts tokens: b_0 ends the prompt, b_k the k-th observation, b_{T+1} the final answer.
State S_k = ``prefix(k)`` + ``openers[k]``; only the gold answer after it is scored (TRACE, Section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trace_fast.errors import RolloutError

PROMPT_TURN = -1  # turn index of prompt tokens and prompt segments


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the transcript as people read it; never re-tokenised.

    ``role`` is ``"system" | "user" | "assistant" | "tool" | "prompt"``. ``turn`` is -1 in the prompt, k for the
    action and observation of turn k (0-based), T for the final answer. ``tool`` names the tool called
    (assistant) or answering (tool), when known; several calls are joined by ``", "``.
    """

    role: str
    text: str
    turn: int
    tool: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One agent rollout, tokenised. All arrays are NumPy and read-only by convention.

    Args:
        id, group: names; rollouts of one prompt share the group.
        input_ids: ``(N,) int64`` all tokens of the rollout, as they are trained on.
        boundaries: ``(S,) int64`` token counts, S = T+2 when finished, T+1 when cut off before an answer.
        n_turns: T.
        answers: one ``(A,) int64`` array per accepted spelling (alias) of the gold answer, none empty.
        openers: one ``(O,) int64`` array per state: the conditioned, never scored, answer-ready text.
        answer_texts: text of each alias, when the answers came as text.
        state_prefixes: only where a chat template rewrites history, so that prefixes are not nested: the S
            prefixes in full. ``None`` means ``prefix(k) == input_ids[:boundaries[k]]``.
        loss_mask: ``(N,) bool`` True where the policy wrote the token; ``None`` when that is unknown.
        logprobs: ``(N,) float32`` the sampler's log-probabilities (nats), when recorded.
        reward: outcome R of the verifier, when recorded.
        transcript: the text, by segment, for reports.
        extra: unknown keys of the record, carried through to the output.
        source: ``file:line``.
        notes: what the reader had to decide, in words (counted in summaries).

    Raises:
        RolloutError: kinds ``boundary``, ``answer``, ``format``; nothing is repaired silently.
    """

    id: str
    group: str
    input_ids: np.ndarray
    boundaries: np.ndarray
    n_turns: int
    answers: tuple[np.ndarray, ...]
    openers: tuple[np.ndarray, ...]
    answer_texts: tuple[str, ...] | None = None
    state_prefixes: tuple[np.ndarray, ...] | None = None
    loss_mask: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    reward: float | None = None
    transcript: tuple[Segment, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    source: str = "<memory>"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("input_ids", "boundaries"):
            object.__setattr__(self, name, self._ids(name, getattr(self, name)))
        object.__setattr__(self, "answers", tuple(self._ids("answers", a) for a in self.answers))
        object.__setattr__(self, "openers", tuple(self._ids("openers", o) for o in self.openers))
        if self.state_prefixes is not None:
            object.__setattr__(
                self, "state_prefixes", tuple(self._ids("state_prefixes", p) for p in self.state_prefixes)
            )
        self._check_boundaries()
        self._check_answers()
        self._check_per_token()

    # --- what the engine asks -------------------------------------------------------------------------------

    @property
    def n_states(self) -> int:
        """S: T+2 when finished, T+1 when cut off."""
        return len(self.boundaries)

    @property
    def finished(self) -> bool:
        """Whether a final answer was written (S = T+2)."""
        return self.n_states == self.n_turns + 2

    @property
    def nested(self) -> bool:
        """Whether every state is a prefix of ``input_ids`` (False where a template rewrote history)."""
        return self.state_prefixes is None

    def prefix(self, state: int) -> np.ndarray:
        """``(b_k,) int64`` tokens before the opener of state k."""
        if self.state_prefixes is not None:
            return self.state_prefixes[state]
        return self.input_ids[: self.boundaries[state]]

    def token_turns(self) -> np.ndarray:
        """``(N,) int64`` turn of each token: -1 prompt, k in (b_k, b_{k+1}], T from b_T on (final answer).

        Raises ``RolloutError`` where history was rewritten: no token then has one place.
        """
        if not self.nested:
            raise self._error(
                "inexact",
                "its chat template rewrites history between turns, so its tokens have no single place in the "
                "rollout; give it in tokens form for token-level advantages",
            )
        turns = np.searchsorted(self.boundaries[: self.n_turns + 1], np.arange(len(self.input_ids)), side="right")
        return turns - 1

    # --- checks ---------------------------------------------------------------------------------------------

    def _error(self, kind: str, reason: str) -> RolloutError:
        return RolloutError(kind, reason, rollout_id=self.id, source=self.source)

    def _ids(self, name: str, values: Any) -> np.ndarray:
        array = np.asarray(values)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise self._error("format", f"{name}: expected a flat list of integers, got {_describe(values)}")
        return np.ascontiguousarray(array, dtype=np.int64)

    def _check_boundaries(self) -> None:
        states = len(self.boundaries)
        if self.n_turns < 0 or states not in (self.n_turns + 1, self.n_turns + 2):
            raise self._error(
                "boundary",
                f"expected T+1 or T+2 boundaries for T = {self.n_turns} turns, got {states}",
            )
        if len(self.openers) != states:
            raise self._error("format", f"expected one opener a state ({states}), got {len(self.openers)}")
        if self.state_prefixes is not None:
            if len(self.state_prefixes) != states:
                raise self._error("boundary", f"expected {states} state prefixes, got {len(self.state_prefixes)}")
        else:
            steps = np.diff(self.boundaries)
            if (steps < 0).any():
                k = int(np.argmax(steps < 0))
                raise self._error(
                    "boundary",
                    f"boundaries must not decrease, got b_{k} = {self.boundaries[k]} > "
                    f"b_{k + 1} = {self.boundaries[k + 1]}",
                )
            if self.boundaries[0] < 0 or self.boundaries[-1] > len(self.input_ids):
                raise self._error(
                    "boundary",
                    f"boundaries must lie within 0..{len(self.input_ids)} (the number of tokens), got "
                    f"{self.boundaries[0]}..{self.boundaries[-1]}",
                )
        for k in range(states):
            if len(self.prefix(k)) + len(self.openers[k]) == 0:
                raise self._error(
                    "boundary",
                    f"state {k} has no token at all (empty prompt and empty opener), so nothing predicts the answer",
                )

    def _check_answers(self) -> None:
        if not self.answers:
            raise self._error("answer", "expected at least one gold answer, got none")
        for i, answer in enumerate(self.answers):
            if not len(answer):
                raise self._error("answer", f"gold answer {i} is empty; an empty answer has no log-probability")
        if self.answer_texts is not None and len(self.answer_texts) != len(self.answers):
            raise self._error(
                "format", f"expected {len(self.answers)} answer texts (one an alias), got {len(self.answer_texts)}"
            )

    def _check_per_token(self) -> None:
        n = len(self.input_ids)
        if self.loss_mask is not None:
            mask = np.asarray(self.loss_mask)
            if mask.shape != (n,):
                raise self._error("format", f"loss_mask: expected {n} entries (one a token), got {_describe(mask)}")
            object.__setattr__(self, "loss_mask", mask.astype(bool))
        if self.logprobs is not None:
            logprobs = np.asarray(self.logprobs, dtype=np.float32)
            if logprobs.shape != (n,):
                raise self._error("format", f"logprobs: expected {n} entries (one a token), got {_describe(logprobs)}")
            object.__setattr__(self, "logprobs", logprobs)
        if self.reward is not None:
            reward = float(self.reward)
            if not np.isfinite(reward):
                raise self._error("format", f"reward: expected a finite number, got {self.reward!r}")
            object.__setattr__(self, "reward", reward)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The rollouts of one prompt, in input order; outcome advantages are relative to it (Section 3.3)."""

    id: str
    rollouts: tuple[Rollout, ...]


def group_rollouts(rollouts: Iterable[Rollout]) -> list[RolloutGroup]:
    """Collects rollouts by ``group``, groups in order of first appearance, whether adjacent or not."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return [RolloutGroup(name, tuple(members)) for name, members in groups.items()]


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        odd = next((v for v in value if not isinstance(v, int)), None)
        return f"{len(value)} entries" + (f", one of them {odd!r}"[:80] if odd is not None else "")
    return f"{type(value).__name__}"
