"""``turn_credit``: from scores to one ``TurnCredit`` a rollout."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest

from trace_fast.config import CreditConfig
from trace_fast.credit import turn_credit
from trace_fast.errors import RolloutError, TraceFastError
from trace_fast.oracle_credit import reference_credit
from trace_fast.rollout_score import RolloutScore

MakeScore = Callable[..., RolloutScore]


def test_equals_the_oracle_with_advantages_from_the_scores_own_rewards(make_score: MakeScore) -> None:
    random = np.random.default_rng(0)
    groups = ["a", "b", "a", "c", "b", "a", "a"]
    rewards = [1.0, 0.5, 0.0, 1.0, 0.5, 0.0, 1.1]
    turns = [3, 0, 5, 1, 2, 0, 61]
    scores = [
        make_score(-random.exponential(2.0, t + 1 + i % 2), t, id=f"r{i}", group=g, reward=r)
        for i, (g, r, t) in enumerate(zip(groups, rewards, turns, strict=True))
    ]
    a = np.array([1.0, 0.0, 0.0, 1.1])
    a = (a - a.mean()) / a.std()
    outcome = [a[0], 0.0, a[1], 0.0, 0.0, a[2], a[3]]
    credit = turn_credit(scores)
    assert [c.id for c in credit] == [f"r{i}" for i in range(7)]
    assert [c.group for c in credit] == groups
    assert [c.n_turns for c in credit] == turns
    assert [c.outcome_advantage for c in credit] == pytest.approx(outcome, rel=1e-12)
    for got, score, a_out in zip(credit, scores, outcome, strict=True):
        expected = reference_credit(score.mean_logprobs, score.n_turns, a_out)
        np.testing.assert_allclose(got.values, expected.values, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(got.deltas, expected.deltas, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(got.rewards, expected.rewards, rtol=1e-12, atol=1e-15)


def test_std_option_reaches_the_advantages(make_score: MakeScore) -> None:
    scores = [make_score([-2.0, -1.0, -1.0], id=str(i), reward=r) for i, r in enumerate([1.0, 0.0])]
    assert [c.outcome_advantage for c in turn_credit(scores)] == pytest.approx([1.0, -1.0], rel=1e-14)
    sample = turn_credit(scores, CreditConfig(std="sample"))
    assert [c.outcome_advantage for c in sample] == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-14)


def test_missing_reward_means_no_terminal_term(make_score: MakeScore) -> None:
    rows = [-4.0, -2.0, -1.0]
    scores = [make_score(rows, id=str(i), reward=r) for i, r in enumerate([1.0, None, 0.0])]
    credit = turn_credit(scores)
    dense = float(np.log(4.1 / 2.1))
    assert credit[1].outcome_advantage is None
    assert credit[1].rewards.tolist() == pytest.approx([dense], rel=1e-14)
    assert credit[0].rewards.tolist() == pytest.approx([dense + 2.0 * 0.8], rel=1e-14)
    assert credit[2].rewards.tolist() == pytest.approx([dense - 2.0 * 0.8], rel=1e-14)


def test_given_advantages_replace_the_rewards(make_score: MakeScore) -> None:
    scores = [make_score([-4.0, -2.0, -1.0], id=str(i), reward=1.0) for i in range(2)]
    credit = turn_credit(scores, outcome_advantages=[0.25, None])
    dense = float(np.log(4.1 / 2.1))
    assert [c.outcome_advantage for c in credit] == [0.25, None]
    assert [c.rewards[0] for c in credit] == pytest.approx([dense + 1.6 * 0.25, dense], rel=1e-14)


def test_secured_at_is_the_first_state_at_or_above_the_threshold(make_score: MakeScore) -> None:
    rows = [
        [-3.0, -0.3, -5.0, -0.1],
        [-0.1, -9.0],
        [-3.0, -0.3000001, -1.0],
        [-2.0, -2.0, -0.2],
        [-1.0],
    ]
    scores = [make_score(row, max(len(row) - 2, 0), id=str(i)) for i, row in enumerate(rows)]
    assert [c.secured_at for c in turn_credit(scores)] == [1, 0, None, 2, None]
    assert [c.secured_at for c in turn_credit(scores, CreditConfig(secured_threshold=-1.0))] == [1, 0, 1, 2, 0]


def test_secured_threshold_changes_no_credit(make_score: MakeScore) -> None:
    score = make_score([-3.0, -0.3, -5.0, -0.1])
    one, other = (turn_credit([score], CreditConfig(secured_threshold=t))[0] for t in (-0.3, -4.0))
    assert one.secured_at != other.secured_at
    assert one.rewards.tobytes() == other.rewards.tobytes()


def test_no_scores() -> None:
    assert turn_credit([]) == []
    with pytest.raises(TraceFastError, match="outcome_advantages: expected 0 entries"):
        turn_credit([], outcome_advantages=[1.0])


def test_arrays_are_read_only_and_survive_pickling(make_score: MakeScore) -> None:
    credit = turn_credit([make_score([-2.0, -1.0, -0.5], id="a"), make_score([-9.0, -1.0], 0, id="b")])
    with pytest.raises(ValueError, match="read-only"):
        credit[0].values[0] = 1.0
    again = pickle.loads(pickle.dumps(credit[0]))
    assert again.values.tolist() == credit[0].values.tolist()
    assert len(pickle.dumps(credit[0])) < 2000


def test_float32_scores_are_taken_at_their_value(make_score: MakeScore) -> None:
    exact = np.array([-3.3, -1.7, -0.2], dtype=np.float32)
    got = turn_credit([make_score(exact)])[0]
    np.testing.assert_array_equal(got.deltas, turn_credit([make_score(exact.astype(np.float64))])[0].deltas)


def test_states_that_do_not_fit_the_turns_name_the_rollout(make_score: MakeScore) -> None:
    scores = [make_score([-1.0, -2.0]), make_score([-1.0, -2.0], 3, id="short")]
    with pytest.raises(RolloutError, match=r"'short': .*expected T\+1 or T\+2 states for T = 3 turns, got 2") as raised:
        turn_credit(scores)
    assert raised.value.kind == "boundary"


def test_reward_that_is_not_finite_names_the_rollout(make_score: MakeScore) -> None:
    with pytest.raises(RolloutError, match="'odd': reward: expected a finite number, got nan"):
        turn_credit([make_score([-1.0, -2.0], id="odd", reward=float("nan"))])


@pytest.mark.parametrize(
    ("given", "message"),
    [([1.0], "expected 2 entries .* got 1"), ([1.0, float("inf")], "expected finite numbers, got inf for 'b'")],
)
def test_bad_outcome_advantages(make_score: MakeScore, given: list[float], message: str) -> None:
    scores = [make_score([-1.0, -2.0], id=name) for name in "ab"]
    with pytest.raises(TraceFastError, match=f"outcome_advantages: {message}"):
        turn_credit(scores, outcome_advantages=given)
