"""``draw`` against NumPy in float64: ids by inverse transform, log-probabilities after temperature and top-p."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trace_fast.trainer.engines.sampler import draw

FLOAT32 = float(np.finfo(np.float32).eps)


def uniform_row(logits, temperature=1.0, top_p=1.0, uniform=0.5):
    drawn = draw(torch.tensor([logits]), np.array([temperature]), np.array([top_p]), np.array([uniform]))
    return int(drawn.ids[0]), float(drawn.logprobs[0]), bool(drawn.good[0])


@pytest.mark.parametrize("vocabulary", [1, 2, 63, 4097, 129_920])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.3, 1.0), (2.5, 0.9), (1.0, 0.05), (0.7, 1e-9)])
def test_ids_and_logprobs(vocabulary, temperature, top_p, true_distribution):
    rng = np.random.default_rng(vocabulary)
    rows = 17
    logits = (4 * rng.standard_normal((rows, vocabulary))).astype(np.float32)
    uniform = rng.random(rows)
    drawn = draw(torch.as_tensor(logits), np.full(rows, temperature), np.full(rows, top_p), uniform)
    assert drawn.good.all()
    assert (drawn.logprobs <= 0).all()
    for row in range(rows):
        logp = true_distribution(logits[row].astype(np.float64), temperature, top_p)
        token = drawn.ids[row]
        below = np.exp(logp[:token]).sum()
        # u falls into the id's share of [0, 1); its ends are sums of float32 probabilities
        slack = 8 * FLOAT32 * (1 + np.abs(logits[row]).max() / temperature)
        assert below - slack <= uniform[row] < below + np.exp(logp[token]) + slack
        assert abs(drawn.logprobs[row] - logp[token]) <= slack


def test_an_id_without_probability_is_never_drawn():
    for uniform in (0.0, 0.5, np.nextafter(1.0, 0.0)):
        token, logprob, good = uniform_row([-np.inf, 0.0, -np.inf, 0.0, -np.inf], uniform=uniform)
        assert token in (1, 3)
        assert good
        assert logprob == pytest.approx(np.log(0.5), abs=2 * FLOAT32)


def test_the_tail_of_a_large_vocabulary_is_drawn():
    # 1e5 ids of probability 5e-6 each after one of 0.5: float32 sums would lose most of them.
    logits = torch.zeros(1, 100_001)
    logits[0, 0] = np.log(100_000)
    for uniform in (0.25, 0.5 + 1e-7, 0.75, 0.999999):
        drawn = draw(logits, np.ones(1), np.ones(1), np.array([uniform]))
        expected = 0 if uniform < 0.5 else int((uniform - 0.5) * 200_000) + 1
        assert abs(int(drawn.ids[0]) - expected) <= 1


def test_greedy_beside_sampled_rows():
    logits = torch.tensor([[0.0, 2.0, 1.0]]).repeat(3, 1)
    drawn = draw(logits, np.array([0.0, 1.0, 0.0]), np.array([1.0, 1.0, 0.01]), np.array([0.0, 0.0, 0.9]))
    assert drawn.ids.tolist() == [1, 0, 1]
    logp = logits[0].double().log_softmax(0).numpy()
    np.testing.assert_allclose(drawn.logprobs, logp[[1, 0, 1]], atol=4 * FLOAT32)


def test_top_p_keeps_what_reaches_the_mass():
    logits = np.log([0.5, 0.3, 0.2])
    for top_p, kept in [(0.4, 1), (0.501, 2), (0.79, 2), (0.81, 3)]:
        tokens = {uniform_row(logits.tolist(), top_p=top_p, uniform=u)[0] for u in np.linspace(0, 0.999, 50)}
        assert tokens == set(range(kept))
    token, logprob, _ = uniform_row(logits.tolist(), top_p=0.79, uniform=0.9)
    assert (token, logprob) == (1, pytest.approx(np.log(0.3 / 0.8), abs=8 * FLOAT32))
    assert uniform_row(logits.tolist(), top_p=0.4, uniform=0.9)[1] == pytest.approx(0, abs=2 * FLOAT32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers(bad):
    logits = torch.zeros(3, 5)
    logits[1, 3] = bad
    logits[2] = float("-inf")
    for temperature in (0.0, 1.0):
        drawn = draw(logits, np.full(3, temperature), np.array([1.0, 0.5, 1.0]), np.full(3, 0.3))
        assert drawn.good.tolist() == [True, False, False]
        assert (drawn.ids >= 0).all()
        assert (drawn.ids < 5).all()


def test_half_precision_logits_are_widened_first(true_distribution):
    logits = torch.linspace(-3, 3, 50, dtype=torch.bfloat16)
    drawn = draw(logits[None], np.ones(1), np.ones(1), np.array([0.9]))
    truth = true_distribution(logits.double().numpy(), 1.0, 1.0)
    assert abs(drawn.logprobs[0] - truth[drawn.ids[0]]) <= 16 * FLOAT32
