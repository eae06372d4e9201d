"""The flat batch: what stands where, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trace_fast.errors import ConfigError, RolloutError, TraceFastError
from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore
from trace_fast.trainer.batch import TrainingBatch, training_batch

MakeRollout = Callable[..., Rollout]
MakeScore = Callable[..., RolloutScore]


@pytest.fixture
def pair(make_rollout: MakeRollout) -> list[Rollout]:
    """Prompt 7 8; one with two turns and an answer, one that was cut off after a turn and two more tokens."""
    first = make_rollout("a", [([1], [5, 5]), ([2, 3], [6])], [4], reward=1.0, logprob=-0.5)
    second = make_rollout("b", [([1], [5, 5])], None, reward=0.25, logprob=-2.0)
    cut_off = replace(
        second,
        input_ids=np.append(second.input_ids, [9, 9]),
        loss_mask=np.append(second.loss_mask, [True, True]),
        logprobs=np.append(second.logprobs, [-2.0, -2.0]),
    )
    return [first, cut_off]


def test_every_field_by_hand(pair: list[Rollout], make_score: MakeScore) -> None:
    scores = [make_score(pair[0], [-4, -3, -2, -1]), make_score(pair[1], [-5, -6])]
    batch = training_batch(pair, scores)
    wanted: dict[str, list[Any]] = {
        "input_ids_N": [7, 8, 1, 5, 5, 2, 3, 6, 4, 7, 8, 1, 5, 5, 9, 9],
        "loss_mask_N": [bool(x) for x in (0, 0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 1, 1)],
        "token_turns_N": [-1, -1, 0, 0, 0, 1, 1, 1, 2, -1, -1, 0, 0, 0, 1, 1],
        "sampler_logprobs_N": [0, 0, -0.5, 0, 0, -0.5, -0.5, 0, -0.5, 0, 0, -2, 0, 0, -2, -2],
        "cu_tokens_R1": [0, 9, 16],
        "cu_states_R1": [0, 4, 6],
        "boundaries_S": [2, 5, 8, 9, 2, 5],
        "n_turns_R": [2, 1],
        "rewards_R": [1.0, 0.25],
        "group_ids_R": [0, 0],
        "observation_keys_A": [0, 1, 2, 0, 1],  # prompt, 5 5, 6; prompt, 5 5
        "mean_logprobs_S": [-4, -3, -2, -1, -5, -6],
        "rollout_N": [0] * 9 + [1] * 7,
        "rollout_A": [0, 0, 0, 1, 1],
        "action_N": [-1, -1, 0, -1, -1, 1, 1, -1, 2, -1, -1, 3, -1, -1, 4, 4],
        "trained_tokens_R": [4, 3],
    }
    assert {name: getattr(batch, name).tolist() for name in wanted} == wanted
    assert batch.ids == ("a", "b")
    assert torch.equal(batch.old_logprobs_N, batch.sampler_logprobs_N)
    assert batch.cu_tokens_R1.dtype == batch.cu_states_R1.dtype == torch.int32
    assert batch.rewards_R.dtype == batch.mean_logprobs_S.dtype == batch.sampler_logprobs_N.dtype == torch.float32


def test_observations_are_those_of_the_group_and_may_be_named(make_rollout: MakeRollout) -> None:
    rollouts = [make_rollout(g, [([1], [5])], [4], group=g) for g in "gh"]
    assert training_batch(rollouts).observation_keys_A.tolist() == [0, 1, 2, 3]
    named = training_batch(rollouts, observation_keys=[("x", "x"), ("x", ("page", 3))])
    assert named.observation_keys_A.tolist() == [0, 0, 1, 2]
    for keys, message in (([("x", "x")], "expected 2 entries"), ([("x",), ("x", "y")], r"keys\[0\]: expected 2 keys")):
        with pytest.raises(TraceFastError, match=message):
            training_batch(rollouts, observation_keys=keys)


def test_an_observation_is_all_that_the_policy_did_not_write(make_rollout: MakeRollout) -> None:
    """slime #2263: two tool messages of one turn, with the template's tokens between them, are one observation."""
    both = make_rollout("a", [([1], [99, 5, 99, 6]), ([2], [5])], [4])
    one = make_rollout("b", [([3, 3], [99, 5, 99, 6]), ([2], [6])], [4])
    batch = training_batch([both, one])
    assert batch.n_turns_R.tolist() == [2, 2]
    assert batch.observation_keys_A.tolist() == [0, 1, 2, 0, 1, 3]


def test_advantages_and_dropped_rollouts(pair: list[Rollout]) -> None:
    batch = training_batch(pair)
    everywhere = torch.arange(16, dtype=torch.float32) + 1
    everywhere[~batch.loss_mask_N] = float("nan")
    kept = batch.with_advantages(everywhere)
    assert kept.advantages_N.tolist() == [0, 0, 3, 0, 0, 6, 7, 0, 9, 0, 0, 12, 0, 0, 15, 16]
    dropped = batch.with_advantages(everywhere, torch.tensor([True, False]))
    assert dropped.advantages_N.tolist() == [0, 0, 3, 0, 0, 6, 7, 0, 9] + [0] * 7
    assert dropped.trained_tokens_R.tolist() == [4, 0]
    assert dropped.old_logprobs_N[9:].tolist() == dropped.sampler_logprobs_N[9:].tolist() == [0] * 7
    assert batch.trained_tokens_R.tolist() == [4, 3]


def test_some_of_the_rollouts(pair: list[Rollout], make_score: MakeScore) -> None:
    scores = [make_score(pair[0], [-4, -3, -2, -1]), make_score(pair[1], [-5, -6])]
    batch = training_batch(pair, scores)
    batch = batch.with_advantages(torch.arange(16.0))
    for order in ([1, 0], [1], [0], [0, 1]):
        wanted = training_batch([pair[r] for r in order], [scores[r] for r in order])
        got = batch.select(order)
        for name in wanted.__slots__:
            if name in ("ids", "observation_keys_A", "advantages_N", "temperature"):
                continue
            assert torch.equal(getattr(got, name), getattr(wanted, name)), name
        assert got.ids == wanted.ids
    swapped = batch.select([1, 0])
    assert swapped.observation_keys_A.tolist() == [0, 1, 0, 1, 2]
    assert swapped.advantages_N.tolist() == [0, 0, 11, 0, 0, 14, 15, 0, 0, 2, 0, 0, 5, 6, 0, 8]
    assert batch.select([]).n_rollouts == batch.select([]).input_ids_N.numel() == 0


def test_history_turns_are_not_trained_nemo_rl_2176(make_rollout: MakeRollout) -> None:
    """Assistant tokens inside the prompt stay untrained, though a mask marks them and log-probabilities stand there."""
    rollout = make_rollout("a", [([1], [5])], [4], prompt=[7, 8, 9, 9])
    marked = replace(
        rollout, loss_mask=np.array([0, 1, 1, 0, 1, 0, 1]), logprobs=np.array([0, -9, 9, 0, -1, 0, -1], np.float32)
    )
    batch, plain = training_batch([marked]), training_batch([rollout])
    assert torch.equal(batch.loss_mask_N, plain.loss_mask_N)
    assert torch.equal(batch.sampler_logprobs_N, plain.sampler_logprobs_N)


def test_short_logprob_lists_are_not_padded_rllm_816(pair: list[Rollout]) -> None:
    with pytest.raises(RolloutError, match=r"logprobs: expected 9 entries \(one a token\)"):
        replace(pair[0], logprobs=pair[0].logprobs[:-1])
    only_the_policys = pair[0].logprobs[pair[0].loss_mask]
    with pytest.raises(RolloutError, match=r"logprobs: expected 9 entries"):
        replace(pair[0], logprobs=only_the_policys)
    batch = training_batch(pair)
    with pytest.raises(TraceFastError, match=r"old_logprobs_N: expected shape \(16,\) .* got \(15,\)"):
        batch.with_old_logprobs(torch.zeros(15))
    with pytest.raises(TraceFastError, match=r"advantages_N: expected shape \(16,\) .* got \(2,\)"):
        batch.with_advantages(torch.zeros(2))


def test_mask_longer_than_ids_trl_5144(pair: list[Rollout]) -> None:
    with pytest.raises(RolloutError, match=r"loss_mask: expected 9 entries \(one a token\)"):
        replace(pair[0], loss_mask=np.append(pair[0].loss_mask, True))


def test_a_rollout_given_twice_is_refused_slime_2301(pair: list[Rollout]) -> None:
    """Segments of one rollout, each with its reward, would weigh it repeatedly in its group's mean and std."""
    with pytest.raises(TraceFastError, match=r"rollouts\[2\]: expected different ids within group 'g', got 'a' again"):
        training_batch([*pair, pair[0]])
    assert training_batch([*pair, replace(pair[0], group="h")]).n_rollouts == 3


def test_the_mask_is_not_inferred_from_a_pad_id_trl_4970(make_rollout: MakeRollout) -> None:
    for pad in (0, 1, 151643):
        batch = training_batch([make_rollout("a", [([pad, pad], [5])], [pad], prompt=[pad, pad])])
        assert batch.loss_mask_N.tolist() == [False, False, True, True, False, True]


@pytest.mark.parametrize("name", ["loss_mask", "logprobs", "reward"])
def test_a_rollout_that_lacks_what_training_needs_is_named(pair: list[Rollout], name: str) -> None:
    with pytest.raises(RolloutError, match=rf"rollout 'b': has no {name}"):
        training_batch([pair[0], replace(pair[1], **{name: None})])


@pytest.mark.parametrize("value", [np.nan, -np.inf, 0.5])
def test_a_trained_token_has_a_logprob(pair: list[Rollout], value: float) -> None:
    broken = pair[1].logprobs.copy()
    broken[5] = value
    with pytest.raises(RolloutError, match=rf"rollout 'b': logprobs: expected finite .* got {value} at token 5"):
        training_batch([pair[0], replace(pair[1], logprobs=broken)])
    old_N = training_batch(pair).old_logprobs_N
    old_N[9 + 5] = value
    with pytest.raises(TraceFastError, match=rf"old_logprobs_N: .* <= 0 .* got {value} at token 5 of rollout 'b'"):
        training_batch(pair).with_old_logprobs(old_N)


def test_what_makes_no_batch_is_refused(pair: list[Rollout], make_score: MakeScore, make_rollout: MakeRollout) -> None:
    scores = [make_score(pair[0], [-4, -3, -2, -1]), make_score(pair[1], [-5, -6])]
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"rollouts": []}, TraceFastError, "rollouts: expected at least one, got none"),
        ({"scores": scores[:1]}, TraceFastError, r"scores: expected 2 \(one a rollout, in order\), got 1"),
        ({"scores": scores[::-1]}, TraceFastError, r"scores\[0\]: expected id 'a' of rollouts\[0\], got 'b'"),
        (
            {"scores": [replace(scores[0], boundaries=np.array([2, 5, 7, 9])), scores[1]]},
            TraceFastError,
            r"scores\[0\] \('a'\): expected the rollout's boundaries \[2, 5, 8, 9\]",
        ),
        ({"top_p": 0.9}, ConfigError, "top_p: expected 1 for rollouts that are trained on, got 0.9"),
        ({"temperature": 0.0}, ConfigError, "temperature: expected a positive number, got 0.0"),
        (
            {"rollouts": [make_rollout("c", [], [4, 4], prompt=[])]},
            RolloutError,
            "rollout 'c': loss_mask: expected a token before the first trained one, .* at token 0",
        ),
        (
            {"rollouts": [replace(pair[0], state_prefixes=(pair[0].input_ids,) * 4)]},
            RolloutError,
            "chat template rewrites history",
        ),
    ]
    assert training_batch(pair, scores).n_rollouts == 2
    for changed, error, message in cases:
        with pytest.raises(error, match=message):
            training_batch(**({"rollouts": pair} | changed))


def test_to_another_device_moves_every_tensor(random_batch: Callable[..., TrainingBatch]) -> None:
    batch = random_batch()
    moved = batch.with_advantages(batch.old_logprobs_N).to("meta")
    tensors = [v for name in moved.__slots__ if isinstance(v := getattr(moved, name), torch.Tensor)]
    assert len(tensors) == 14
    assert {tensor.device.type for tensor in tensors} == {"meta"}
