"""Every number that the paper and its companion text state, through this package's functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from trace_fast.config import CreditConfig
from trace_fast.credit import TurnCredit, group_outcome_advantages, turn_credit
from trace_fast.kernels.turn_credit import outcome_advantages
from trace_fast.oracle_credit import reference_credit
from trace_fast.rollout_score import RolloutScore

MakeScore = Callable[..., RolloutScore]

# Table of Appendix A.5: one-step credits; the last entry is answer generation. P: successful, N: failed rollouts.
A5_DELTAS = {
    "P1": [6.39, 0.59, 0.10, 0.05],
    "P2": [1.63, -1.03, -1.04, 6.05, 0.03],
    "P3": [0.88, 5.86, 0.00, -0.00],
    "P4": [5.48, 0.06, 0.00],
    "P5": [1.18, -0.12, -0.19, -0.14, 0.43, 5.44, 0.02, 0.00],
    "N1": [1.47, 0.13, 1.49, -0.00, -4.83, -0.78],
    "N2": [2.31, 0.10, -1.32, 0.09, 0.35, 0.98, -4.05, -1.09],
    "N3": [2.19, -0.35, 0.10, -1.03, 0.96, 0.50, -3.63, 0.19, -1.22],
    "N4": [1.42, -0.10, 0.82, 0.08, -3.41, -0.97],
    "N5": [2.00, 0.43, 0.06, -2.46, 0.40, 1.98, -3.48, -1.03],
}
A5_CRITICAL_TURN = {"P1": 0, "P2": 3, "P3": 1, "P4": 0, "P5": 5, "N1": 4, "N2": 6, "N3": 6, "N4": 4, "N5": 6}


def from_deltas(make_score: MakeScore, deltas: Sequence[float], config: CreditConfig, **named: object) -> RolloutScore:
    """The score whose log-ratio credit is ``deltas``; its smallest gap is the offset, where the answer is certain."""
    closed = np.concatenate(([0.0], np.cumsum(deltas)))
    gaps = config.gap_offset * np.exp(closed.max() - closed)
    return make_score(np.minimum(config.gap_offset - gaps, 0.0), **named)


def credit_of(make_score: MakeScore, scores: Sequence[float], config: CreditConfig, n_turns: int) -> TurnCredit:
    return turn_credit([make_score(scores, n_turns)], config)[0]


@pytest.mark.parametrize(("before", "after", "credit"), [(-5.1187, -1.5712, 1.1806), (-10.6570, -7.1061, 0.4052)])
def test_a2_log_ratio_credit(make_score: MakeScore, before: float, after: float, credit: float) -> None:
    got = credit_of(make_score, [before, after], CreditConfig(gap_offset=1e-3), n_turns=1)
    assert got.deltas.tolist() == pytest.approx([credit], abs=5e-5)  # four printed decimals
    assert got.values.tolist() == pytest.approx([0.0, credit], abs=5e-5)


def test_a2_raw_gains_are_near_equal_and_log_ratio_separates_them(make_score: MakeScore) -> None:
    pairs = [[-5.1187, -1.5712], [-10.6570, -7.1061]]
    raw = [credit_of(make_score, p, CreditConfig(form="raw"), 1).deltas[0] for p in pairs]
    assert raw == pytest.approx([3.5475, 3.5509], abs=1e-12)
    log_ratio = [credit_of(make_score, p, CreditConfig(gap_offset=1e-3), 1).deltas[0] for p in pairs]
    assert log_ratio[0] > 2.5 * log_ratio[1]


@pytest.mark.parametrize("name", A5_DELTAS)
def test_a5_credit_sums_and_critical_turn(make_score: MakeScore, name: str) -> None:
    config = CreditConfig(gap_offset=1e-3)
    expected = A5_DELTAS[name]
    got = turn_credit([from_deltas(make_score, expected, config)], config)[0]
    assert got.n_turns == len(expected) - 1
    np.testing.assert_allclose(got.deltas, expected, rtol=0, atol=1e-12)
    # Telescoping: the tool turns' credit is V_T, all of it is V_{T+1}.
    assert got.deltas[:-1].sum() == pytest.approx(got.values[-2], abs=1e-12)
    assert got.values[-1] == pytest.approx(sum(expected), abs=1e-12)
    tool_turns = got.deltas[: got.n_turns]
    critical = tool_turns.argmax() if name.startswith("P") else tool_turns.argmin()
    assert critical == A5_CRITICAL_TURN[name]


@pytest.mark.parametrize("name", A5_DELTAS)
def test_a5_answer_generation_is_no_turns_credit(make_score: MakeScore, name: str) -> None:
    config = CreditConfig(gap_offset=1e-3, horizon=100)
    finished = turn_credit([from_deltas(make_score, A5_DELTAS[name], config)], config)[0]
    other_answer = [*A5_DELTAS[name][:-1], -5.0]
    np.testing.assert_allclose(
        finished.rewards,
        turn_credit([from_deltas(make_score, other_answer, config)], config)[0].rewards,
        rtol=0,
        atol=1e-12,
    )
    assert len(finished.rewards) == len(A5_DELTAS[name]) - 1


# --- the asserts of the companion text, block 1: state value and one-step credit ------------------------------------


def test_redundant_turns_get_nothing_and_credit_telescopes(make_score: MakeScore) -> None:
    scores = [-6.0, -4.0, -4.0, -4.0, -1.0]
    got = credit_of(make_score, scores, CreditConfig(gap_offset=0.1), n_turns=4)
    assert got.values[0] == 0.0
    assert got.deltas[1] == 0.0
    assert got.deltas[2] == 0.0
    assert got.deltas.sum() == pytest.approx(got.values[-1] - got.values[0], abs=1e-12)
    assert got.deltas.sum() == pytest.approx(np.log(6.1 / 1.1), abs=1e-12)
    assert got.deltas.sum() == pytest.approx(1.7130, abs=5e-5)


def test_harmful_transition_is_sharply_negative(make_score: MakeScore) -> None:
    got = credit_of(make_score, [-3.0, -1.0, -1.0, -5.0], CreditConfig(gap_offset=0.1), n_turns=3)
    np.testing.assert_allclose(got.deltas, np.log([3.1 / 1.1, 1.0, 1.1 / 5.1]), rtol=1e-14)
    assert got.deltas[0] > 0
    assert got.deltas[2] < -1.0


def test_near_certainty_stays_finite(make_score: MakeScore) -> None:
    got = credit_of(make_score, [-8.0, -0.5, -1e-6], CreditConfig(gap_offset=0.1), n_turns=2)
    np.testing.assert_allclose(got.deltas, np.log([8.1 / 0.6, 0.6 / 0.100001]), rtol=1e-14)


# --- block 2: K-step backup, terminal fill, outcome advantage -------------------------------------------------------


def rewards_of(
    make_score: MakeScore, deltas: Sequence[float], horizon: int, discount: float, terminal_scale: float, a_out: float
) -> np.ndarray:
    """Turn rewards of given one-step credits; ``raw`` credit of scores that end at 0 reproduces them closely."""
    config = CreditConfig(horizon=horizon, discount=discount, terminal_scale=terminal_scale, form="raw")
    scores = np.concatenate(([0.0], np.cumsum(deltas)))
    score = make_score(scores - scores.max(), n_turns=len(deltas))
    return turn_credit([score], config, outcome_advantages=[a_out])[0].rewards


DELTAS = [0.8, -0.3, 1.5, 0.1, 2.0]


def test_horizon_one_is_the_one_step_credit(make_score: MakeScore) -> None:
    np.testing.assert_allclose(rewards_of(make_score, DELTAS, 1, 0.8, 0.0, 0.0), DELTAS, rtol=0, atol=1e-14)


def test_horizon_zero_without_terminal_term_is_zero(make_score: MakeScore) -> None:
    assert rewards_of(make_score, DELTAS, 0, 0.8, 0.0, 1.0).tolist() == [0.0] * 5


def test_horizon_zero_fills_the_last_turn_only(make_score: MakeScore) -> None:
    got = rewards_of(make_score, DELTAS, 0, 0.8, 2.0, 1.0)
    assert got[:-1].tolist() == [0.0] * 4
    assert got[-1] == pytest.approx(2.0 * 0.8, rel=1e-15)


def test_terminal_term_reaches_turns_whose_window_reaches_the_end(make_score: MakeScore) -> None:
    filled = rewards_of(make_score, DELTAS, 3, 0.8, 2.0, 1.0)
    dense = rewards_of(make_score, DELTAS, 3, 0.8, 0.0, 0.0)
    assert filled[:2].tolist() == dense[:2].tolist()
    np.testing.assert_allclose(filled[2:] - dense[2:], [2 * 0.8**3, 2 * 0.8**2, 2 * 0.8], rtol=1e-14)
    z3, z2 = 1 + 0.8 + 0.64, 1 + 0.8
    expected = [
        (0.8 - 0.3 * 0.8 + 1.5 * 0.64) / z3,
        (-0.3 + 1.5 * 0.8 + 0.1 * 0.64) / z3,
        (1.5 + 0.1 * 0.8 + 2.0 * 0.64) / z3,
        (0.1 + 2.0 * 0.8) / z2,
        2.0,
    ]
    np.testing.assert_allclose(dense, expected, rtol=1e-14)


def test_outlier_is_damped_by_a_wide_window(make_score: MakeScore) -> None:
    spike = [0.1, 0.1, 50.0, 0.1, 0.1]
    wide = rewards_of(make_score, spike, 5, 0.8, 0.0, 0.0)
    narrow = rewards_of(make_score, spike, 1, 0.8, 0.0, 0.0)
    assert narrow[2] == pytest.approx(50.0, abs=1e-12)
    assert 0 < wide[0] < narrow[2]
    assert wide[0] == pytest.approx(9.6002, abs=5e-5)


def test_horizon_beyond_a_single_turn_clamps(make_score: MakeScore) -> None:
    got = rewards_of(make_score, [1.2], 10, 0.8, 2.0, -1.0)
    assert got.tolist() == pytest.approx([1.2 + 2.0 * 0.8 * -1.0], abs=1e-12)


@pytest.mark.parametrize("std", ["population", "sample"])
def test_equal_rewards_give_exactly_zero(std: str) -> None:
    rewards = torch.ones(4, dtype=torch.float64)
    assert outcome_advantages(rewards, torch.zeros(4, dtype=torch.int64), std).tolist() == [0.0] * 4


@pytest.mark.parametrize(("std", "size"), [("population", 1.0), ("sample", (7 / 8) ** 0.5)])
def test_mixed_rewards(std: str, size: float) -> None:
    """Half right, half wrong, eight rollouts: population std 1/2, sample std 1/2 sqrt(8/7)."""
    got = group_outcome_advantages([1.0, 0.0] * 4, ["g"] * 8, std)
    assert got == pytest.approx([size, -size] * 4, rel=1e-14)
    assert sum(a for a in got if a is not None) == pytest.approx(0.0, abs=1e-9)


def test_oracle_agrees_on_the_text_numbers() -> None:
    config = CreditConfig(form="raw", gap_offset=0.1)
    scores = np.cumsum([-5.0, 0.8, -0.3, 1.5, 0.1, 2.0])
    got = reference_credit(scores, 5, 1.0, config)
    z3, z2 = 1 + 0.8 + 0.64, 1 + 0.8
    expected = [
        (0.8 - 0.3 * 0.8 + 1.5 * 0.64) / z3,
        (-0.3 + 1.5 * 0.8 + 0.1 * 0.64) / z3,
        (1.5 + 0.1 * 0.8 + 2.0 * 0.64) / z3 + 2 * 0.8**3,
        (0.1 + 2.0 * 0.8) / z2 + 2 * 0.8**2,
        2.0 + 2 * 0.8,
    ]
    np.testing.assert_allclose(got.rewards, expected, rtol=1e-14)
    np.testing.assert_allclose(got.values, [0.0, 0.8, 0.5, 2.0, 2.1, 4.1], rtol=1e-14)
