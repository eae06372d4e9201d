"""Outcome advantages: group statistics in any order, and what counts as equal rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_fast.credit import group_outcome_advantages
from trace_fast.errors import TraceFastError
from trace_fast.kernels.turn_credit import outcome_advantages


def by_hand(rewards: np.ndarray, groups: np.ndarray, ddof: int) -> np.ndarray:
    result = np.zeros(len(rewards))
    for group in np.unique(groups):
        members = rewards[groups == group]
        if np.ptp(members) > 0:
            result[groups == group] = (members - members.mean()) / members.std(ddof=ddof)
    return result


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-3, 6), st.sampled_from([0.0, 0.1, 1.0, 1.1, -1.0, 0.35])), max_size=60),
    st.sampled_from(["population", "sample"]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_equals_group_by_group_numpy(entries: list[tuple[int, float]], std: Any, ids: torch.dtype) -> None:
    groups = np.array([g for g, _ in entries], dtype=np.int64)
    rewards = np.array([r for _, r in entries], dtype=np.float64)
    got = outcome_advantages(torch.from_numpy(rewards), torch.from_numpy(groups).to(ids), std).numpy()
    np.testing.assert_allclose(got, by_hand(rewards, groups, int(std == "sample")), rtol=1e-12, atol=1e-14)


def test_float32_in_float32_out() -> None:
    got = outcome_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], rtol=4 * 2.0**-24)


def test_group_of_one_gets_zero_under_both_stds() -> None:
    for std in ("population", "sample"):
        got = outcome_advantages(torch.tensor([7.0, 1.0, 0.0]), torch.tensor([4, 9, 9]), std)
        assert got[0] == 0.0
        assert got[1] > 0 > got[2]


@pytest.mark.parametrize(
    "rewards",
    [
        [0.1 + 0.2, 0.3, 0.3, 0.3],
        [float(np.float32(0.1)), 0.1, 0.1],  # one of them came through float32
        [1.0, 1.0 + 2**-52, 1.0 - 2**-53],
        [float(np.float32(sum([0.1] * 10))), 1.0, float(np.sum(np.full(10, 0.1, dtype=np.float32)))],
        [-1e-30, -1e-30 * (1 + 1e-12)],
        [0.0, -0.0, 0.0],
    ],
)
@pytest.mark.parametrize("std", ["population", "sample"])
def test_float_dust_is_no_difference(rewards: list[float], std: Any) -> None:
    group = torch.zeros(len(rewards), dtype=torch.int64)
    assert outcome_advantages(torch.tensor(rewards, dtype=torch.float64), group, std).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize(("zero", "unit"), [(0.0, 1.0), (0.0, 1e-12), (0.0, 1e300), (0.0, 1e-300), (5.0, 1e-4)])
def test_small_and_large_units_of_reward_are_real_differences(zero: float, unit: float) -> None:
    """Dust is relative to the rewards' magnitude; squares of the differences neither overflow nor vanish."""
    rewards = torch.tensor([zero + unit, zero, zero, zero], dtype=torch.float64)
    got = outcome_advantages(rewards, torch.zeros(4, dtype=torch.int64)).numpy()
    np.testing.assert_allclose(got, [3**0.5] + [-(3**-0.5)] * 3, rtol=1e-11)


def test_the_threshold_is_eight_float32_epsilons() -> None:
    group = torch.zeros(2, dtype=torch.int64)
    for relative, expected in ((7.9, [0.0, 0.0]), (8.1, [-1.0, 1.0])):
        rewards = torch.tensor([1.0 - relative * 2**-23, 1.0], dtype=torch.float64)
        assert outcome_advantages(rewards, group).tolist() == pytest.approx(expected, abs=1e-12)


def test_no_rewards() -> None:
    assert outcome_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []
    assert group_outcome_advantages([], []) == []
    assert group_outcome_advantages([None, None], ["a", "a"]) == [None, None]


def test_missing_rewards_are_left_out_of_the_groups_statistics() -> None:
    got = group_outcome_advantages([1.0, None, 0.0, 0.5, None, 0.0], ["a", "a", "a", "b", "b", "a"])
    assert got[1] is None
    assert got[4] is None
    assert got[3] == 0.0  # alone in b among those with a reward
    assert [got[0], got[2], got[5]] == pytest.approx([2**0.5, -(2**-0.5), -(2**-0.5)], rel=1e-14)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (torch.tensor([1, 0]), torch.tensor([0, 0])),
            "rewards_R: expected torch.float32 or torch.float64, got torch.int64",
        ),
        ((torch.tensor([1.0, 0.0]), torch.tensor([0])), "group_ids_R: expected 2 entries, got 1"),
        (
            (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])),
            "group_ids_R: expected torch.int32 or torch.int64, got torch.float32",
        ),
        (
            (torch.tensor([1.0, float("nan")]), torch.tensor([0, 0])),
            r"rewards_R: expected finite numbers .* got nan at \[1\]",
        ),
        (
            (torch.tensor([-float("inf"), 1.0]), torch.tensor([0, 0])),
            r"rewards_R: expected finite numbers .* got -inf at \[0\]",
        ),
        (
            (torch.tensor([1.0]), torch.tensor([0]), "unbiased"),
            "std: expected 'population' or 'sample', got 'unbiased'",
        ),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TraceFastError, match=message):
        outcome_advantages(*arguments)


def test_lengths_of_rewards_and_groups_must_agree() -> None:
    with pytest.raises(TraceFastError, match="rewards and groups: expected equal lengths, got 2 and 1"):
        group_outcome_advantages([1.0, 0.0], ["a"])
