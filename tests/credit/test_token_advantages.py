"""Per-token advantages: which token gets which term, the answer tail, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_fast.advantages import token_advantages
from trace_fast.config import AdvantageConfig
from trace_fast.credit import TurnCredit, turn_credit
from trace_fast.errors import RolloutError, TraceFastError
from trace_fast.kernels.turn_credit import token_advantages_flat, token_turns_flat
from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore

MakeScore = Callable[..., RolloutScore]
MakeRollout = Callable[..., Rollout]


def credit_for(rollout: Rollout, rewards: list[float], outcome: float | None) -> TurnCredit:
    zeros = np.zeros(rollout.n_states)
    return TurnCredit(rollout.id, rollout.group, zeros, zeros[1:], np.array(rewards), outcome, None, rollout.n_turns)


def test_every_token_by_hand(make_rollout: MakeRollout) -> None:
    """3 prompt; turn 0: 2 + 2; turn 1: 1 + 1; answer: 1 scaffold + 2 policy tokens. A_out 0.5, r = 2 and -1."""
    rollout = make_rollout(3, [(2, 2), (1, 1)], (1, 2))
    config = AdvantageConfig(alpha_out=2.0, alpha_turn=0.25, answer_tail="constant", answer_tail_scale=0.5)
    got = token_advantages([rollout], [credit_for(rollout, [2.0, -1.0], 0.5)], config)[0]
    assert got.dtype == np.float32
    assert got.tolist() == [0, 0, 0, 1.5, 1.5, 0, 0, 0.75, 0, 0, 0.5, 0.5]


def test_paper_defaults(make_rollout: MakeRollout) -> None:
    rollout = make_rollout(1, [(1, 1)], (0, 1))
    got = token_advantages([rollout], [credit_for(rollout, [3.0], -1.0)])[0]
    np.testing.assert_array_equal(got, np.float32([0.0, -1.0 + 0.2 * 3.0, 0.0, 0.05 * -1.0]))


def test_group_mean_gives_every_answer_of_a_group_the_same_total_weight(make_rollout: MakeRollout) -> None:
    answers = {"a1": 2, "b1": 7, "a2": 6, "a3": 4, "b2": 1}
    rollouts = [make_rollout(1, [(1, 1)], (3, n), id=name, group=name[0]) for name, n in answers.items()]
    rollouts.append(make_rollout(1, [(1, 1)], None, id="a4", group="a"))  # no answer: not in the mean
    config = AdvantageConfig(alpha_turn=0.0, answer_tail_scale=0.5)
    credit = [credit_for(r, [0.0], 1.0) for r in rollouts]
    tails = {
        r.id: a[r.token_turns() == 1] for r, a in zip(rollouts, token_advantages(rollouts, credit, config), strict=True)
    }
    mean = {"a": 4.0, "b": 4.0}
    for name, n in answers.items():
        np.testing.assert_array_equal(tails[name], np.float32([0.0] * 3 + [0.5 * mean[name[0]] / n] * n))
    assert tails["a4"].tolist() == []


@pytest.mark.parametrize(
    ("tail", "weights"), [("constant", [0.05, 0.05]), ("off", [0.0, 0.0]), ("group_mean", [0.1, 0.1 / 3])]
)
def test_answer_tail_rules(make_rollout: MakeRollout, tail: Any, weights: list[float]) -> None:
    rollouts = [make_rollout(1, [], (0, n), id=str(n)) for n in (1, 3)]
    got = token_advantages(rollouts, [credit_for(r, [], 2.0) for r in rollouts], AdvantageConfig(answer_tail=tail))
    assert got[0].tolist() == pytest.approx([0.0, 2.0 * weights[0]], rel=1e-7)
    assert got[1].tolist() == pytest.approx([0.0] + [2.0 * weights[1]] * 3, rel=1e-7)


def test_unknown_outcome_keeps_the_turn_term_only(make_rollout: MakeRollout) -> None:
    rollout = make_rollout(1, [(1, 1), (1, 0)], (0, 2))
    got = token_advantages([rollout], [credit_for(rollout, [1.0, -2.0], None)])[0]
    np.testing.assert_array_equal(got, np.float32([0, 0.2, 0, -0.4, 0, 0]))


def test_cut_off_rollouts_last_words_count_as_its_answer(make_rollout: MakeRollout) -> None:
    """What the policy wrote after the last observation belongs to no turn; it gets the outcome, tail-weighted."""
    cut = make_rollout(1, [(1, 1)], None)
    longer = replace(cut, input_ids=np.full(5, 5), loss_mask=np.array([0, 1, 0, 1, 1], dtype=bool))
    got = token_advantages([longer], [credit_for(longer, [1.0], 1.0)])[0]
    np.testing.assert_array_equal(got, np.float32([0, 1.2, 0, 0.05, 0.05]))


def test_from_scores_to_tokens(make_score: MakeScore, make_rollout: MakeRollout) -> None:
    rollouts = [make_rollout(2, [(2, 1)], (0, 1), id="right"), make_rollout(1, [(1, 1)], (0, 1), id="wrong")]
    scores = [
        make_score([-4.0, -2.0, -1.0], id="right", reward=1.0),
        make_score([-4.0, -6.0, -9.0], id="wrong", reward=0.0),
    ]
    got = token_advantages(rollouts, turn_credit(scores))
    right = 1.0 + 0.2 * (np.log(4.1 / 2.1) + 2 * 0.8)
    wrong = -1.0 + 0.2 * (np.log(4.1 / 6.1) - 2 * 0.8)
    np.testing.assert_allclose(got[0], [0, 0, right, right, 0, 0.05], rtol=1e-6)
    np.testing.assert_allclose(got[1], [0, wrong, 0, -0.05], rtol=1e-6)


def test_no_rollouts() -> None:
    assert token_advantages([], []) == []


@st.composite
def rollouts_and_rewards(draw: st.DrawFn) -> list[tuple[int, list[tuple[int, int]], tuple[int, int] | None, str]]:
    spans = st.tuples(st.integers(0, 3), st.integers(0, 3))
    one = st.tuples(st.integers(1, 3), st.lists(spans, max_size=4), st.none() | spans, st.sampled_from(["a", "b", "c"]))
    return draw(st.lists(one, min_size=1, max_size=6))


@settings(max_examples=120, deadline=None)
@given(rollouts_and_rewards(), st.sampled_from(["group_mean", "constant", "off"]), st.integers(0, 2**32 - 1))
def test_equals_a_token_by_token_loop(
    make_rollout: MakeRollout,
    drawn: list[tuple[int, list[tuple[int, int]], tuple[int, int] | None, str]],
    tail: Any,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    rollouts = [make_rollout(p, t, a, id=str(i), group=g) for i, (p, t, a, g) in enumerate(drawn)]
    credit = [credit_for(r, random.normal(size=r.n_turns).tolist(), float(random.normal())) for r in rollouts]
    config = AdvantageConfig(answer_tail=tail, answer_tail_scale=0.3)
    lengths = [0 if a is None else a[1] for _, _, a, _ in drawn]
    for i, (rollout, turns, got) in enumerate(
        zip(rollouts, credit, token_advantages(rollouts, credit, config), strict=True)
    ):
        assert rollout.loss_mask is not None
        answered = [n for n, (_, _, _, g) in zip(lengths, drawn, strict=True) if n and g == rollout.group]
        weight = {"off": 0.0, "constant": 0.3, "group_mean": 0.3 * np.mean(answered or [0]) / max(lengths[i], 1)}[tail]
        assert turns.outcome_advantage is not None
        expected = []
        for turn, mask in zip(rollout.token_turns().tolist(), rollout.loss_mask.tolist(), strict=True):
            if not mask:
                expected.append(0.0)
            elif turn < rollout.n_turns:
                expected.append(turns.outcome_advantage + 0.2 * turns.rewards[turn])
            else:
                expected.append(weight * turns.outcome_advantage)
        np.testing.assert_allclose(got, expected, rtol=2.0**-23, atol=0)


@settings(max_examples=120, deadline=None)
@given(rollouts_and_rewards(), st.sampled_from([torch.int32, torch.int64]))
def test_flat_token_turns_equal_each_rollouts_own(
    make_rollout: MakeRollout,
    drawn: list[tuple[int, list[tuple[int, int]], tuple[int, int] | None, str]],
    dtype: torch.dtype,
) -> None:
    rollouts = [make_rollout(p, t, a) for p, t, a, _ in drawn]

    def cu(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)

    got = token_turns_flat(
        torch.from_numpy(np.concatenate([r.boundaries for r in rollouts])).to(dtype),
        cu([r.n_states for r in rollouts]),
        torch.tensor([r.n_turns for r in rollouts]),
        cu([len(r.input_ids) for r in rollouts]),
    )
    assert got.tolist() == np.concatenate([r.token_turns() for r in rollouts]).tolist()


def test_batches_of_whole_groups_change_nothing(make_rollout: MakeRollout, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = [make_rollout(1, [(2, 1)], (0, 1 + i), id=str(i), group="abc"[i % 3]) for i in range(9)]
    credit = [credit_for(r, [float(i)], 1.0 - i) for i, r in enumerate(rollouts)]
    together = token_advantages(rollouts, credit)
    monkeypatch.setattr("trace_fast.advantages._TOKENS_AT_ONCE", 10)
    for ours, theirs in zip(token_advantages(rollouts, credit), together, strict=True):
        assert ours.tobytes() == theirs.tobytes()


# --- what is refused ------------------------------------------------------------------------------------------------


def test_unknown_loss_mask_is_refused_by_name(make_rollout: MakeRollout) -> None:
    rollout = make_rollout(1, [(1, 1)], (0, 1), id="nomask", masked=False)
    with pytest.raises(RolloutError, match="'nomask': has no loss_mask") as raised:
        token_advantages([rollout], [credit_for(rollout, [1.0], 1.0)])
    assert raised.value.kind == "inexact"


def test_rewritten_history_is_refused(make_rollout: MakeRollout) -> None:
    rollout = make_rollout(1, [(1, 1)], (0, 1), id="rewritten")
    rewritten = replace(rollout, state_prefixes=tuple(np.arange(1, 3 + i) for i in range(3)))
    with pytest.raises(RolloutError, match="'rewritten': its chat template rewrites history"):
        token_advantages([rewritten], [credit_for(rollout, [1.0], 1.0)])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"id": "other"}, r"credit\[1\]: expected id 'b' of rollouts\[1\] \('b'\), got 'other'"),
        ({"group": "other"}, r"credit\[1\]: expected group 'g' .* got 'other'"),
        ({"n_turns": 2}, r"credit\[1\]: expected n_turns 1 .* got 2"),
        ({"rewards": np.zeros(2)}, r"credit\[1\] \('b'\): expected 1 rewards \(one a turn\), got shape \(2,\)"),
        ({"rewards": np.array([np.nan])}, "turn_rewards_T: expected finite numbers, got nan"),
        ({"outcome_advantage": np.inf}, "outcome_advantages_R: expected finite numbers, got inf"),
    ],
)
def test_credit_of_other_rollouts_is_refused(make_rollout: MakeRollout, changed: dict[str, Any], message: str) -> None:
    rollouts = [make_rollout(1, [(1, 1)], (0, 1), id=name) for name in "ab"]
    credit = [credit_for(r, [1.0], 1.0) for r in rollouts]
    credit[1] = replace(credit[1], **changed)
    with pytest.raises(ValueError, match=message):
        token_advantages(rollouts, credit)
    with pytest.raises(ValueError, match="expected the same number, got 2 rollouts and 1 credits"):
        token_advantages(rollouts, credit[:1])


GOOD: dict[str, Any] = {
    "token_turns_N": torch.tensor([-1, 0, 0, 1, -1, 0]),
    "loss_mask_N": torch.tensor([False, True, False, True, False, True]),
    "cu_tokens_R1": torch.tensor([0, 4, 6], dtype=torch.int32),
    "turn_rewards_T": torch.tensor([2.0]),
    "cu_turns_R1": torch.tensor([0, 1, 1], dtype=torch.int32),
    "outcome_advantages_R": torch.tensor([1.0, -1.0]),
    "group_ids_R": torch.tensor([0, 0]),
    "config": AdvantageConfig(alpha_turn=0.5, answer_tail="constant", answer_tail_scale=0.25),
}


def test_flat_tensors_by_hand() -> None:
    assert token_advantages_flat(**GOOD).tolist() == [0.0, 2.0, 0.0, 0.25, 0.0, -0.25]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss_mask_N": torch.ones(5, dtype=torch.bool)}, "loss_mask_N: expected 6 entries, got 5"),
        ({"loss_mask_N": torch.ones(6)}, "loss_mask_N: expected torch.bool, got torch.float32"),
        (
            {"token_turns_N": torch.tensor([-1, 0, 0, 2, -1, 0])},
            r"token_turns_N: expected .* got 2 at \[3\], where the rollout has 1 turns",
        ),
        ({"token_turns_N": torch.tensor([-2, 0, 0, 1, -1, 0])}, r"token_turns_N: expected .* got -2 at \[0\]"),
        (
            {"cu_tokens_R1": torch.tensor([0, 7, 6], dtype=torch.int32)},
            "cu_tokens_R1: expected offsets that never decrease, got 7 then 6",
        ),
        (
            {"cu_tokens_R1": torch.tensor([0, 4, 5], dtype=torch.int32)},
            r"cu_tokens_R1: expected 6 as last offset \(the length of token_turns_N\), got 5",
        ),
        ({"cu_turns_R1": torch.tensor([0, 1], dtype=torch.int32)}, "cu_tokens_R1: expected 2 entries, got 3"),
        (
            {"outcome_advantages_R": torch.ones(2).double()},
            "outcome_advantages_R: expected torch.float32, got torch.float64",
        ),
        ({"group_ids_R": torch.tensor([0])}, "group_ids_R: expected 2 entries, got 1"),
        (
            {"turn_rewards_T": torch.tensor([float("nan")])},
            r"turn_rewards_T: expected finite numbers, got nan at \[0\]",
        ),
    ],
)
def test_bad_flat_arguments_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceFastError, match=message):
        token_advantages_flat(**(GOOD | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"boundaries_S": torch.tensor([2, 1, 3])},
            r"boundaries_S: expected token counts that never decrease .* got 2 then 1 at \[0\], \[1\]",
        ),
        (
            {"boundaries_S": torch.tensor([0, 1, 5])},
            r"boundaries_S: expected token counts from 0 to .* got 5 at \[2\], where the rollout has 4 tokens",
        ),
        ({"cu_states_R1": torch.tensor([0, 2], dtype=torch.int32)}, "cu_states_R1: expected 3 as last offset"),
        (
            {"n_turns_R": torch.tensor([3])},
            r"cu_states_R1: expected T\+1 or T\+2 boundaries .* got 3 boundaries at \[0\], where n_turns_R is 3",
        ),
        ({"cu_tokens_R1": torch.tensor([1, 4], dtype=torch.int32)}, "cu_tokens_R1: expected 0 as first offset, got 1"),
    ],
)
def test_bad_boundaries_are_named(changed: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "boundaries_S": torch.tensor([1, 2, 4]),
        "cu_states_R1": torch.tensor([0, 3], dtype=torch.int32),
        "n_turns_R": torch.tensor([1]),
        "cu_tokens_R1": torch.tensor([0, 4], dtype=torch.int32),
    }
    assert token_turns_flat(**good).tolist() == [-1, 0, 1, 1]
    with pytest.raises(TraceFastError, match=message):
        token_turns_flat(**(good | changed))


def test_boundaries_of_the_next_rollout_may_start_lower() -> None:
    got = token_turns_flat(
        torch.tensor([3, 5, 1, 2]),
        torch.tensor([0, 2, 4], dtype=torch.int32),
        torch.tensor([1, 0]),
        torch.tensor([0, 5, 8], dtype=torch.int32),
    )
    assert got.tolist() == [-1, -1, -1, 0, 0, -1, 0, 0]
