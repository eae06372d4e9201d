"""A module that the caller holds is left as it was: after scoring, after errors, and it trains on as before."""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from tiny_models import VOCABULARY, random_rollout, tiny_model
from torch.overrides import _get_current_function_mode_stack
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as hf_logging

import trace_fast as tf
from trace_fast.scorer import Scorer  # at once, not on first use: rich, which it imports, draws from ``random`` then

NAMES = ["llama", "qwen3-moe", "gemma3", "gpt-oss"]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def held_module(name: str) -> PreTrainedModel:
    """As a trainer may hold it: in training mode but for two submodules, partly frozen, with a hook of its own."""
    module = tiny_model(name).train()
    module.model.layers[1].eval()
    module.model.norm.eval()
    module.get_input_embeddings().weight.requires_grad_(False)
    module.set_attn_implementation("eager")
    module.config.use_cache = True
    module.model.layers[0].register_forward_hook(lambda *_: None)
    return module


def rollouts(count: int = 2) -> list[tf.Rollout]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCABULARY, 20)
    return [random_rollout(rng, f"r{i}", prompt=prompt, turns=2, answers=(1, 4)) for i in range(count)]


def state_of(module: PreTrainedModel) -> dict[str, Any]:
    """Everything about a module, and about the process, that scoring could leave changed."""
    experts = module.get_experts_implementation() if module._can_set_experts_implementation() else None
    return {
        "attention": module.config._attn_implementation,
        "layers' attention": [layer.self_attn.config._attn_implementation for layer in module.model.layers],
        "experts": experts,
        "config": module.config.to_dict(),
        "generation config": module.generation_config.to_dict(),
        "modes": {name: m.training for name, m in module.named_modules()},
        "classes and forwards": {name: (type(m), m.__dict__.get("forward")) for name, m in module.named_modules()},
        "hooks": {
            name: {kind: list(getattr(m, kind).values()) for kind in HOOKS} for name, m in module.named_modules()
        },
        "attributes": {name: sorted(m.__dict__) for name, m in module.named_modules()},
        "parameters": {
            name: (id(p), p.requires_grad, p.grad is None, p._version, p.detach().numpy().tobytes())
            for name, p in module.named_parameters()
        },
        "buffers": {name: (id(b), b.numpy().tobytes()) for name, b in module.named_buffers()},
        "random states": (
            torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes(),
        ),
        "gradient mode": torch.is_grad_enabled(),
        "function modes": _get_current_function_mode_stack(),
        "attention functions": {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS.valid_keys()},
        "transformers' logging": (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()),
        "threads and default dtype": (torch.get_num_threads(), torch.get_default_dtype()),
    }  # fmt: skip


@contextlib.contextmanager
def unchanged(module: PreTrainedModel) -> Iterator[None]:
    """Fails with the part that differs afterwards."""
    before = state_of(module)
    yield
    after = state_of(module)
    for part, value in before.items():
        assert after[part] == value, part


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_module_changes(name: str) -> None:
    module = held_module(name)
    with unchanged(module):
        scorer = Scorer.from_module(module, None)
    pack = rollouts()
    with unchanged(module):
        scores = scorer.score(pack, trunk_logprobs=True)
    truth = oracle.double_precision(module)
    for rollout, score in zip(pack, scores, strict=True):
        wanted = oracle.mean_logprobs(truth, rollout)
        np.testing.assert_allclose(score.alias_mean_logprobs, wanted, rtol=0, atol=1e-4)


def test_experts_implementation_of_the_caller_stays() -> None:
    module = tiny_model("qwen3-moe")
    module.set_experts_implementation("grouped_mm")
    chosen = module.get_experts_implementation()
    assert "grouped_mm" in str(chosen)
    with unchanged(module):
        Scorer.from_module(module, None).score(rollouts())
    assert module.get_experts_implementation() == chosen


@pytest.mark.parametrize("name", NAMES)
def test_the_modules_own_forward_gives_the_same_bits(name: str) -> None:
    module = tiny_model(name)
    ids = torch.randint(3, VOCABULARY, (2, 50))
    with torch.no_grad():
        before = module(ids)
        Scorer.from_module(module, None).score(rollouts())
        after = module(ids)
    assert torch.equal(after.logits, before.logits)
    assert before.past_key_values is not None
    assert after.past_key_values is not None, "use_cache must be as before"


@pytest.mark.parametrize("name", NAMES)
def test_the_module_trains_on(name: str) -> None:
    """The gradients of a module that has been scored with are those of one that has not."""

    def gradients(module: PreTrainedModel, between: Callable[[], object]) -> dict[str, torch.Tensor]:
        ids = torch.arange(3, 63)[None]
        module(ids, labels=ids).loss.backward()  # a first step's gradients are there while scoring
        between()
        module(ids, labels=ids).loss.backward()
        return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}

    plain, scored = tiny_model(name).train(), tiny_model(name).train()
    scorer = Scorer.from_module(scored, None)
    wanted = gradients(plain, lambda: None)
    found = gradients(scored, lambda: scorer.score(rollouts()))
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        assert torch.equal(found[key], gradient), key
        assert torch.isfinite(gradient).all()
    assert not any(t.is_inference() for t in scored.state_dict().values())


def test_scores_follow_an_optimizer_step() -> None:
    module = tiny_model("llama").train()
    scorer = Scorer.from_module(module, None)
    rollout = rollouts(1)[0]
    before = scorer.score([rollout])[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    ids = torch.as_tensor(rollout.input_ids)[None]
    module(ids, labels=ids).loss.backward()
    optimizer.step()
    after = scorer.score([rollout])[0]
    wanted = oracle.mean_logprobs(oracle.double_precision(module), rollout)
    np.testing.assert_allclose(after.alias_mean_logprobs, wanted, rtol=0, atol=1e-4)
    assert np.abs(after.alias_mean_logprobs - before.alias_mean_logprobs).max() > 1e-2


def test_scores_follow_replaced_parameters() -> None:
    """``load_state_dict(assign=True)``, as reference models are synchronised, puts other tensors in their place."""
    module = tiny_model("llama")
    scorer = Scorer.from_module(module, None)
    module.load_state_dict({name: 1.1 * tensor for name, tensor in module.state_dict().items()}, assign=True)
    rollout = rollouts(1)[0]
    wanted = oracle.mean_logprobs(oracle.double_precision(module), rollout)
    np.testing.assert_allclose(scorer.score([rollout])[0].alias_mean_logprobs, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "cohere"])
def test_the_callers_autocast_reaches_no_number(name: str) -> None:
    """A trainer scores inside its own mixed-precision region; the scores are those of the scorer's dtype."""
    scorer = Scorer.from_module(tiny_model(name), None)
    wanted = scorer.score(rollouts())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = scorer.score(rollouts())
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a.alias_mean_logprobs, b.alias_mean_logprobs)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.enable_grad, torch.no_grad])
def test_the_callers_gradient_mode_does_not_matter(context: Callable[[], Any]) -> None:
    module = tiny_model("llama")
    scorer = Scorer.from_module(module, None)
    wanted = scorer.score(rollouts())
    with context():
        found = scorer.score(rollouts())
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a.alias_mean_logprobs, b.alias_mean_logprobs)
    module(torch.arange(3, 40)[None], labels=torch.arange(3, 40)[None]).loss.backward()
    assert module.lm_head.weight.grad is not None


class Stop(Exception):
    """What a caller's own code may raise."""


@pytest.mark.parametrize("raised", [Stop, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("name", NAMES)
def test_everything_is_put_back_when_scoring_breaks_off(name: str, raised: type[BaseException]) -> None:
    """In the middle of a pass: the second layer raises."""
    module = held_module(name)
    scorer = Scorer.from_module(module, None)
    pack = rollouts()
    wanted = scorer.score(pack)
    raising = False

    def interrupt(*_: Any) -> None:
        if raising:
            raise raised("in the middle")

    module.model.layers[1].register_forward_pre_hook(interrupt)
    with unchanged(module):
        raising = True
        with pytest.raises(raised, match="in the middle"):
            scorer.score(pack)
        raising = False
    for a, b in zip(scorer.score(pack), wanted, strict=True):
        np.testing.assert_array_equal(a.alias_mean_logprobs, b.alias_mean_logprobs)


def test_everything_is_put_back_when_a_rollout_is_refused() -> None:
    module = held_module("llama")
    scorer = Scorer.from_module(module, None)
    good, other = rollouts()
    bad = random_rollout(np.random.default_rng(1), "bad", vocabulary=VOCABULARY + 500)
    with unchanged(module), pytest.raises(tf.RolloutError, match="rollout 'bad'"):
        scorer.score([good, bad, other])


def test_a_caller_may_stop_between_packs() -> None:
    module = held_module("llama")
    scorer = Scorer.from_module(module, None, max_tokens_per_pack=1)
    with unchanged(module):
        packs = scorer.iter_packs(rollouts(3))
        assert next(packs).scores[0].id == "r0"
        with unchanged(module):
            assert next(packs).scores[0].id == "r1"
        del packs


def test_two_names_are_registered_and_no_other() -> None:
    """transformers' table of attention functions has one entry of the scorer's and, with the trainer's rollout engine
    imported, one of that; its own are its own."""
    importlib.import_module("trace_fast.trainer.engines.slot_attention")
    ours = {
        name
        for name in ALL_ATTENTION_FUNCTIONS.valid_keys()
        if ALL_ATTENTION_FUNCTIONS[name].__module__.startswith("trace_fast")
    }
    assert ours == {"trace_fast", "trace_fast_slots"}
    assert ALL_ATTENTION_FUNCTIONS["sdpa"].__module__.startswith("transformers.")
    assert _get_current_function_mode_stack() == []


def test_the_callers_matmul_precision_reaches_no_number() -> None:
    """``set_float32_matmul_precision("medium")`` computes float32 products in bfloat16."""
    scorer = Scorer.from_module(tiny_model("llama"), None)
    wanted = scorer.score(rollouts())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = scorer.score(rollouts())
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a.alias_mean_logprobs, b.alias_mean_logprobs)


def test_a_float64_module() -> None:
    module = tiny_model("llama", torch.float64)
    rollout = rollouts(1)[0]
    wanted = oracle.mean_logprobs(oracle.double_precision(module), rollout)
    found = Scorer.from_module(module, None).score([rollout])[0]
    # transformers computes norms and rotary angles in float32 whatever the module's dtype
    np.testing.assert_allclose(found.alias_mean_logprobs, wanted, rtol=0, atol=1e-5)
