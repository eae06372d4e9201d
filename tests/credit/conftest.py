"""Builders of small scores and rollouts for the credit tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore


@pytest.fixture(scope="session")
def make_score() -> Callable[..., RolloutScore]:
    """A score with given mean log-probabilities; finished (T = S - 2) unless ``n_turns`` says otherwise."""

    def build(
        mean_logprobs: Sequence[float],
        n_turns: int | None = None,
        *,
        id: str = "r",
        group: str = "g",
        reward: float | None = None,
    ) -> RolloutScore:
        scores = np.asarray(mean_logprobs, dtype=np.float64)
        return RolloutScore(
            id=id,
            group=group,
            n_turns=len(scores) - 2 if n_turns is None else n_turns,
            boundaries=np.arange(len(scores)),
            mean_logprobs=scores,
            alias_mean_logprobs=scores[:, None],
            alias=np.zeros(len(scores), dtype=np.int64),
            token_logprobs=tuple(np.array([s], dtype=np.float32) for s in scores),
            answer=None,
            answer_ids=np.array([1]),
            reward=reward,
        )

    return build


@pytest.fixture(scope="session")
def make_rollout() -> Callable[..., Rollout]:
    """A rollout from (tokens written by the policy, tokens of the environment) per part.

    ``prompt`` tokens, then one (action, observation) pair a turn, then the answer as (scaffold, policy) tokens or
    ``None`` for a rollout that was cut off.
    """

    def build(
        prompt: int,
        turns: Sequence[tuple[int, int]],
        answer: tuple[int, int] | None,
        *,
        id: str = "r",
        group: str = "g",
        masked: bool = True,
        token_id: int = 5,
    ) -> Rollout:
        mask = [False] * prompt
        boundaries = [prompt]
        for action, observation in turns:
            mask += [True] * action + [False] * observation
            boundaries.append(len(mask))
        if answer is not None:
            mask += [False] * answer[0] + [True] * answer[1]
            boundaries.append(len(mask))
        return Rollout(
            id=id,
            group=group,
            input_ids=np.full(len(mask), token_id),
            boundaries=np.array(boundaries),
            n_turns=len(turns),
            answers=(np.array([1, 2]),),
            openers=(np.array([3]),) * len(boundaries),
            loss_mask=np.array(mask) if masked else None,
        )

    return build
