"""Builders of small rollouts and scores to train on; used by tests of several rooms, and by their processes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore

Turn = tuple[Sequence[int], Sequence[int]]  # ids that the policy wrote, ids that the tool wrote


def build_rollout(
    name: str,
    turns: Sequence[Turn],
    answer: Sequence[int] | None,
    *,
    reward: float | None = 0.0,
    group: str = "g",
    prompt: Sequence[int] = (7, 8),
    logprob: float = -1.0,
) -> Rollout:
    """``answer`` None is a rollout that was cut off. Log-probabilities are NaN where the policy wrote nothing."""
    ids, mask, boundaries = list(prompt), [False] * len(prompt), [len(prompt)]
    for action, observation in turns:
        ids += [*action, *observation]
        mask += [True] * len(action) + [False] * len(observation)
        boundaries.append(len(ids))
    if answer is not None:
        ids += answer
        mask += [True] * len(answer)
        boundaries.append(len(ids))
    return Rollout(
        id=name,
        group=group,
        input_ids=np.array(ids),
        boundaries=np.array(boundaries),
        n_turns=len(turns),
        answers=(np.array([1, 2]),),
        openers=(np.array([3]),) * len(boundaries),
        loss_mask=np.array(mask),
        logprobs=np.where(mask, logprob, np.nan),
        reward=reward,
    )


def build_score(rollout: Rollout, mean_logprobs: Sequence[float]) -> RolloutScore:
    scores = np.array(mean_logprobs, dtype=np.float64)
    return RolloutScore(
        id=rollout.id,
        group=rollout.group,
        n_turns=rollout.n_turns,
        boundaries=rollout.boundaries,
        mean_logprobs=scores,
        alias_mean_logprobs=scores[:, None],
        alias=np.zeros(len(scores), dtype=np.int64),
        token_logprobs=tuple(np.array([s], dtype=np.float32) for s in scores),
        answer=None,
        answer_ids=np.array([1, 2]),
        reward=rollout.reward,
    )


def build_random_rollouts(seed: int = 0, group_sizes: Sequence[int] = (4, 1, 3, 5)) -> list[Rollout]:
    """Groups of odd sizes, in mixed order; 0 to 4 turns, few distinct observations, some rollouts cut off."""
    rng = np.random.default_rng(seed)

    def draw(low: int, high: int) -> list[int]:
        return rng.integers(3, 50, rng.integers(low, high)).tolist()

    made = []
    for g, size in enumerate(group_sizes):
        prompt = draw(1, 9)
        for i in range(size):
            turns = [(draw(1, 6), [90 + int(rng.integers(2))] * 3) for _ in range(int(rng.integers(0, 5)))]
            answer = draw(1, 7) if rng.random() < 0.7 or not turns else None
            reward = float(rng.choice([0.0, 0.1, 1.1]))
            made.append(build_rollout(f"{g}.{i}", turns, answer, reward=reward, group=f"group {g}", prompt=prompt))
    order = rng.permutation(len(made))
    shuffled = [made[i] for i in order]
    for rollout in shuffled:
        rollout.logprobs[rollout.loss_mask] = -rng.exponential(1.0, int(rollout.loss_mask.sum()))
    return shuffled


def build_random_scores(rollouts: Sequence[Rollout], seed: int = 0) -> list[RolloutScore]:
    rng = np.random.default_rng(seed)
    return [build_score(rollout, -rng.exponential(3.0, rollout.n_states)) for rollout in rollouts]
