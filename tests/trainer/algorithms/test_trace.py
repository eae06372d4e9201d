"""TRACE: its three forms worked by hand, and that its settings reach the credit."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from trace_fast.advantages import token_advantages
from trace_fast.credit import turn_credit
from trace_fast.errors import ConfigError, TraceFastError
from trace_fast.kernels.policy_loss import PolicyLossConfig
from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore
from trace_fast.trainer.algorithms import (
    ALGORITHMS,
    AlgorithmConfig,
    GigpoConfig,
    GrpoConfig,
    TraceConfig,
    algorithm,
    prepare,
    trace,
)
from trace_fast.trainer.batch import TrainingBatch, training_batch

MakeRollout = Callable[..., Rollout]
MakeScore = Callable[..., RolloutScore]


@pytest.mark.parametrize(
    ("form", "first", "second"), [("log_ratio", math.log(2), math.log(2)), ("raw", 2.0, 1.0), ("linear", 0.5, 0.5)]
)
def test_three_forms_by_hand(
    make_rollout: MakeRollout, make_score: MakeScore, form: str, first: float, second: float
) -> None:
    """Rewards 1 and 0: A_out = +-1. K = 1, gap offset 1, discount 0.5, terminal scale 2, alpha_turn 0.2.

    a: scores -3, -1, 0 (gaps 4, 2, 1), then the answer's: credits log 2, log 2 or 2, 1 or 2/4, 1/2. Only the last turn
    sees the end: plus 2 · 0.5 · 1. b: scores -3, -3: credit 0, plus 2 · 0.5 · (-1).
    Answers of 2 and 4 tokens, mean 3: 0.05 · 3/2 and 0.05 · 3/4, times A_out.
    """
    a = make_rollout("a", [([1, 1], [5]), ([2], [6, 6])], [4, 4], reward=1.0)
    b = make_rollout("b", [([1], [5])], [4] * 4, reward=0.0)
    batch = training_batch([a, b], [make_score(a, [-3, -1, 0, -0.5]), make_score(b, [-3, -3, -9])], dtype=torch.float64)
    config = TraceConfig.model_validate(
        {"credit": {"form": form, "horizon": 1, "gap_offset": 1, "discount": 0.5, "terminal_scale": 2}}
    )
    turns = [1 + 0.2 * first, 1 + 0.2 * (second + 1), -1 + 0.2 * (-1)]
    wanted = [0, 0, turns[0], turns[0], 0, turns[1], 0, 0, 0.075, 0.075, 0, 0, turns[2], 0, *[-0.0375] * 4]
    assert trace.advantages(batch, config).tolist() == pytest.approx(wanted, rel=1e-14)
    credit = trace.turn_credit_of(batch, config).credit
    assert credit.deltas_D.tolist()[:2] == pytest.approx([first, second], rel=1e-14)


def test_equals_the_file_level_functions(
    random_rollouts: Callable[..., list[Rollout]], random_batch: Callable[..., TrainingBatch], make_score: MakeScore
) -> None:
    """The numbers a user gets from ``turn_credit`` and ``token_advantages`` are those that train, to float32."""
    rollouts, batch = random_rollouts(3), random_batch(3)
    cu = batch.cu_states_R1.tolist()
    scores = [make_score(r, batch.mean_logprobs_S[cu[i] : cu[i + 1]].tolist()) for i, r in enumerate(rollouts)]
    wanted = np.concatenate(token_advantages(rollouts, turn_credit(scores)))
    np.testing.assert_allclose(trace.advantages(batch, TraceConfig()).numpy(), wanted, rtol=2**-23, atol=0)


def test_without_scores_it_is_refused(make_rollout: MakeRollout) -> None:
    batch = training_batch([make_rollout("a", [], [4])])
    with pytest.raises(TraceFastError, match="batch: expected the reference's scores of all states for trace"):
        prepare(batch, TraceConfig())
    assert [name for name, entry in ALGORITHMS.items() if entry.needs_scores] == ["trace"]


def test_the_papers_values_are_the_defaults() -> None:
    config = TraceConfig()
    assert (config.credit.horizon, config.credit.discount, config.credit.terminal_scale) == (3, 0.8, 2.0)
    advantage = config.advantage
    assert (advantage.alpha_out, advantage.alpha_turn, advantage.answer_tail_scale) == (1, 0.2, 0.05)
    assert config.loss == PolicyLossConfig(clip_low=0.2, clip_high=0.28, tis_cap=2.0)


def test_the_name_chooses_the_settings() -> None:
    read = TypeAdapter(AlgorithmConfig).validate_python
    assert read({"name": "grpo", "variant": "dapo"}) == GrpoConfig(variant="dapo")
    assert read({"name": "gigpo", "discount": 0.9}) == GigpoConfig(discount=0.9)
    assert {name: entry.config().name for name, entry in ALGORITHMS.items()} == {name: name for name in ALGORITHMS}
    for settings, message in (
        ({"name": "gspo", "variant": "dapo"}, "Extra inputs are not permitted"),
        ({"name": "ppo"}, "'grpo', 'gspo', 'gigpo', 'trace'"),
        ({"name": "trace", "credit": {"lambda": 2}}, "Extra inputs are not permitted"),
        ({"name": "trace", "loss": {"ratio": "sequence"}}, "loss.ratio: expected 'token' for trace"),
        ({"name": "gigpo", "loss": {"ratio": "sequence"}}, "loss.ratio: expected 'token' for gigpo"),
    ):
        with pytest.raises(ValidationError, match=message):
            read(settings)
    with pytest.raises(ConfigError, match="of grpo, gspo, gigpo, trace, got 'tracee'; did you mean 'trace'"):
        algorithm("tracee")
