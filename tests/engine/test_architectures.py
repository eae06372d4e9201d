"""Every supported architecture against the naive float64 truth, in float32 and in half precision."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from tiny_models import CPU_BACKENDS, MODELS, random_rollout, tiny_model

import trace_fast as tf
from trace_fast.rollout import Rollout

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def group_of_rollouts(seed: int) -> list[Rollout]:
    """Three rollouts of one prompt, longer than every window of the tiny models, one past a depth block."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(3, 211, 40)
    lengths = (90, 160, 520)
    return [
        random_rollout(rng, f"r{i}", prompt=prompt, turns=i + 1, tokens=n, answers=(1, 5), opener=i)
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_float32_matches_the_naive_float64_pass(name: str, backend: str) -> None:
    module = tiny_model(name)
    pack = group_of_rollouts(0)
    scores = tf.Scorer.from_module(module, None, backend=backend).score(pack)
    truth = oracle.double_precision(module)
    for rollout, score in zip(pack, scores, strict=True):
        wanted = oracle.answer_logprobs(truth, rollout)
        means = np.array([[wanted[k, a].mean() for a in range(2)] for k in range(rollout.n_states)])
        np.testing.assert_allclose(score.alias_mean_logprobs, means, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(score.alias, means.argmax(1))
        np.testing.assert_allclose(score.mean_logprobs, means.max(1), rtol=0, atol=1e-4)
        for k, best in enumerate(score.alias):
            np.testing.assert_allclose(score.token_logprobs[k], wanted[k, best], rtol=0, atol=3e-4)
    assert means.min() < -3, "the model must be sure enough of something for a mistake to show"


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_no_further_from_the_truth_than_the_naive_pass(
    name: str, dtype: torch.dtype, backend: str
) -> None:
    module = tiny_model(name, dtype)
    rng = np.random.default_rng(5)
    pack = [random_rollout(rng, f"r{i}", turns=12, tokens=240, answers=(3, 3, 3, 3), opener=2) for i in range(2)]
    scores = tf.Scorer.from_module(module, None, backend=backend).score(pack)
    truth = oracle.double_precision(module)
    ours, naive = [], []
    for rollout, score in zip(pack, scores, strict=True):
        wanted = oracle.mean_logprobs(truth, rollout)
        ours.append(np.abs(score.alias_mean_logprobs - wanted).ravel())
        naive.append(np.abs(oracle.mean_logprobs(module, rollout) - wanted).ravel())
    mine, theirs = np.concatenate(ours), np.concatenate(naive)
    assert theirs.max() > 0
    # Two samples of the same rounding noise: n = 112 answers; a quantile of either has this relative standard error
    # (normal errors), so the comparison allows two of them and no more. Beyond 95 % a quantile of 112 is one number.
    # With experts the tail is no rounding noise: a router that sends one token elsewhere moves all answers behind it,
    # and two rollouts see a handful of such events; there the bulk is compared.
    bulk, tail = ((0.5, 0.11), (0.75, 0.09)), ((0.9, 0.12), (0.95, 0.15))
    for quantile, noise in bulk if "moe" in name else (*bulk, *tail):
        assert np.quantile(mine, quantile) <= np.quantile(theirs, quantile) * (1 + 2 * noise * 2**0.5), quantile


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_trunk_logprobs_are_the_rollouts_own_log_probabilities(name: str, backend: str) -> None:
    module = tiny_model(name)
    pack = group_of_rollouts(1)
    scores = tf.Scorer.from_module(module, None, backend=backend).score(pack, trunk_logprobs=True)
    truth = oracle.double_precision(module)
    for rollout, score in zip(pack, scores, strict=True):
        assert score.trunk_logprobs is not None
        np.testing.assert_allclose(
            score.trunk_logprobs, oracle.sequence_logprobs(truth, rollout.input_ids), rtol=0, atol=3e-4
        )


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 160, 256])
def test_head_dims(dim: int, backend: str) -> None:
    module = tiny_model("llama", head_dim=dim, num_hidden_layers=2)
    rollout = random_rollout(np.random.default_rng(2), turns=3, tokens=90)
    score = tf.Scorer.from_module(module, None, backend=backend).score([rollout])[0]
    wanted = oracle.mean_logprobs(oracle.double_precision(module), rollout)
    np.testing.assert_allclose(score.alias_mean_logprobs, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("turns", [0, 1, 61])
@pytest.mark.parametrize("answer", [1, 63])
def test_turns_and_answers_of_odd_sizes(turns: int, answer: int) -> None:
    module = tiny_model("qwen3")
    rollout = random_rollout(np.random.default_rng(turns + answer), turns=turns, tokens=150, answers=(answer,))
    score = tf.Scorer.from_module(module, None).score([rollout])[0]
    assert score.mean_logprobs.shape == (turns + 2,)
    assert [len(t) for t in score.token_logprobs] == [answer] * (turns + 2)
    wanted = oracle.mean_logprobs(oracle.double_precision(module), rollout)
    np.testing.assert_allclose(score.alias_mean_logprobs, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_the_reference_backend_agrees(backend: str) -> None:
    module = tiny_model("gpt-oss")
    pack = group_of_rollouts(3)
    fast = tf.Scorer.from_module(module, None, backend=backend).score(pack)
    plain = tf.Scorer.from_module(module, None, backend="reference").score(pack)
    for a, b in zip(fast, plain, strict=True):
        np.testing.assert_allclose(a.alias_mean_logprobs, b.alias_mean_logprobs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("alias", ["max", "mean", "logsumexp"])
def test_aliases_combine_a_state_at_a_time(alias: str) -> None:
    module = tiny_model("llama")
    rollout = random_rollout(np.random.default_rng(7), turns=2, answers=(2, 5, 9))
    score = tf.Scorer.from_module(module, None, alias=alias).score([rollout])[0]
    means = score.alias_mean_logprobs
    wanted = {"max": means.max(1), "mean": means.mean(1), "logsumexp": np.log(np.exp(means).mean(1))}[alias]
    np.testing.assert_allclose(score.mean_logprobs, wanted, rtol=1e-12)
    np.testing.assert_array_equal(score.alias, means.argmax(1))
    assert (score.mean_logprobs <= 0).all()


def test_history_that_a_template_rewrote_is_scored_exactly() -> None:
    """Prefixes that are not nested share what they have in common and are scored as they stand."""
    rng = np.random.default_rng(8)
    nested = random_rollout(rng, turns=3, tokens=100)
    prefixes = [nested.prefix(k).copy() for k in range(nested.n_states)]
    for k in range(2, nested.n_states):  # an earlier thinking block vanishes
        prefixes[k] = np.concatenate([prefixes[k][:25], prefixes[k][35:]])
    rollout = Rollout(
        id="rewritten",
        group="g",
        input_ids=nested.input_ids,
        boundaries=np.array([len(p) for p in prefixes]),
        n_turns=3,
        answers=nested.answers,
        openers=nested.openers,
        state_prefixes=tuple(prefixes),
    )
    module = tiny_model("qwen2")
    score = tf.Scorer.from_module(module, None).score([rollout])[0]
    wanted = oracle.mean_logprobs(oracle.double_precision(module), rollout)
    np.testing.assert_allclose(score.alias_mean_logprobs, wanted, rtol=0, atol=1e-4)
