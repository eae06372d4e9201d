"""Sampling with ``HfEngine``: recorded log-probabilities, frequencies, seeds, and what the company may change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import MODELS, tiny_model

from trace_fast.errors import ConfigError
from trace_fast.trainer.engines.engine import Request
from trace_fast.trainer.engines.hf import HfEngine


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.7, 0.8)])
def test_logprobs_are_those_of_the_distribution_sampled_from(temperature, top_p, oracle_of, prompts, ask):
    module = tiny_model("qwen3")
    oracle = oracle_of(module)
    engine = HfEngine(module, n_slots=3, max_length=150)
    for request, found in zip(
        ask(prompts, 12, temperature=temperature, top_p=top_p),
        engine.generate(ask(prompts, 12, temperature=temperature, top_p=top_p)),
        strict=True,
    ):
        truth = oracle.logprobs(request.prompt_ids, found.ids, temperature=temperature, top_p=top_p)
        bound = (2 / temperature) * oracle.bound(request.prompt_ids, found.ids)
        assert np.abs(found.logprobs - truth).max() <= bound


def test_frequencies(oracle_of):
    """2,000 seeds: Pearson's statistic of the first id lies below the 1 - 1e-6 quantile of chi square."""
    module = tiny_model("llama", vocab_size=23)
    prompt = np.arange(3, 12)
    engine = HfEngine(module, n_slots=50, max_length=12)
    count = 2000
    found = engine.generate([Request(prompt, 1, (), temperature=3.0, seed=seed) for seed in range(count)])
    logits = oracle_of(module).logits(prompt)[-1] / 3.0
    p = np.exp(logits - logits.max())
    p /= p.sum()
    observed = np.bincount([int(g.ids[0]) for g in found], minlength=23)
    assert (p * count).min() > 5  # the statistic's own condition
    statistic = ((observed - p * count) ** 2 / (p * count)).sum()
    assert statistic < 68.8  # 22 degrees of freedom


def test_a_seed_is_a_requests_own(prompts, ask):
    module = tiny_model("qwen3")
    requests = ask(prompts, 10, temperature=1.0)
    together = HfEngine(module, n_slots=4, max_length=150).generate(requests)
    backwards = HfEngine(module, n_slots=2, max_length=150).generate(requests[::-1])[::-1]
    for a, b in zip(together, backwards, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)  # rounding differs; that it decides a draw has odds of 1e-4 here
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
    assert not np.array_equal(together[1].ids, together[4].ids)  # one prompt, two seeds
    other = HfEngine(module, n_slots=4, max_length=150).generate(ask(prompts, 10, temperature=1.0, seed=100))
    assert all(not np.array_equal(a.ids, b.ids) for a, b in zip(together, other, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_exact_results_do_not_depend_on_company_or_cache(name, prompts, next_turn, ask):
    """Two turns of all together in four slots, against each alone in new engines: the same bits."""
    module = tiny_model(name)
    engine = HfEngine(module, n_slots=4, max_length=160, prefill_rows=50, exact=True)
    first = ask(prompts, 11, temperature=1.0, top_p=0.95)
    found = engine.generate(first)
    second = ask(next_turn(prompts, found, 2), 11, temperature=1.0, seed=50)
    for requests, generations in ((first, found), (second, engine.generate(second))):
        for number in (0, 3, 5):
            alone = HfEngine(module, n_slots=1 + number % 3, max_length=160, exact=True)
            (one,) = alone.generate([requests[number]])
            np.testing.assert_array_equal(one.ids, generations[number].ids)
            np.testing.assert_array_equal(one.logprobs, generations[number].logprobs)


def test_exact_needs_the_cpu():
    module = tiny_model("llama").to("meta")
    with pytest.raises(ConfigError, match="exact: expected a model on the CPU, got one on meta"):
        HfEngine(module, n_slots=1, max_length=8, exact=True)


def test_torch_random_state_is_not_touched(prompts, ask):
    engine = HfEngine(tiny_model("llama"), n_slots=3, max_length=150)
    before = torch.get_rng_state()
    engine.generate(ask(prompts, 5, temperature=1.0))
    assert torch.equal(torch.get_rng_state(), before)
