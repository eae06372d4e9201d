"""The baselines of the benchmark compute the same numbers as the oracle, so that a ratio compares like with like."""

from __future__ import annotations

import dataclasses

import numpy as np
import oracle
import pytest
import torch
from tiny_models import random_rollout, tiny_model

from trace_fast.bench.peers import PEERS, PeerSetup
from trace_fast.bench.truth import true_scores
from trace_fast.model_spec import ModelSpec
from trace_fast.rollout import Rollout


@pytest.fixture
def rollout() -> Rollout:
    """Random boundaries, and an opener of its own at every state."""
    rng = np.random.default_rng(0)
    made = random_rollout(rng, turns=5, tokens=150, answers=(6,), opener=3)
    return dataclasses.replace(made, openers=tuple(rng.integers(3, 211, 1 + k % 4) for k in range(made.n_states)))


def setup_of(module: torch.nn.Module) -> PeerSetup:
    return PeerSetup(module, ModelSpec.from_config(module.config, "tiny"), "tiny")


# transformers keeps norms and rotary angles in float32 whatever the dtype, and packing changes their company
TOLERANCE = 1e-5


@pytest.mark.parametrize("name", ["naive", "kv_cache", "dense_mask"])
def test_a_peer_gives_the_oracles_numbers(name: str, rollout: Rollout) -> None:
    truth = oracle.double_precision(tiny_model("llama"))
    truth.set_attn_implementation("sdpa")
    found = PEERS[name].open_peer(setup_of(truth)).score(rollout)
    np.testing.assert_allclose(found, oracle.mean_logprobs(truth, rollout)[:, 0], rtol=0, atol=TOLERANCE)


def test_flex_attention_gives_the_oracles_numbers(rollout: Rollout) -> None:
    module = tiny_model("llama")  # FlexAttention has no float64 on the CPU
    peer = PEERS["flex_attention"].open_peer(setup_of(module))
    with torch.compiler.set_stance("force_eager"), pytest.warns(UserWarning, match="without torch.compile"):
        found = peer.score(rollout)
    truth = oracle.mean_logprobs(oracle.double_precision(module), rollout)[:, 0]
    np.testing.assert_allclose(found, truth, rtol=0, atol=TOLERANCE)
    assert module.config._attn_implementation == "sdpa"  # switched back


@pytest.mark.parametrize("architecture", ["llama", "mistral-window", "gemma3", "gpt-oss", "qwen3-moe"])
def test_the_truth_is_the_oracles(architecture: str, rollout: Rollout) -> None:
    module = tiny_model(architecture, torch.bfloat16)
    (found,) = true_scores(module, [rollout])
    expected = oracle.mean_logprobs(oracle.double_precision(module), rollout)[:, 0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    assert next(module.parameters()).dtype == torch.bfloat16  # a copy was raised to float64, not the model


@pytest.mark.parametrize("name", ["dense_mask", "flex_attention"])
def test_a_mask_from_outside_is_refused_where_layers_have_windows(name: str) -> None:
    reason = PEERS[name].why_not(setup_of(tiny_model("mistral-window")))
    assert reason == "the model has sliding windows, which a mask handed over from outside replaces"
    assert PEERS["dense_mask"].why_not(setup_of(tiny_model("llama"))) is None
