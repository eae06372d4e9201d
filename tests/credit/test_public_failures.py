"""Failures of other trainers in group statistics, returns and masks, each shown not to happen here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from trace_fast.advantages import token_advantages
from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.credit import group_outcome_advantages, turn_credit
from trace_fast.errors import RolloutError, TraceFastError
from trace_fast.kernels.turn_credit import outcome_advantages, token_advantages_flat
from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore

MakeScore = Callable[..., RolloutScore]
MakeRollout = Callable[..., Rollout]


def test_uneven_groups_are_not_normalised_batch_wide() -> None:
    """Groups of 1, 2 and 5, interleaved: each on its own statistics, and a batch without the others gives the same."""
    groups = ["b", "c", "c", "b", "c", "a", "c", "c"]
    rewards = [10.0, 0.0, 0.0, 12.0, 0.0, 99.0, 0.0, 5.0]
    got = group_outcome_advantages(rewards, groups)
    assert got[5] == 0.0
    assert [got[0], got[3]] == pytest.approx([-1.0, 1.0], rel=1e-14)
    assert [got[i] for i in (1, 2, 4, 6, 7)] == pytest.approx([-0.5] * 4 + [2.0], rel=1e-14)
    alone = group_outcome_advantages([r for r, g in zip(rewards, groups, strict=True) if g == "c"], ["c"] * 5)
    assert alone == [got[i] for i in (1, 2, 4, 6, 7)]


def test_history_repeated_as_another_rollout_of_the_group_is_counted_once_each(make_score: MakeScore) -> None:
    """A rollout's turns never enter the group's statistics: 61 turns weigh no more than one."""
    long, short = make_score([-2.0] * 63, id="long", reward=1.0), make_score([-2.0] * 3, id="short", reward=0.0)
    assert [c.outcome_advantage for c in turn_credit([long, short])] == pytest.approx([1.0, -1.0], rel=1e-14)


def test_returns_do_not_reset_at_tool_observations(make_score: MakeScore, make_rollout: MakeRollout) -> None:
    """Evidence found by turn 2 credits turns 0 and 1 through two observations; all tokens of a turn get the same."""
    score = make_score([-6.1, -6.1, -6.1, -0.1, -0.1], reward=None)
    config = CreditConfig(gap_offset=0.9, horizon=3, discount=0.5)
    credit = turn_credit([score], config)
    gain = np.log(7.0)
    np.testing.assert_allclose(credit[0].rewards, [gain * 0.25 / 1.75, gain * 0.5 / 1.5, gain], rtol=1e-14)
    rollout = make_rollout(1, [(3, 4), (2, 5), (1, 2)], (0, 1))
    got = token_advantages([rollout], credit)[0]
    by_turn = [got[(rollout.token_turns() == k) & rollout.loss_mask] for k in range(3)]
    for k, values in enumerate(by_turn):
        np.testing.assert_array_equal(values, np.full(len(values), np.float32(0.2 * credit[0].rewards[k])))


def test_float_residue_does_not_become_an_advantage() -> None:
    """Rewards that float32 cannot hold (0.35, 0.3, ...), where E[x^2] - E[x]^2 leaves a residue in place of a std of 0.

    Seven equal and one other reward give exactly the values of 7 and 1, and no advantage exceeds sqrt(G - 1).
    """
    for reward in (0.35, 0.4, 0.3, 0.1, 1.1):
        same = torch.full((8,), reward)
        assert outcome_advantages(same, torch.zeros(8, dtype=torch.int64)).tolist() == [0.0] * 8
        split = same.clone()
        split[3] = reward - 0.6
        got = outcome_advantages(split, torch.zeros(8, dtype=torch.int64))
        expected = torch.full((8,), 7**-0.5)
        expected[3] = -(7**0.5)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    random = np.random.default_rng(0)
    for size in (2, 3, 8, 33):
        rewards = torch.from_numpy(random.choice([0.35, 0.35 + 1e-6, 1.1], size)).float()
        got = outcome_advantages(rewards, torch.zeros(size, dtype=torch.int64))
        assert got.abs().max() <= (size - 1) ** 0.5 * (1 + 1e-5)


def test_one_policy_token_is_not_whitened(make_score: MakeScore, make_rollout: MakeRollout) -> None:
    """A batch with a single trained token keeps its plain advantage; a variance over one token would be NaN."""
    rollout = make_rollout(3, [(1, 4)], None)
    credit = turn_credit([make_score([-4.0, -2.0], 1)], outcome_advantages=[0.5])
    got = token_advantages([rollout], credit)[0]
    wanted = np.float32(0.5 + 0.2 * (np.log(4.1 / 2.1) + 2.0 * 0.8 * 0.5))
    assert np.flatnonzero(got).tolist() == [3]
    assert got[3] == pytest.approx(wanted, rel=1e-6)


def test_turn_rewards_are_not_normalised_by_the_group(make_score: MakeScore) -> None:
    """The same rollout has the same dense credit beside any others."""
    ours = make_score([-4.0, -2.0, -1.0], id="ours")
    alone = turn_credit([ours])[0].rewards
    beside = turn_credit([make_score([-50.0, -0.01, -0.01], id=str(i)) for i in range(7)] + [ours])[7].rewards
    assert alone.tobytes() == beside.tobytes()


def test_mask_longer_than_the_tokens_is_refused(make_rollout: MakeRollout) -> None:
    rollout = make_rollout(1, [(1, 1)], (0, 1))
    with pytest.raises(RolloutError, match=r"loss_mask: expected 4 entries \(one a token\), got .* shape \(5,\)"):
        replace(rollout, loss_mask=np.ones(5, dtype=bool))
    flat = {
        "token_turns_N": torch.tensor([-1, 0, 0, 1]),
        "loss_mask_N": torch.ones(5, dtype=torch.bool),
        "cu_tokens_R1": torch.tensor([0, 4], dtype=torch.int32),
        "turn_rewards_T": torch.ones(1),
        "cu_turns_R1": torch.tensor([0, 1], dtype=torch.int32),
        "outcome_advantages_R": torch.ones(1),
        "group_ids_R": torch.zeros(1, dtype=torch.int64),
        "config": AdvantageConfig(),
    }
    with pytest.raises(TraceFastError, match="loss_mask_N: expected 4 entries, got 5"):
        token_advantages_flat(**flat)


def test_masked_tokens_are_not_in_the_answer_length(make_score: MakeScore, make_rollout: MakeRollout) -> None:
    """40 scaffold tokens in one answer span change no weight: the denominator counts policy tokens only."""
    credit = turn_credit([make_score([-2.0, -2.0], id=name) for name in "ab"], outcome_advantages=[1.0, 1.0])
    plain = [make_rollout(1, [], (0, 2), id="a"), make_rollout(1, [], (0, 4), id="b")]
    padded = [make_rollout(1, [], (40, 2), id="a"), plain[1]]
    for rollouts in (plain, padded):
        got = token_advantages(rollouts, credit)
        np.testing.assert_array_equal(got[0][-2:], np.float32([0.05 * 3 / 2] * 2))
        np.testing.assert_array_equal(got[1][-4:], np.float32([0.05 * 3 / 4] * 4))


def test_mask_is_not_inferred_from_a_pad_id(make_score: MakeScore, make_rollout: MakeRollout) -> None:
    """A policy that writes the pad or end id is trained on it; the ids change no advantage."""
    credit = turn_credit([make_score([-2.0, -1.0, -1.0])], outcome_advantages=[1.0])
    ordinary = make_rollout(2, [(2, 2)], (0, 2), token_id=5)
    for pad in (0, 1, 2, 151643):
        all_pad = make_rollout(2, [(2, 2)], (0, 2), token_id=pad)
        got = token_advantages([all_pad], credit)[0]
        assert got.tobytes() == token_advantages([ordinary], credit)[0].tobytes()
        assert np.flatnonzero(got).tolist() == [2, 3, 6, 7]


def test_history_in_the_prompt_is_not_trained(make_score: MakeScore, make_rollout: MakeRollout) -> None:
    """Earlier assistant turns that are part of the prompt get 0 even where a mask marks them as the policy's."""
    rollout = make_rollout(4, [(1, 1)], (0, 1))
    assert rollout.loss_mask is not None
    marked = rollout.loss_mask.copy()
    marked[1:3] = True
    credit = turn_credit([make_score([-2.0, -1.0, -1.0])], outcome_advantages=[1.0])
    got = token_advantages([replace(rollout, loss_mask=marked)], credit)[0]
    assert got[:4].tolist() == [0.0] * 4
    assert got.tobytes() == token_advantages([rollout], credit)[0].tobytes()


def test_observations_get_exactly_zero_whatever_the_credit(make_score: MakeScore, make_rollout: MakeRollout) -> None:
    rollout = make_rollout(2, [(1, 3), (2, 2)], (1, 1))
    assert rollout.loss_mask is not None
    credit = turn_credit([make_score([-40.0, -1e-6, -40.0, -40.0])], outcome_advantages=[-1e6])
    got = token_advantages([rollout], credit)[0]
    assert got[~rollout.loss_mask].tobytes() == np.zeros((~rollout.loss_mask).sum(), dtype=np.float32).tobytes()
    assert (np.abs(got[rollout.loss_mask]) > 1).all()
