"""GRPO in its variants, and GSPO: worked by hand, and their settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from trace_fast.kernels.policy_loss import PolicyLossConfig
from trace_fast.rollout import Rollout
from trace_fast.trainer.algorithms import GrpoConfig, GspoConfig, grpo, gspo, prepare
from trace_fast.trainer.batch import TrainingBatch, training_batch
from trace_fast.trainer.microbatches import microbatches

MakeRollout = Callable[..., Rollout]
ByRollout = Callable[[torch.Tensor, TrainingBatch], list[list[float]]]


@pytest.fixture
def batch(make_rollout: MakeRollout) -> TrainingBatch:
    """Group g: rewards 2, 0, 0, 2 with 2, 4, 1, 1 trained tokens. Group h: 3, 3. Group i: one rollout."""
    return training_batch(
        [
            make_rollout("a", [([1], [5])], [4], reward=2.0, group="g"),
            make_rollout("h0", [], [4], reward=3.0, group="h"),
            make_rollout("b", [([1, 1], [5, 5])], [4, 4], reward=0.0, group="g"),
            make_rollout("c", [([1], [5])], None, reward=0.0, group="g"),
            make_rollout("i0", [], [4, 4], reward=9.0, group="i"),
            make_rollout("d", [], [4], reward=2.0, group="g"),
            make_rollout("h1", [], [4, 4, 4], reward=3.0, group="h"),
        ],
        dtype=torch.float64,
    )


def loss_of(batch: TrainingBatch, config: GrpoConfig | GspoConfig, log_ratio: float = 0.0) -> float:
    (whole,) = microbatches(prepare(batch, config), 1000)
    return float(whole.loss(whole.old_logprobs_L + log_ratio, config.loss).loss)


def test_advantages_by_hand(batch: TrainingBatch, by_rollout: ByRollout) -> None:
    """Group g has mean 1, population std 1 and sample std sqrt(4/3); h has no spread, i no company: 0."""
    for std, high in (("population", 1.0), ("sample", math.sqrt(3) / 2), ("none", 1.0)):
        got = by_rollout(grpo.advantages(batch, GrpoConfig(std=std)), batch)
        wanted = [[0, 0, high, 0, high], [0, 0, 0], [0, 0, -high, -high, 0, 0, -high, -high], [0, 0, -high, 0]]
        wanted += [[0, 0, 0, 0], [0, 0, high], [0, 0, 0, 0, 0]]
        assert got == [pytest.approx(tokens, rel=1e-15) for tokens in wanted]
        assert torch.equal(gspo.advantages(batch, GspoConfig(std=std)), grpo.advantages(batch, GrpoConfig(std=std)))


def test_paper_objective_by_hand(batch: TrainingBatch) -> None:
    """Ratio 1: rollout means 1, -1, -1, 1 and three of 0, over all seven rollouts: 0. Ratio 1.5: held at 1.28 where
    the advantage is 1 and not held where it is -1: (2 · 1.28 - 2 · 1.5) / 7."""
    assert loss_of(batch, GrpoConfig()) == pytest.approx(0, abs=1e-15)
    assert loss_of(batch, GrpoConfig(), math.log(1.5)) == pytest.approx(-(2 * 1.28 - 3) / 7, rel=1e-14)


def test_dapo_by_hand(batch: TrainingBatch) -> None:
    """Groups h and i are dropped; the eight tokens of g have three of +1 and five of -1: -(3 - 5) / 8."""
    config = GrpoConfig(variant="dapo")
    prepared = prepare(batch, config)
    assert prepared.trained_tokens_R.tolist() == [2, 0, 4, 1, 0, 1, 0]
    assert loss_of(batch, config) == pytest.approx(2 / 8, rel=1e-14)
    # Kept, their six tokens count in the denominator.
    assert loss_of(batch, GrpoConfig(variant="dapo", drop_zero_std_groups=False)) == pytest.approx(2 / 14, rel=1e-14)


def test_a_batch_of_which_dapo_keeps_nothing_has_no_micro_batch(make_rollout: MakeRollout) -> None:
    batch = training_batch([make_rollout(name, [], [4], reward=0.35) for name in "abc"])
    assert microbatches(prepare(batch, GrpoConfig(variant="dapo")), 100) == []


def test_dr_grpo_by_hand(batch: TrainingBatch) -> None:
    """Sums 2, -4, -1, 1 and zeros, each over 10, and the mean of seven: 2 / 70."""
    config = GrpoConfig.model_validate({"variant": "dr_grpo", "loss": {"divisor": 10}})
    assert loss_of(batch, config) == pytest.approx(2 / 70, rel=1e-14)


def test_gspo_by_hand(make_rollout: MakeRollout) -> None:
    """Log ratios 0 and 6e-4 have mean 3e-4: both tokens get e^3e-4, inside 1 + 4e-4. The other rollout, at -5e-4
    with advantage -1, is held at 1 - 3e-4. Loss: -(e^3e-4 - (1 - 3e-4)) / 2; the held one has no gradient."""
    rollouts = [make_rollout("a", [([1], [5])], [4], reward=1.0), make_rollout("b", [], [4], reward=0.0)]
    batch = prepare(training_batch(rollouts, dtype=torch.float64), GspoConfig())
    (whole,) = microbatches(batch, 100)
    logprobs_L = whole.old_logprobs_L + torch.tensor([0.0, 6e-4, -5e-4], dtype=torch.float64)
    result = whole.loss(logprobs_L.requires_grad_(), GspoConfig().loss)
    result.loss.backward()
    ratio = math.exp(3e-4)
    assert float(result.loss.detach()) == pytest.approx(-(ratio - (1 - 3e-4)) / 2, rel=1e-9)
    assert logprobs_L.grad.tolist() == pytest.approx([-ratio / 4, -ratio / 4, 0], rel=1e-9)


def test_variants_choose_defaults_and_settings_hold() -> None:
    assert GrpoConfig().loss == PolicyLossConfig()
    dapo = GrpoConfig(variant="dapo")
    assert (dapo.std, dapo.drop_zero_std_groups) == ("population", True)
    assert dapo.loss == PolicyLossConfig.dapo(tis_cap=2.0)
    dr = GrpoConfig.model_validate({"variant": "dr_grpo", "loss": {"divisor": 4096, "tis_cap": None}})
    assert (dr.std, dr.drop_zero_std_groups) == ("none", False)
    assert dr.loss == PolicyLossConfig.dr_grpo(4096)
    own = GrpoConfig.model_validate({"variant": "dapo", "std": "sample", "loss": {"clip_high": 0.4}})
    assert (own.std, own.drop_zero_std_groups) == ("sample", True)
    assert own.loss == PolicyLossConfig(aggregation="token_mean", clip_high=0.4)
    assert GspoConfig.model_validate({"loss": {"clip_high": 1e-3}}).loss == PolicyLossConfig(
        ratio="sequence", clip_low=3e-4, clip_high=1e-3, max_log_ratio=10.0
    )
    assert GrpoConfig(variant="dapo", loss=PolicyLossConfig()).loss == PolicyLossConfig()  # given whole, it holds whole


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "drgrpo"}, "'paper', 'dapo' or 'dr_grpo'"),
        ({"variant": "dr_grpo"}, "divisor: expected a number with aggregation 'constant'"),
        ({"clip": 0.2}, "Extra inputs are not permitted"),
        ({"loss": {"clip": 0.2}}, "Extra inputs are not permitted"),
        ({"loss": {"ratio": "sequence"}}, "loss.ratio: expected 'token' for grpo, got 'sequence'"),
        ({"loss": 3}, "loss"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GrpoConfig.model_validate(settings)


def test_gspo_without_its_ratio_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"loss\.ratio: expected 'sequence' for gspo, got 'token'"):
        GspoConfig(loss=PolicyLossConfig())
