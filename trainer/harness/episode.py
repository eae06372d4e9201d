"""One episode: token ids that grow, from the prompt to the stop, and the rollout that comes of them.

An episode does no work of its own: it says what to generate next, takes what was generated, says which call to carry
out, and takes the observation. Ids are only ever appended. The loss mask follows who wrote a token: the policy's
generated ids, its end-of-turn token included, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from trace_fast.errors import ConfigError, TraceFastError
from trace_fast.rollout import PROMPT_TURN, Rollout, Segment
from trace_fast.trainer.engines.engine import FinishReason, Generation, Request
from trace_fast.trainer.harness.actions import ActionParser, Answer, Invalid, Nothing
from trace_fast.trainer.harness.call_formats import Call
from trace_fast.trainer.harness.config import HarnessConfig
from trace_fast.trainer.harness.diagnostics import Diagnostics
from trace_fast.trainer.harness.frame import ChatFrame, Piece
from trace_fast.trainer.harness.reward import judge
from trace_fast.trainer.search.browser import Browser, Observation

Clock = Callable[[], float]
# What an episode writes into its rollout's extra, over the question's own keys of these names.
RESULT_KEYS = frozenset(
    ("stop_reason", "prediction", "correct", "format_valid", "written_tokens", "engine_error", *Diagnostics().record())
)
INVALID_TOOL = "browser"  # name in the template of what answers a turn without a readable call


class StopReason(Enum):
    """Why an episode ended; only ``ANSWER`` finishes the rollout."""

    ANSWER = "answer"  # a final answer was given
    MAX_TURNS = "max_turns"  # another call after the last turn allowed
    CONTEXT = "context"  # the trajectory has no room for the next observation or for another token
    LENGTH = "length"  # one message of the policy reached its limit without an end
    PARSE = "parse"  # a message with neither a call nor an answer
    TIMEOUT = "timeout"  # out of wall time
    ENGINE_ERROR = "engine_error"  # the engine failed for this episode


@dataclass(frozen=True, slots=True)
class Task:
    """A question with its accepted answers. ``extra`` is carried through to the rollout."""

    id: str
    question: str
    answers: tuple[str, ...]
    extra: dict[str, Any] = field(default_factory=dict)


class Episode:
    """The state of one episode.

    Args:
        id, seed: of this sample of the task.
        browser: its own one.
        clock: seconds; the episode's time runs from its construction.

    Raises:
        ConfigError: the task has no usable gold answer. RolloutError: kind ``seam``, as ``ChatFrame.answers``.
    """

    def __init__(
        self,
        task: Task,
        frame: ChatFrame,
        browser: Browser,
        config: HarnessConfig,
        parser: ActionParser,
        *,
        id: str,
        seed: int,
        clock: Clock,
    ) -> None:
        if not task.answers or not all(answer.strip() for answer in task.answers):
            raise ConfigError(f"task {task.id!r}: answers: expected at least one and none blank, got {task.answers!r}")
        self._task = task
        self._frame = frame
        self._browser = browser
        self._config = config
        self._parser = parser
        self._id = id
        self._seed = seed
        self._clock = clock
        self._answers = frame.answers(task.answers)
        self._diagnostics = Diagnostics()
        self._parts: list[tuple[np.ndarray, np.ndarray | None]] = []  # ids, and log-probabilities of the policy's
        self._length = 0
        self._boundaries: list[int] = []
        self._segments = [Segment("user", task.question, PROMPT_TURN)]
        self._asked = 0  # tokens of the request that waits for its generation
        self._answer: Answer | None = None
        self._error: str | None = None
        self.stop: StopReason | None = None
        self._append(frame.prompt(task.question))
        self._started = clock()

    @property
    def turns(self) -> int:
        """T so far."""
        return len(self._boundaries) - 1

    # --- the loop -----------------------------------------------------------------------------------------------

    def request(self) -> Request | None:
        """What to generate next; None when the episode has ended (``stop`` says why)."""
        if self.stop is not None:
            return None
        room = self._config.max_tokens - self._length
        if room < 1:
            self.stop = StopReason.CONTEXT
        elif self._clock() - self._started >= self._config.timeout_s:
            self.stop = StopReason.TIMEOUT
        if self.stop is not None:
            return None
        self._asked = min(room, self._config.max_response_tokens)
        return Request(
            prompt_ids=np.concatenate([ids for ids, _ in self._parts]),
            max_new_tokens=self._asked,
            stop_ids=self._frame.stop_ids,
            temperature=self._config.temperature,
            top_p=self._config.top_p,
            seed=int(np.random.SeedSequence([self._seed, self.turns]).generate_state(1, np.uint32)[0]),
        )

    def accept(self, generation: Generation) -> Call | Invalid | None:
        """Appends what was generated, reads it, and returns what to carry out; None when the episode has ended.

        Raises:
            TraceFastError: the engine's ids and log-probabilities do not belong together.
        """
        ids, logprobs = self._checked(generation)
        self._parts.append((ids, logprobs))
        self._length += len(ids)
        text = self._frame.written(ids)
        if generation.finish is not FinishReason.STOP:
            self._segments.append(Segment("assistant", text, self.turns))
            self._error = generation.error
            self.stop = self._unfinished(generation.finish)
            return None
        parsed = self._parser.parse(text)
        self._diagnostics.repaired(parsed.repairs)
        action = parsed.action
        tool = action.name if isinstance(action, Call) else None
        self._segments.append(Segment("assistant", text, self.turns, tool))
        if isinstance(action, Answer):
            self._answer, self.stop = action, StopReason.ANSWER
            self._boundaries.append(self._length)
            return None
        if isinstance(action, Nothing):
            self.stop = StopReason.PARSE
        elif self.turns >= self._config.max_turns:
            self.stop = StopReason.MAX_TURNS
        return action if self.stop is None and not isinstance(action, Nothing) else None

    def carry_out(self, action: Call | Invalid) -> Observation:
        """The observation of an action. Touches nothing but the browser, so episodes may do it at the same time."""
        if isinstance(action, Invalid):
            return Observation(f"Error: {action.message}", error=True)
        return self._browser.call(action.name, action.arguments)

    def observe(self, action: Call | Invalid, observation: Observation) -> None:
        """Appends an observation, which completes the turn; ends the episode where it does not fit."""
        if isinstance(action, Invalid):
            self._diagnostics.invalid(action.kind)
        else:
            self._diagnostics.called(action.name, action.arguments, observation)
        tool = action.name if isinstance(action, Call) else INVALID_TOOL
        piece = self._frame.after_call(observation.text, tool)
        if self._length + len(piece.ids) >= self._config.max_tokens:
            self.stop = StopReason.CONTEXT
            return
        self._segments.append(Segment("tool", observation.text, self.turns, tool))
        self._append(piece)

    # --- the result ---------------------------------------------------------------------------------------------

    def rollout(self) -> Rollout:
        """The episode as a rollout; after the stop only."""
        assert self.stop is not None
        n_turns = self.turns - (self.stop is StopReason.ANSWER)
        prediction = self._answer.text if self._answer is not None else None
        verdict = judge(
            prediction,
            self._answer is not None and self._answer.well_formed,
            self._task.answers,
            normaliser=self._config.normaliser,
            outcome_coefficient=self._config.outcome_coefficient,
            format_score=self._config.format_score,
        )
        written = [np.full(len(ids), logprobs is not None) for ids, logprobs in self._parts]
        sampled = [np.full(len(ids), np.nan, np.float32) if lp is None else lp for ids, lp in self._parts]
        mask = np.concatenate(written)
        result = {
            "stop_reason": self.stop.value,
            "prediction": prediction,
            "correct": verdict.correct,
            "format_valid": verdict.format_valid,
            "written_tokens": int(mask.sum()),
            **self._diagnostics.record(),
        }
        if self._error is not None:
            result["engine_error"] = self._error
        assert RESULT_KEYS.issuperset(result), result.keys()
        extra = {**self._task.extra, **result}
        return Rollout(
            id=self._id,
            group=self._task.id,
            input_ids=np.concatenate([ids for ids, _ in self._parts]),
            boundaries=np.asarray(self._boundaries, dtype=np.int64),
            n_turns=n_turns,
            answers=self._answers,
            openers=(self._frame.opener_ids,) * len(self._boundaries),
            answer_texts=tuple(self._task.answers),
            loss_mask=mask,
            logprobs=np.concatenate(sampled),
            reward=verdict.reward,
            transcript=tuple(self._segments),
            extra=extra,
        )

    # --- parts --------------------------------------------------------------------------------------------------

    def _append(self, piece: Piece) -> None:
        self._boundaries.append(self._length + piece.boundary)
        self._parts.append((piece.ids, None))
        self._length += len(piece.ids)

    def _checked(self, generation: Generation) -> tuple[np.ndarray, np.ndarray]:
        ids = np.asarray(generation.ids, dtype=np.int64)
        logprobs = np.asarray(generation.logprobs, dtype=np.float32)
        if ids.ndim != 1 or logprobs.shape != ids.shape:
            raise TraceFastError(
                f"engine: episode {self._id!r}, turn {self.turns}: expected one log-probability an id, got "
                f"{ids.shape} ids and {logprobs.shape} log-probabilities"
            )
        good = np.isfinite(logprobs) & (logprobs <= 0)
        if not good.all():
            at = int(np.argmin(good))
            raise TraceFastError(
                f"engine: episode {self._id!r}, turn {self.turns}: expected finite log-probabilities <= 0, got "
                f"{logprobs[at]} at id {at}"
            )
        stopped = bool(len(ids)) and int(ids[-1]) in self._frame.stop_ids
        if len(ids) > self._asked or (generation.finish is FinishReason.STOP and not stopped):
            raise TraceFastError(
                f"engine: episode {self._id!r}, turn {self.turns}: expected at most {self._asked} ids that end in one "
                f"of {self._frame.stop_ids} when it stopped, got {len(ids)} that end in {ids[-1:].tolist()}"
            )
        return ids, logprobs

    def _unfinished(self, finish: FinishReason) -> StopReason:
        if finish is FinishReason.ERROR:
            return StopReason.ENGINE_ERROR
        return StopReason.CONTEXT if self._length >= self._config.max_tokens else StopReason.LENGTH
