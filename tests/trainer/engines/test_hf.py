"""``HfEngine`` against the model that computes every prefix anew in float64: ids, log-probabilities, how it ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import MODELS, VOCABULARY, tiny_model

from trace_fast.errors import ConfigError, ModelError
from trace_fast.trainer.engines.engine import FinishReason, Request
from trace_fast.trainer.engines.hf import HfEngine
from trace_fast.trainer.engines.slots import LEAST_SHARED


def check(oracle, requests, generations):
    """Greedy ids are the oracle's, log-probabilities within its bound."""
    for request, found in zip(requests, generations, strict=True):
        np.testing.assert_array_equal(found.ids, oracle.greedy_after(request.prompt_ids, found.ids))
        stopped = bool(np.isin(found.ids[-1:], request.stop_ids).any())
        assert stopped or len(found.ids) == request.max_new_tokens
        assert not np.isin(found.ids[:-1], request.stop_ids).any()
        truth = oracle.logprobs(request.prompt_ids, found.ids)
        assert np.abs(found.logprobs - truth).max() <= oracle.bound(request.prompt_ids, found.ids)
        assert found.ids.dtype == np.int64
        assert found.logprobs.dtype == np.float32
        assert (found.logprobs <= 0).all()


@pytest.mark.parametrize(
    ("name", "exact"),
    [*((name, False) for name in MODELS), *((name, True) for name in ("qwen3", "mistral-window", "gemma2", "gpt-oss"))],
)
def test_three_turns_in_fewer_slots_than_sequences(name, exact, oracle_of, prompts, next_turn, ask):
    module = tiny_model(name)
    oracle = oracle_of(module)
    engine = HfEngine(module, n_slots=3, max_length=150, prefill_rows=50, exact=exact)
    for turn in range(3):
        requests = ask(prompts, 5 + turn)
        generations = engine.generate(requests)
        check(oracle, requests, generations)
        assert all(g.finish is FinishReason.LENGTH and g.error is None for g in generations)
        prompts = next_turn(prompts, generations, turn)


def test_prompt_tokens_are_computed_once(oracle_of, prompts, next_turn, ask):
    module = tiny_model("qwen3")
    oracle = oracle_of(module)
    engine = HfEngine(module, n_slots=8, max_length=200)
    requests = ask(prompts, 6)
    generations = engine.generate(requests)
    check(oracle, requests, generations)
    # What five prompts begin with alike runs once; the last token of every prompt runs, for its logits.
    distinct = 41 + 1 + 7 + 1 + 33 + 1 + 1 + 77
    assert engine.stats.prefilled == distinct
    assert engine.stats.prefilled + engine.stats.reused == sum(map(len, prompts))
    assert engine.stats.decoded == 5 * len(prompts)
    before = engine.stats.prefilled
    longer = next_turn(prompts, generations, 1)
    requests = ask(longer, 6)
    check(oracle, requests, engine.generate(requests))
    # A continued prompt: the observation, and the last id written, which had not run.
    new = sum(len(b) - len(a) for a, b in zip(prompts, longer, strict=True)) - 6 * len(prompts) + len(prompts)
    assert engine.stats.prefilled - before == new


def test_sequences_without_a_slot_are_kept_aside_within_their_limit(oracle_of, prompts, next_turn, ask):
    module = tiny_model("llama")
    oracle = oracle_of(module)
    prefilled = {}
    for cache_tokens in (0, 1000):
        engine = HfEngine(module, n_slots=2, max_length=200, cache_tokens=cache_tokens)
        generations = engine.generate(ask(prompts, 4))
        before = engine.stats.prefilled
        requests = ask(next_turn(prompts, generations, 3), 4)
        check(oracle, requests, engine.generate(requests))
        prefilled[cache_tokens] = engine.stats.prefilled - before
        assert engine.tokens_aside <= cache_tokens
    new = sum(map(len, next_turn(prompts, generations, 3))) - sum(map(len, prompts)) - 3 * len(prompts)
    assert new <= prefilled[1000] < new + LEAST_SHARED  # what is not worth a copy runs again
    assert prefilled[0] > 2 * prefilled[1000]


def test_stop_ids_end_a_sequence_and_stay_in_it(oracle_of, prompts, ask):
    module = tiny_model("qwen2")
    oracle = oracle_of(module)
    stops = tuple(int(g.ids[3]) for g in HfEngine(module, n_slots=2, max_length=150).generate(ask(prompts[:2], 4)))
    engine = HfEngine(module, n_slots=2, max_length=150)
    requests = ask(prompts, 9, stop_ids=stops)
    generations = engine.generate(requests)
    check(oracle, requests, generations)
    ended = [g.finish is FinishReason.STOP for g in generations]
    assert ended == [int(g.ids[-1]) in stops for g in generations]
    assert ended[:2] == [True, True]
    assert not all(ended)


def test_full_context(oracle_of, ask):
    module = tiny_model("llama")
    oracle = oracle_of(module)
    engine = HfEngine(module, n_slots=2, max_length=20)
    prompts = [np.arange(3, 3 + n) for n in (13, 19, 20, 21)]
    room, last, full, beyond = engine.generate(ask(prompts, 100))
    check(oracle, [Request(prompts[0], 7, ()), Request(prompts[1], 1, ())], [room, last])
    assert [g.finish for g in (room, last, full)] == [FinishReason.LENGTH] * 3
    assert len(full.ids) == len(full.logprobs) == 0
    assert beyond.finish is FinishReason.ERROR
    assert beyond.error == "prompt_ids: expected at most 20 tokens, got 21"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": np.empty(0, np.int64)}, "prompt_ids: expected at least one id"),
        ({"prompt_ids": np.zeros((2, 2), np.int64)}, "prompt_ids: expected at least one id"),
        ({"prompt_ids": np.array(7)}, "prompt_ids: expected at least one id"),
        ({"prompt_ids": np.zeros(3)}, "prompt_ids: expected at least one id in one dimension, got float64"),
        ({"prompt_ids": np.array([5, VOCABULARY])}, r"prompt_ids\[1\]: expected a token id in 0..210, got 211"),
        ({"prompt_ids": np.array([-1])}, r"prompt_ids\[0\]: expected a token id in 0..210, got -1"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"temperature": -0.5}, "temperature: expected a finite number >= 0, got -0.5"),
        ({"temperature": float("nan")}, "temperature: expected a finite number"),
        ({"top_p": 0.0}, "top_p: expected a number in"),
        ({"seed": -1}, "seed: expected an integer >= 0, got -1"),
    ],
)
def test_a_request_that_cannot_be_served_costs_itself_only(change, message, oracle_of, ask):
    module = tiny_model("llama")
    good = ask([np.arange(3, 12)], 5)[0]
    bad = Request(**{"prompt_ids": np.arange(3, 9), "max_new_tokens": 4, "stop_ids": ()} | change)
    found = HfEngine(module, n_slots=2, max_length=40).generate([good, bad, good])
    check(oracle_of(module), [good, good], [found[0], found[2]])
    assert found[1].finish is FinishReason.ERROR
    with pytest.raises(ValueError, match=message):
        raise ValueError(found[1].error)


def test_logits_that_are_no_numbers_cost_their_sequence_only(oracle_of, prompts, ask):
    module = tiny_model("qwen3")
    poison = 4
    with torch.no_grad():
        module.get_input_embeddings().weight[poison] = float("nan")
    clean = [np.where(p == poison, 5, p) for p in prompts]
    broken = np.append(clean[3], [poison, 9])
    engine = HfEngine(module, n_slots=2, max_length=120, cache_tokens=500)
    for _ in range(2):  # a slot that held no numbers serves the next ones
        requests = ask([broken, *clean, broken], 4)
        found = engine.generate(requests)
        for bad in (found[0], found[-1]):
            assert bad.finish is FinishReason.ERROR
            assert len(bad.ids) == 0
            assert "no numbers (NaN or Inf) after" in bad.error
        check(oracle_of(module), requests[1:-1], found[1:-1])


def test_what_lies_behind_a_sequence_is_never_seen(oracle_of, prompts, ask):
    module = tiny_model("gpt-oss")
    engine = HfEngine(module, n_slots=4, max_length=150)
    engine.generate(ask(prompts[:4], 40))
    for layer in engine._store._layers:
        for tensor in layer:
            tensor.fill_(1e4)
    engine.update_weights([], 1)  # nothing of this counts as known
    requests = ask([p[::-1].copy() for p in prompts], 6)
    check(oracle_of(module), requests, engine.generate(requests))


@pytest.mark.parametrize("how", ["update_weights", "in place", "replaced"])
def test_new_weights_leave_nothing_of_the_old_ones(how, oracle_of, prompts, ask):
    module, other = tiny_model("qwen3"), tiny_model("qwen3", seed=1)
    engine = HfEngine(module, n_slots=3, max_length=120, cache_tokens=500)
    engine.generate(ask(prompts, 4))
    if how == "update_weights":
        engine.update_weights(other.named_parameters(), 7)
        assert engine.weights_version == 7
    elif how == "in place":
        with torch.no_grad():
            for own, new in zip(module.parameters(), other.parameters(), strict=True):
                own.copy_(new)
    else:
        module.load_state_dict(other.state_dict(), assign=True)
    before = engine.stats.reused
    requests = ask(prompts[:3], 4)
    check(oracle_of(other), requests, engine.generate(requests))
    assert engine.stats.reused - before <= 41 + 41  # among the three, not from before


def test_weights_that_do_not_fit_are_refused_by_name():
    engine = HfEngine(tiny_model("llama"), n_slots=1, max_length=8)
    with pytest.raises(ConfigError, match=r"weight 'nobody': expected a parameter of the model, got shape \(3,\)"):
        engine.update_weights([("nobody", torch.zeros(3))], 1)
    with pytest.raises(ConfigError, match=r"weight 'model.norm.weight': expected shape \(64,\), got shape \(65,\)"):
        engine.update_weights([("model.norm.weight", torch.zeros(65))], 1)


def test_the_module_is_left_as_it_was(prompts, ask):
    module = tiny_model("qwen3")
    module.train()
    module.model.layers[1].eval()
    modes = [m.training for m in module.modules()]
    engine = HfEngine(module, n_slots=2, max_length=120)
    engine.generate(ask(prompts, 3))
    assert [m.training for m in module.modules()] == modes
    assert module.config._attn_implementation == "sdpa"
    out = module(input_ids=torch.tensor([[5, 6, 7]]))
    out.logits.sum().backward()  # nothing made under no_grad is left inside


def test_a_call_that_breaks_off_leaves_a_usable_engine(oracle_of, prompts, ask):
    module = tiny_model("llama")
    engine = HfEngine(module, n_slots=2, max_length=120)
    passes = iter(range(100))

    def interrupted(*_):
        if next(passes) == 4:
            raise KeyboardInterrupt

    hook = module.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(ask(prompts, 9))
    hook.remove()
    requests = ask(prompts, 4)
    check(oracle_of(module), requests, engine.generate(requests))


def test_bfloat16_is_as_exact_as_the_model(oracle_of, prompts, ask):
    module = tiny_model("qwen3", dtype=torch.bfloat16)
    oracle = oracle_of(module)
    engine = HfEngine(module, n_slots=3, max_length=120)
    ours, own = [], []
    for request, found in zip(ask(prompts, 8), engine.generate(ask(prompts, 8)), strict=True):
        truth = oracle.logprobs(request.prompt_ids, found.ids)
        ours.append(np.abs(found.logprobs - truth))
        own.append(np.abs(oracle.logprobs(request.prompt_ids, found.ids, wide=False) - truth))
    assert np.mean(ours) <= 1.5 * np.mean(own)  # 56 errors of the same kind: their means differ by a fifth


def test_no_requests():
    assert HfEngine(tiny_model("llama"), n_slots=1, max_length=8).generate([]) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_slots": 0}, "n_slots: expected at least 1, got 0"),
        ({"max_length": 1}, "max_length: expected at least 2, got 1"),
        ({"max_length": 5000}, "max_length: expected at most 4096 for LlamaForCausalLM, got 5000"),
        ({"prefill_rows": 0}, "prefill_rows: expected at least 1, got 0"),
        ({"cache_tokens": -1}, "cache_tokens: expected at least 0, got -1"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        HfEngine(tiny_model("llama"), **{"n_slots": 2, "max_length": 64} | settings)


def test_models_that_cannot_be_run_in_slots():
    from transformers import AutoModelForCausalLM, MambaConfig

    mamba = AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    with pytest.raises(ModelError, match="recurrent"):
        HfEngine(mamba, n_slots=1, max_length=8)
    broken = tiny_model("llama")
    broken.lm_head.weight.data[0] = float("nan")
    with pytest.raises(ModelError, match="NaN or Inf in the model's own logits"):
        HfEngine(broken, n_slots=1, max_length=8)
