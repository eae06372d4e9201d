"""The baselines of the benchmark compute the same numbers as the oracle, so that a ratio compares like with like."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from tiny_models import random_rollout, tiny_model

PEERS_FILE = Path(__file__).resolve().parents[1] / "benchmarks" / "peers.py"


def load_peers() -> Any:
    spec = importlib.util.spec_from_file_location("bench_peers", PEERS_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["naive", "kv_cache", "dense_mask"])
def test_a_peer_gives_the_oracles_numbers(name: str) -> None:
    truth = oracle.double_precision(tiny_model("llama"))
    truth.set_attn_implementation("sdpa")
    rollout = random_rollout(np.random.default_rng(0), turns=5, tokens=150, answers=(6,), opener=3)
    found = load_peers().PEERS[name](truth, rollout)
    # norms and rotary angles are float32 in transformers, whatever the dtype
    np.testing.assert_allclose(found, oracle.mean_logprobs(truth, rollout)[:, 0], rtol=0, atol=1e-5)
