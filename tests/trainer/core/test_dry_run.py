"""The plan of a run against numbers that are computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from trace_fast.errors import ConfigError
from trace_fast.model_spec import ModelSpec
from trace_fast.trainer.config import TrainConfig
from trace_fast.trainer.dry_run import plan_run

# 2 layers of hidden size 8: attention 8 * 4 * 2 * (2 + 1) = 192, MLP 3 * 8 * 16 = 384; head and embedding are one.
SPEC = ModelSpec(
    name="tiny",
    architecture="qwen3",
    n_layers=2,
    hidden_size=8,
    n_heads=2,
    n_kv_heads=1,
    head_dim=4,
    intermediate_size=16,
    vocab_size=100,
    tied_head=True,
)
LAYER, HEAD = 192 + 384, 800
WEIGHTS = 2 * LAYER + HEAD


def settings(**changes: Any) -> TrainConfig:
    given: dict[str, Any] = {
        "out": "o",
        "policy": {"path": "p", "dtype": "bfloat16"},
        "data": {"train": "q"},
        "search": {"index": "i"},
        "harness": {"max_tokens": 64},
        "engine": {"dtype": "bfloat16", "slots": 4},
        "training": {"prompts": 3, "samples": 2, "global_batch": 4, "microbatch_tokens": 128},
        "evaluation": {"every": 0},
    }
    for key, value in changes.items():
        given[key] = given.get(key, {}) | value
    return TrainConfig.model_validate(given)


def test_one_process() -> None:
    """Six rollouts of 64 tokens in two optimiser steps."""
    plan = plan_run(settings(), SPEC, SPEC, 1)
    assert plan.sizes == (1, 1, 1)
    assert plan.parameters == WEIGHTS == 1952
    assert plan.device_bytes == {
        "master weights": 4 * WEIGHTS,
        "gradients": 4 * WEIGHTS,
        "optimiser": 8 * WEIGHTS,
        "gathered layers": 2 * 2 * (WEIGHTS // 2),
        "activations": (2 + 1) * 34 * 8 * 2 * 128,
        "reference": 2 * WEIGHTS,
        "engine weights": 2 * WEIGHTS,
        "engine cache": 2 * 2 * 1 * 4 * 2 * 4 * 64,
    }
    assert sum(plan.host_bytes.values()) == plan.scoring_bytes == 0
    assert (plan.rollouts, plan.tokens, plan.optimizer_steps) == (6, 384, 2)
    forward = 2 * (384 * (2 * LAYER + 2 * 2 * 2 * 4 * 32) + 384 * HEAD)  # attention sees half of 64 on average
    assert plan.rollout_flops == forward
    assert plan.score_flops == forward  # every token has its own log-probability, for the divergence
    assert plan.update_flops == 4 * forward  # old log-probabilities, forward, and backward for two
    assert plan.flops == 6 * forward


def test_a_mesh_with_everything_that_saves_memory() -> None:
    config = settings(
        parallel={"replicate": 2, "shard": 2, "tensor": 2, "activation_checkpointing": True},
        optimizer={"offload": True},
        reference={"placement": "offload", "dtype": "float32", "kl": False},
        engine={"kind": "vllm", "url": "http://h", "weights": "w"},
        training={"global_batch": 6},
    )
    plan = plan_run(config, SPEC, SPEC, 8)
    own = WEIGHTS // 4
    assert plan.sizes == (2, 2, 2)
    assert plan.device_bytes == {
        "master weights": 4 * own,
        "gradients": 4 * own,
        "optimiser": 0,
        "gathered layers": 2 * 2 * (WEIGHTS // 2 // 2),
        "activations": 2 * 8 * 2 * 128 // 2 + 34 * 8 * 2 * 128 // 2,
    }
    assert plan.host_bytes == {"optimiser": 16 * own, "reference": 4 * WEIGHTS}
    assert plan.scoring_bytes == 4 * WEIGHTS
    assert "  while it scores    0.00 GiB more on the device, of the reference" in plan.lines()
    forward = 2 * (384 * (2 * LAYER + 1024) + 384 * HEAD)
    assert (plan.optimizer_steps, plan.rollout_flops) == (1, 0)
    assert plan.score_flops == 2 * 384 * (2 * LAYER + 1024)
    assert plan.update_flops == 4 * forward  # one optimiser step needs no old ones; layers run again


def test_an_algorithm_without_scores_plans_no_reference() -> None:
    plan = plan_run(settings(algorithm={"name": "grpo"}), SPEC, SPEC, 1)
    assert (plan.device_bytes["reference"], plan.score_flops) == (0, 0)


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected replicate x shard x tensor to be the number of processes, 3"):
        plan_run(settings(parallel={"tensor": 2}), SPEC, SPEC, 3)
