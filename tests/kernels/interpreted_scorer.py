"""The scorer and the credit of its scores on Triton alone, in Triton's interpreter, against the naive float64 pass.

Run by ``test_triton.py`` in a process of its own with TRITON_INTERPRET=1. The models have the kinds of attention and
heads that the kernels tell apart, and few rows: the interpreter takes seconds a pack. Memory that torch allocates is
filled with NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from tiny_models import random_rollout, tiny_model

import trace_fast as tf
from trace_fast.backends import fastest
from trace_fast.kernels.prefix_attention.triton_impl import INTERPRETED
from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore
from trace_fast.scorer import Scorer

assert INTERPRETED, "this module needs TRITON_INTERPRET=1"

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of lanes past the end that are never stored
]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"head_dim": 64},  # two softcaps, a window; float32 kernels take head dims up to 128
    "gpt-oss": {},  # sinks, a window, experts
}
MEAN, TOKEN = 1e-4, 3e-4  # nats: what float32 scores are promised to keep to, of an answer and of one of its tokens
ORDER = 2e-5  # nats: two implementations in float32, which sum the same terms in another order


def small_group() -> list[Rollout]:
    """Three rollouts of one prompt: no turn, one, four; longer than the windows; one token an answer, and five."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 211, 30)
    return [
        replace(
            random_rollout(rng, f"r{i}", prompt=prompt, turns=turns, tokens=tokens, answers=(1, 5), opener=i),
            reward=float(i == 1),
        )
        for i, (turns, tokens) in enumerate([(0, 10), (1, 20), (4, 60)])
    ]


def on_triton(module: Any) -> Scorer:
    scorer = Scorer.from_module(module, None, backend="triton")
    chosen = scorer.model.backends
    assert (chosen.prefix_attention, chosen.token_logprob) == ("triton", "triton")
    return scorer


def within(a: np.ndarray, b: np.ndarray, nats: float) -> None:
    np.testing.assert_allclose(a, b, rtol=0, atol=nats)


@pytest.mark.parametrize("name", MODELS)
def test_every_state_matches_the_naive_float64_pass(name: str) -> None:
    module = tiny_model(name, **MODELS[name])
    pack = small_group()
    scores = on_triton(module).score(pack, trunk_logprobs=True)
    tiles = Scorer.from_module(module, None, backend="torch").score(pack)
    truth = oracle.double_precision(module)
    lowest = 0.0
    for rollout, score, other in zip(pack, scores, tiles, strict=True):
        wanted = oracle.answer_logprobs(truth, rollout)
        means = np.array([[wanted[k, a].mean() for a in range(2)] for k in range(rollout.n_states)])
        within(score.alias_mean_logprobs, means, MEAN)
        np.testing.assert_array_equal(score.alias, means.argmax(1))
        for k, best in enumerate(score.alias):
            within(score.token_logprobs[k], wanted[k, best], TOKEN)
        assert score.trunk_logprobs is not None
        within(score.trunk_logprobs, oracle.sequence_logprobs(truth, rollout.input_ids), TOKEN)
        within(score.alias_mean_logprobs, other.alias_mean_logprobs, ORDER)
        lowest = min(lowest, means.min())
    assert lowest < -3, "the model must be sure enough of something for a mistake to show"


def test_half_precision_is_no_further_from_the_truth_than_the_naive_pass() -> None:
    """float16: the interpreter cannot multiply bfloat16. A quantile of n = 112 answers' errors has this relative
    standard error (normal errors); two such samples of the same noise are allowed two of them."""
    module = tiny_model("llama", torch.float16, num_hidden_layers=2)
    rng = np.random.default_rng(5)
    pack = [random_rollout(rng, f"r{i}", turns=12, tokens=60, answers=(2, 2, 2, 2), opener=1) for i in range(2)]
    truth = oracle.double_precision(module)
    ours, naive = [], []
    for rollout, score in zip(pack, on_triton(module).score(pack), strict=True):
        wanted = oracle.mean_logprobs(truth, rollout)
        ours.append(np.abs(score.alias_mean_logprobs - wanted).ravel())
        naive.append(np.abs(oracle.mean_logprobs(module, rollout) - wanted).ravel())
    mine, theirs = np.concatenate(ours), np.concatenate(naive)
    assert (len(mine), theirs.min() > 0) == (112, True)
    for quantile, noise in ((0.5, 0.11), (0.75, 0.09), (0.9, 0.12), (0.95, 0.15)):
        assert np.quantile(mine, quantile) <= np.quantile(theirs, quantile) * (1 + 2 * noise * 2**0.5), quantile


@pytest.mark.parametrize(("turns", "answer"), [(61, 1), (1, 63)])
def test_turns_and_answers_of_odd_sizes(turns: int, answer: int) -> None:
    module = tiny_model("qwen3", num_hidden_layers=2)
    rollout = random_rollout(np.random.default_rng(turns), turns=turns, tokens=70, answers=(answer,), opener=1)
    score = on_triton(module).score([rollout])[0]
    assert [len(tokens) for tokens in score.token_logprobs] == [answer] * (turns + 2)
    within(score.alias_mean_logprobs, oracle.mean_logprobs(oracle.double_precision(module), rollout), MEAN)


def test_what_holds_for_the_bits() -> None:
    """The same pack gives the same bits, and a row does not notice what other branches hold. In another pack the key
    blocks of a row may lie elsewhere, which is the order of its sums (kernels/prefix_attention/README.md)."""

    def same_bits(a: RolloutScore, b: RolloutScore) -> None:
        np.testing.assert_array_equal(a.alias_mean_logprobs, b.alias_mean_logprobs)
        np.testing.assert_array_equal(a.trunk_logprobs, b.trunk_logprobs)

    scorer = on_triton(tiny_model("llama", num_hidden_layers=2))
    pack = small_group()[1:]
    first, again = (scorer.score(pack, trunk_logprobs=True) for _ in range(2))
    for a, b, rollout in zip(first, again, pack, strict=True):
        same_bits(a, b)
        alone = scorer.score([rollout])[0]
        within(a.alias_mean_logprobs, alone.alias_mean_logprobs, ORDER)

    changed = replace(pack[1], openers=(pack[1].openers[0], pack[1].openers[1] % 200 + 5, *pack[1].openers[2:]))
    other, branch = scorer.score([pack[0], changed], trunk_logprobs=True)
    same_bits(first[0], other)
    np.testing.assert_array_equal(first[1].trunk_logprobs, branch.trunk_logprobs)
    differs = (first[1].alias_mean_logprobs != branch.alias_mean_logprobs).all(1)
    np.testing.assert_array_equal(differs, np.arange(changed.n_states) == 1)


def test_credit_of_the_scores_is_that_of_the_naive_pass() -> None:
    """Of a value and of a credit log(d / d') each, a score that is off by MEAN moves both logarithms by MEAN / d; a
    reward is a mean of credits, plus a term that knows no score."""
    assert fastest("turn_credit", torch.device("cpu"), torch.float64) == "triton"
    module = tiny_model("llama", num_hidden_layers=2)
    pack = small_group()
    credits = tf.turn_credit(on_triton(module).score(pack))
    truth = oracle.double_precision(module)
    assert [c.outcome_advantage for c in credits] == pytest.approx([-(0.5**0.5), 2**0.5, -(0.5**0.5)])
    for rollout, credit in zip(pack, credits, strict=True):
        means = oracle.mean_logprobs(truth, rollout).max(1)
        wanted = tf.reference_credit(means, rollout.n_turns, credit.outcome_advantage)
        nats = 2 * MEAN / (tf.CreditConfig().gap_offset - means).min()
        assert np.abs(wanted.deltas).min() > 10 * nats, "every credit must be one that a mistake would show in"
        within(credit.values, wanted.values, nats)
        within(credit.deltas, wanted.deltas, nats)
        within(credit.rewards, wanted.rewards, nats)
