"""GiGPO: worked by hand, and against its equations a step at a time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from itertools import product

import pytest
import torch

from trace_fast.rollout import Rollout
from trace_fast.trainer.algorithms import GigpoConfig, gigpo
from trace_fast.trainer.batch import TrainingBatch, training_batch

MakeRollout = Callable[..., Rollout]
X, Y, Z = [50, 51], [60], [70]


@pytest.fixture
def batch(make_rollout: MakeRollout) -> TrainingBatch:
    """One prompt, rewards 1, 0 and 0.4. Actions, by what they answer:

    a: prompt, X, Y.   b: prompt, X.   c: prompt, Z, X (cut off after its third turn: it answers nothing then).
    """
    return training_batch(
        [
            make_rollout("a", [([1], X), ([2], Y)], [4, 4], reward=1.0),
            make_rollout("b", [([1], X)], [4], reward=0.0),
            make_rollout("c", [([1], Z), ([2], X), ([3], Y)], None, reward=0.4),
        ],
        dtype=torch.float64,
    )


def of_actions(batch: TrainingBatch, config: GigpoConfig) -> list[float]:
    """The advantage of each action with trained tokens; all its tokens must have the same."""
    advantages_N = gigpo.advantages(batch, config)
    assert (advantages_N[~batch.loss_mask_N] == 0).all()
    by_action = defaultdict(set)
    for action, advantage in zip(batch.action_N.tolist(), advantages_N.tolist(), strict=True):
        if action >= 0:
            by_action[action].add(advantage)
    assert all(len(values) == 1 for values in by_action.values())
    return [by_action[action].pop() for action in sorted(by_action)]


def test_steps_by_hand(batch: TrainingBatch) -> None:
    """Discount 0.5: returns a 0.25, 0.5, 1; b 0, 0; c 0.1, 0.2, 0.4.

    Prompt: 0.25, 0, 0.1, mean 0.35/3. X: 0.5, 0, 0.4, mean 0.3. Y and Z: alone (c's Y is not answered).
    """
    only_steps = of_actions(batch, GigpoConfig(discount=0.5, step_weight=1.0))
    without = of_actions(batch, GigpoConfig(discount=0.5, step_weight=0.0))
    steps = [joint - episode for joint, episode in zip(only_steps, without, strict=True)]
    m = 0.35 / 3
    assert steps == pytest.approx([0.25 - m, 0.2, 0, -m, -0.3, 0.1 - m, 0, 0.1], abs=1e-15)


def test_both_ways_to_count_rows_by_hand(batch: TrainingBatch) -> None:
    """Rewards once each: mean 1.4/3. Once an action: (3 · 1 + 2 · 0 + 3 · 0.4) / 8 = 0.525."""
    for rows, mean in (("rollout", 1.4 / 3), ("step", 0.525)):
        got = of_actions(batch, GigpoConfig(step_weight=0.0, episode_rows=rows))
        assert got == pytest.approx([1 - mean] * 3 + [-mean] * 2 + [0.4 - mean] * 3, rel=1e-14)


def test_mean_std_norm_by_hand(batch: TrainingBatch) -> None:
    """Rewards 1, 0, 0.4 have sample variance 0.76/3; X's returns 0.5, 0, 0.4 have 0.07; those of the prompt 0.38/24."""
    got = of_actions(batch, GigpoConfig(discount=0.5, norm="mean_std_norm"))
    episode = [(r - 1.4 / 3) / (0.76 / 3) ** 0.5 for r in (1, 1, 1, 0, 0, 0.4, 0.4, 0.4)]
    prompt, seen_x = (0.38 / 24) ** 0.5, 0.07**0.5
    m = 0.35 / 3
    steps = [(0.25 - m) / prompt, 0.2 / seen_x, 0, -m / prompt, -0.3 / seen_x, (0.1 - m) / prompt, 0, 0.1 / seen_x]
    assert got == pytest.approx([e + s for e, s in zip(episode, steps, strict=True)], rel=1e-12)


@pytest.mark.parametrize(("norm", "rows"), list(product(["mean_norm", "mean_std_norm"], ["rollout", "step"])))
def test_equals_the_equations_a_step_at_a_time(
    random_batch: Callable[..., TrainingBatch], norm: str, rows: str
) -> None:
    """Random rollouts of four groups, with repeated observations across and within rollouts."""
    config = GigpoConfig(norm=norm, episode_rows=rows, step_weight=0.7, discount=0.9)
    for seed in range(5):
        batch = random_batch(seed)
        owners, acted = batch.rollout_A.tolist(), set(batch.action_N.tolist())
        actions = [a for a in range(len(owners)) if a in acted]
        reward = {a: float(batch.rewards_R[owners[a]]) for a in actions}
        behind = {a: sum(owners[b] == owners[a] for b in actions if b > a) for a in actions}
        returns = {a: 0.9 ** behind[a] * reward[a] for a in actions}

        def relative(value: float, others: list[float]) -> float:
            spread = statistics.stdev(others) if len(others) > 1 else 0.0
            if spread < 1e-12:
                return 0.0
            return (value - statistics.fmean(others)) / (spread if config.norm == "mean_std_norm" else 1.0)

        wanted = []
        for a in actions:
            group = int(batch.group_ids_R[owners[a]])
            if config.episode_rows == "step":
                outcomes = [reward[b] for b in actions if int(batch.group_ids_R[owners[b]]) == group]
            else:
                outcomes = [float(batch.rewards_R[r]) for r in range(batch.n_rollouts) if batch.group_ids_R[r] == group]
            key = batch.observation_keys_A[a]
            same = [returns[b] for b in actions if batch.observation_keys_A[b] == key]
            wanted.append(relative(reward[a], outcomes) + 0.7 * relative(returns[a], same))
        assert of_actions(batch, config) == pytest.approx(wanted, rel=1e-9, abs=1e-12)
        assert any(abs(w) > 0.01 for w in wanted)


def test_returns_do_not_reset_at_tool_observations_verl_7278(make_rollout: MakeRollout) -> None:
    """The outcome reaches the first action through two observations, once a step, not once a token."""
    rollouts = [
        make_rollout("a", [([1] * 5, [50] * 9), ([2] * 3, [60] * 2)], [4] * 7, reward=1.0),
        make_rollout("b", [], [4], reward=0.0),
    ]
    batch = training_batch(rollouts, dtype=torch.float64)
    got = of_actions(batch, GigpoConfig(discount=0.5, step_weight=1.0))
    # Episode terms are +-0.5; the prompt's two actions return 0.25 and 0.
    assert got == pytest.approx([0.5 + 0.125, 0.5, 0.5, -0.5 - 0.125], rel=1e-15)


def test_identical_observations_of_two_groups_are_apart(make_rollout: MakeRollout) -> None:
    outcomes = {"g": (0.0, 1.0), "h": (3.0, 4.0)}
    rollouts = [make_rollout(f"{r}", [([1], X)], [4], group=g, reward=r) for g in "gh" for r in outcomes[g]]
    both = training_batch(rollouts, dtype=torch.float64)
    alone = training_batch(rollouts[:2], dtype=torch.float64)
    assert of_actions(both, GigpoConfig())[:4] == of_actions(alone, GigpoConfig())
