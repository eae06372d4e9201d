"""Known public failures of the language-model head and of reductions; each test names the report it answers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import oracle
import pytest
import torch
from tiny_models import CONFIGS, SIZES, random_rollout, tiny_model
from transformers import AutoModelForCausalLM

import trace_fast as tf
from trace_fast.kernels.token_logprob import token_logprob
from trace_fast.kernels.token_logprob.torch_impl import VOCABULARY_CHUNK


def float64_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    return torch.log_softmax(logits, -1)[torch.arange(len(targets)), targets]


@pytest.mark.parametrize("vocabulary", [1, 2, VOCABULARY_CHUNK - 1, VOCABULARY_CHUNK + 1, 129920])
def test_the_vocabulary_tail_adds_nothing(vocabulary: int) -> None:
    """verl #2656: with V = 129,920 the last, partly filled block added exp(0) for each missing column, and
    log-probabilities rose to +123.7."""
    assert vocabulary % VOCABULARY_CHUNK
    generator = torch.Generator().manual_seed(vocabulary)
    hidden, weight = torch.randn(5, 16, generator=generator), torch.randn(vocabulary, 16, generator=generator)
    targets = torch.tensor([0, vocabulary - 1, vocabulary // 2, 0, vocabulary - 1])
    hidden[3] = 20 * weight[0]  # sure of its target: the log-probability is 0 up to rounding
    hidden[4] = 20 * weight[-1]
    far_below = -100.0 * torch.ones(vocabulary)  # next to these an exp(0) would be everything
    for bias in (None, far_below):
        found = token_logprob(hidden, weight, targets, bias_V=bias)
        wanted = float64_logprobs(hidden, weight, targets, bias)
        assert (found <= 0).all()
        torch.testing.assert_close(found[:3].double(), wanted[:3], rtol=0, atol=1e-5)
        # here logits reach several hundred, where neighbouring float32 numbers are 3e-5 apart
        torch.testing.assert_close(found[3:].double(), wanted[3:], rtol=0, atol=6e-5)


def test_logits_that_are_all_very_negative() -> None:
    """verl #7439: a running maximum that starts at 0 is wrong when every logit is negative."""
    generator = torch.Generator().manual_seed(0)
    # Multiples of 1/16 of moderate size: products, sums and the bias of -10,000 are exact in float32.
    hidden = torch.randint(-8, 9, (6, 8), generator=generator) / 4
    weight = torch.randint(-8, 9, (VOCABULARY_CHUNK + 77, 8), generator=generator) / 4
    targets = torch.tensor([0, 5, VOCABULARY_CHUNK - 1, VOCABULARY_CHUNK, VOCABULARY_CHUNK + 76, 1])
    bias = torch.full((len(weight),), -1e4)
    found = token_logprob(hidden, weight, targets, bias_V=bias)
    torch.testing.assert_close(found.double(), float64_logprobs(hidden, weight, targets), rtol=0, atol=2e-5)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_head_bias_is_added_once(scale: float) -> None:
    """cut-cross-entropy #52: the bias was added once a block of the hidden size."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(300, 640, generator=generator) / 25, torch.randn(9000, 640, generator=generator)
    bias = torch.randn(9000, generator=generator)
    targets = torch.randint(0, 9000, (300,), generator=generator)
    found = token_logprob(hidden, weight, targets, bias_V=bias, logit_scale=scale)
    wanted = float64_logprobs(hidden * scale, weight, targets, bias * scale)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-5)


def test_a_model_with_a_biased_head() -> None:
    """cut-cross-entropy #52, through a whole model: Phi's head has a bias."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(CONFIGS["phi"](**SIZES), dtype=torch.float32).eval()
    with torch.no_grad():
        module.lm_head.bias.normal_(std=3.0)
    rollout = random_rollout(np.random.default_rng(0), answers=(1, 4))
    score = tf.Scorer.from_module(module, None).score([rollout])[0]
    truth = oracle.double_precision(module)
    np.testing.assert_allclose(score.alias_mean_logprobs, oracle.mean_logprobs(truth, rollout), rtol=0, atol=1e-4)
    with torch.no_grad():
        truth.lm_head.bias.zero_()
    assert np.abs(score.alias_mean_logprobs - oracle.mean_logprobs(truth, rollout)).min() > 0.1


def test_a_tied_head_follows_its_embedding() -> None:
    """cut-cross-entropy #31, accelerate #4171: a tied head was taken for a copy, or lost."""
    module = tiny_model("llama-tied-biased")
    scorer = tf.Scorer.from_module(module, None)
    rollout = random_rollout(np.random.default_rng(1), answers=(2, 4))
    before = scorer.score([rollout])[0]
    with torch.no_grad():
        module.get_input_embeddings().weight.mul_(1.5)
    after = scorer.score([rollout])[0]
    wanted = oracle.mean_logprobs(oracle.double_precision(module), rollout)
    np.testing.assert_allclose(after.alias_mean_logprobs, wanted, rtol=0, atol=1e-4)
    assert np.abs(after.alias_mean_logprobs - before.alias_mean_logprobs).max() > 0.1
    assert module.lm_head.weight is module.get_input_embeddings().weight


LAYERS = {name: {"layer_types": ["sliding_attention", "full_attention"]} for name in ("gemma3", "gpt-oss")}


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts torch's thread count back."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "mistral-window", "gemma2", "gemma3", "gpt-oss"])
def test_no_reduction_depends_on_the_batch(threads: None, name: str, dtype: torch.dtype) -> None:
    """sglang #27869, verl #6280: kernels chosen by batch shape round differently. The company of a rollout, its place
    in the pack and the number of threads change no bit."""
    scorer = tf.Scorer.from_module(tiny_model(name, dtype, num_hidden_layers=2, **LAYERS.get(name, {})), None)
    rng = np.random.default_rng(2)
    prompt = rng.integers(3, 211, 30)
    sizes = (13, 160, 520)
    pack = [random_rollout(rng, f"r{i}", prompt=prompt, turns=i, tokens=n, answers=(1, 5)) for i, n in enumerate(sizes)]
    torch.set_num_threads(1)
    alone = [scorer.score([rollout], trunk_logprobs=True)[0] for rollout in pack]
    for count, order in ((1, [0, 1, 2]), (1, [2, 0, 1]), (3, [2, 0, 1]), (5, [0, 1, 2]), (5, [1])):
        torch.set_num_threads(count)
        together = scorer.score([pack[i] for i in order], trunk_logprobs=True)
        for i, score in zip(order, together, strict=True):
            np.testing.assert_array_equal(score.alias_mean_logprobs, alone[i].alias_mean_logprobs)
            np.testing.assert_array_equal(score.trunk_logprobs, alone[i].trunk_logprobs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_precision_head_is_reduced_in_float32(dtype: torch.dtype) -> None:
    """verl #6280: logits in bfloat16 put 8 % of the tokens out of band between batch shapes."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(200, 64, generator=generator), torch.randn(9000, 64, generator=generator)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    targets = torch.randint(0, 9000, (200,), generator=generator)
    wanted = float64_logprobs(hidden, weight, targets)
    found = token_logprob(hidden, weight, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-5)
    halves = [token_logprob(hidden[part], weight, targets[part]) for part in (slice(0, 77), slice(77, 200))]
    assert torch.equal(torch.cat(halves), found)
