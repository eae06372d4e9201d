"""The scorer's means come from the head's own call: once a distinct answer, in float64, in the order of its tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tiny_models import random_rollout, tiny_model

from trace_fast import Scorer
from trace_fast.model import ReferenceModel


def test_means_and_the_rows_that_the_head_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    score = ReferenceModel.mean_logprobs

    def counted(
        self: ReferenceModel, hidden: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, cu: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((rows.numpy(), targets.numpy(), cu.numpy()))
        return score(self, hidden, rows, targets, cu)

    monkeypatch.setattr(ReferenceModel, "mean_logprobs", counted)
    scorer = Scorer.from_module(tiny_model("llama", num_hidden_layers=1), None)
    one = random_rollout(np.random.default_rng(0), turns=3, tokens=120, answers=(1, 63), opener=2)
    twin = dataclasses.replace(one, id="twin")  # all its states are the first one's
    other = random_rollout(np.random.default_rng(1), turns=0, tokens=70, answers=(5,), opener=1)
    pairs = 5 * (1 + 63) + 2 * 5  # states times answer tokens
    scores = scorer.score([one, twin, other])
    ((rows, targets, cu),) = calls
    assert len(cu) - 1 == 5 * 2 + 2, "the twin's answers are no segments of their own"
    assert len(rows) == cu[-1] == len(targets) == pairs
    for found in scores:
        for k, tokens in enumerate(found.token_logprobs):
            best = found.alias_mean_logprobs[k, found.alias[k]]
            assert best == pytest.approx(tokens.mean(dtype=np.float64), rel=63 * 2.0**-53, abs=0)
    np.testing.assert_array_equal(scores[0].alias_mean_logprobs, scores[1].alias_mean_logprobs)
    assert not np.shares_memory(scores[0].token_logprobs[0], scores[1].token_logprobs[0])

    calls.clear()
    with_trunk = scorer.score([one, twin, other], trunk_logprobs=True)
    ((rows, _, cu),) = calls
    trunk = len(one.input_ids) - 1 + len(other.input_ids) - 1  # the twin's tokens are the first one's
    assert cu[-1] == pairs + trunk
    for plain, fuller, rollout in zip(scores, with_trunk, (one, twin, other), strict=True):
        np.testing.assert_array_equal(plain.mean_logprobs, fuller.mean_logprobs)
        assert len(fuller.trunk_logprobs) == len(rollout.input_ids) - 1

    calls.clear()
    masked = [dataclasses.replace(r, loss_mask=np.arange(len(r.input_ids)) % 5 < 2) for r in (one, twin, other)]
    written = scorer.score(masked, written_logprobs=True)
    ((rows, _, cu),) = calls
    assert cu[-1] == pairs + sum(int(r.loss_mask[1:].sum()) for r in (masked[0], masked[2]))
    both = scorer.score(masked, trunk_logprobs=True, written_logprobs=True)
    for few, more, fuller, rollout in zip(written, both, with_trunk, masked, strict=True):
        chosen = fuller.trunk_logprobs[rollout.loss_mask[1:]]
        np.testing.assert_array_equal(few.written_logprobs, chosen)
        np.testing.assert_array_equal(more.written_logprobs, chosen)
        np.testing.assert_array_equal(more.trunk_logprobs, fuller.trunk_logprobs)
        np.testing.assert_array_equal(few.mean_logprobs, fuller.mean_logprobs)
        assert few.trunk_logprobs is fuller.written_logprobs is None
    nothing = dataclasses.replace(one, loss_mask=np.zeros(len(one.input_ids), bool))
    assert scorer.score([nothing], written_logprobs=True)[0].written_logprobs.shape == (0,)

    alone = [scorer.score([rollout], trunk_logprobs=True)[0] for rollout in (one, other)]
    for packed, single in zip((with_trunk[0], with_trunk[2]), alone, strict=True):
        np.testing.assert_array_equal(packed.alias_mean_logprobs, single.alias_mean_logprobs)
        np.testing.assert_array_equal(packed.trunk_logprobs, single.trunk_logprobs)
