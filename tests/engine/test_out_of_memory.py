"""A pass that does not fit into memory costs the rollouts that cannot fit, not the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import random_rollout, tiny_model

import trace_fast as tf


def test_what_fits_alone_is_scored_and_the_rest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    pack = [random_rollout(rng, name, tokens=n) for name, n in (("a", 60), ("huge", 400), ("b", 80))]
    scorer = tf.Scorer.from_module(tiny_model("llama"), None, max_tokens_per_pack=10_000)
    wanted = scorer.score(pack)
    run = scorer.model.hidden_states

    def small_machine(layout: Any) -> torch.Tensor:
        if len(layout) > 300:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory")
        return run(layout)

    monkeypatch.setattr(scorer.model, "hidden_states", small_machine)
    failed: list[tf.RolloutError] = []
    scores = scorer.score(pack, errors=failed.append)
    assert [s.id for s in scores] == ["a", "b"]
    np.testing.assert_array_equal(scores[0].mean_logprobs, wanted[0].mean_logprobs)
    np.testing.assert_array_equal(scores[1].mean_logprobs, wanted[2].mean_logprobs)
    assert [(e.rollout_id, e.kind) for e in failed] == [("huge", "length")]
    assert "distinct tokens does not fit into memory" in failed[0].reason


def test_other_errors_of_torch_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = tf.Scorer.from_module(tiny_model("llama"), None)

    def broken(layout: Any) -> torch.Tensor:
        raise RuntimeError("expected scalar type Float but found Half")

    monkeypatch.setattr(scorer.model, "hidden_states", broken)
    with pytest.raises(RuntimeError, match="expected scalar type Float"):
        scorer.score([random_rollout(np.random.default_rng(1))], errors=lambda e: None)
