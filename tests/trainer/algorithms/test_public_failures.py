"""Failures of other trainers in group statistics, under every algorithm: none of them happens here.

Those of batches, micro-batches and losses are in ``test_batch.py`` and ``test_microbatches.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore
from trace_fast.trainer.algorithms import GigpoConfig, GrpoConfig, GspoConfig, TraceConfig, prepare
from trace_fast.trainer.batch import TrainingBatch, training_batch

MakeRollout = Callable[..., Rollout]
MakeScore = Callable[..., RolloutScore]
RandomBatch = Callable[..., TrainingBatch]
Config = GrpoConfig | GspoConfig | GigpoConfig | TraceConfig
CONFIGS: dict[str, Config] = {
    "grpo": GrpoConfig(),
    "grpo sample std": GrpoConfig(std="sample"),
    "dapo": GrpoConfig(variant="dapo"),
    "dr_grpo": GrpoConfig.model_validate({"variant": "dr_grpo", "loss": {"divisor": 50}}),
    "gspo": GspoConfig(),
    "gigpo": GigpoConfig(),
    "gigpo std": GigpoConfig(norm="mean_std_norm", episode_rows="step"),
    "trace": TraceConfig(),
}
each_algorithm = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def advantages_of(batch: TrainingBatch, config: Config) -> torch.Tensor:
    advantages_N = prepare(batch, config).advantages_N
    assert advantages_N is not None
    return advantages_N


@each_algorithm
def test_uneven_groups_are_not_normalised_batch_wide_slime_1414(
    random_rollouts: Callable[..., list[Rollout]], make_score: MakeScore, config: Config
) -> None:
    """Groups of 4, 1, 3 and 5, mixed: each group alone has the same advantages, bit for bit."""
    rollouts = random_rollouts(7)
    scores = [make_score(r, [-3.0, -2.0, -4.0, -1.0, -0.5, -0.1][: r.n_states]) for r in rollouts]
    whole = training_batch(rollouts, scores)
    together = {}
    for r, values in enumerate(advantages_of(whole, config).split(whole.cu_tokens_R1.diff().tolist())):
        together[whole.ids[r]] = values
    assert any(values.abs().max() > 0.01 for values in together.values())
    for group in {rollout.group for rollout in rollouts}:
        members = [i for i, rollout in enumerate(rollouts) if rollout.group == group]
        alone = training_batch([rollouts[i] for i in members], [scores[i] for i in members])
        for r, values in enumerate(advantages_of(alone, config).split(alone.cu_tokens_R1.diff().tolist())):
            assert torch.equal(values, together[alone.ids[r]])


@each_algorithm
def test_float_residue_is_no_advantage_nemo_rl_4161(
    make_rollout: MakeRollout, make_score: MakeScore, config: Config
) -> None:
    """Rewards that are equal, or a rounding apart, where a residue in place of a std of 0 gave 4000-fold values.

    No state says anything new, so that TRACE has its outcome terms only.
    """
    for reward in (0.35, 0.3, 1.1):
        for dust in (0.0, 2e-8, -6e-8):
            rollouts = [
                make_rollout(str(i), [([1], [5])], [4], reward=reward + (dust if i == 3 else 0)) for i in range(8)
            ]
            scores = [make_score(rollout, [-2.0] * rollout.n_states) for rollout in rollouts]
            got = advantages_of(training_batch(rollouts, scores), config)
            assert (got == 0).all()


@each_algorithm
def test_one_trained_token_is_not_whitened_roll_475(
    make_rollout: MakeRollout, make_score: MakeScore, config: Config
) -> None:
    """Each rollout has a single trained token; alone in its group its outcome gives 0, with another a plain number."""
    pair = [make_rollout(name, [], [4], reward=reward) for name, reward in (("a", 1.0), ("b", 0.0))]
    scores = [make_score(rollout, [-2.0] * rollout.n_states) for rollout in pair]
    alone = advantages_of(training_batch(pair[:1], scores[:1]), config)
    assert alone.tolist() == [0, 0, 0]
    both = advantages_of(training_batch(pair, scores), config)
    assert both[2] == -both[5] > 0
    assert both.abs().max() <= 2  # GiGPO's two terms; no std of one token anywhere


@each_algorithm
def test_long_rollouts_do_not_weigh_more_in_the_group_slime_2301(
    make_rollout: MakeRollout, make_score: MakeScore, config: Config
) -> None:
    """A rollout of many turns is one outcome, but for GiGPO's ``step`` rows, which are documented to count turns."""
    if isinstance(config, GigpoConfig) and config.episode_rows == "step":
        config = config.model_copy(update={"episode_rows": "rollout"})
    results = []
    for turns in (1, 12):
        rollouts = [
            make_rollout("long", [([1], [50 + k]) for k in range(turns)], [4], reward=1.0),
            make_rollout("b", [([1], [80])], [4], reward=0.0),
            make_rollout("c", [([1], [81])], [4], reward=0.0),
        ]
        scores = [make_score(rollout, [-2.0] * rollout.n_states) for rollout in rollouts]
        batch = training_batch(rollouts, scores)
        results.append(advantages_of(batch, config)[batch.cu_tokens_R1[1] :][[4, 9]])  # answers of b and c
    assert torch.equal(*results)
    assert results[0].abs().max() > 0


def test_top_p_and_greedy_rollouts_are_not_trained_on_trl_6789(make_rollout: MakeRollout) -> None:
    for sampling in ({"top_p": 0.95}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match="expected"):
            training_batch([make_rollout("a", [], [4])], **sampling)

