"""What is refused, by name, with what to do; and that good rollouts beside a refused one are scored all the same."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from tiny_models import CONFIGS, SIZES, VOCABULARY, random_rollout, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import trace_fast as tf
from trace_fast.model_spec import ModelSpec

RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 8,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "recurrent_gemma": {"lru_width": 64, "block_types": ["recurrent", "attention"], "head_dim": 8},
    "falcon_h1": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


def recurrent_config(kind: str) -> Any:
    return CONFIGS[kind](**{**SIZES, "num_hidden_layers": 2, **RECURRENT[kind]})


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_and_hybrid_models_by_their_config(kind: str) -> None:
    with pytest.raises(tf.ModelError) as caught:
        ModelSpec.from_config(recurrent_config(kind), "some/model").check_supported()
    message = str(caught.value)
    assert message.startswith(f"some/model ({kind}) has ")
    assert "their state runs through every token in order" in message
    assert "Use an attention-only reference model" in message


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_and_hybrid_modules(kind: str) -> None:
    module = AutoModelForCausalLM.from_config(recurrent_config(kind))
    with pytest.raises(tf.ModelError, match=rf"\({kind}\) has .* Use an attention-only reference model"):
        tf.Scorer.from_module(module, None)


def test_a_recurrent_model_without_attention_heads() -> None:
    config = CONFIGS["rwkv"](vocab_size=64, hidden_size=32, num_hidden_layers=2)
    wanted = r"'rwkv' is no attention-only decoder .* recurrent models cannot share a state between branches"
    with pytest.raises(tf.ModelError, match=wanted):
        ModelSpec.from_config(config, "some/model")
    with pytest.raises(tf.ModelError, match=wanted):
        tf.Scorer.from_module(AutoModelForCausalLM.from_config(config), None)


# --- the model ------------------------------------------------------------------------------------------------------


class Wrapper(torch.nn.Module):
    """Holds a model as DistributedDataParallel does."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (torch.nn.Linear(2, 2), "Linear"),
        (Wrapper(torch.nn.Linear(2, 2)), "Wrapper"),
        (torch.nn.Module(), "Module"),  # without any parameter
        ("HuggingFaceTB/SmolLM2-135M", "str"),
    ],
    ids=["plain module", "wrapper", "empty module", "a name"],
)
def test_not_a_transformers_module(module: Any, named: str) -> None:
    with pytest.raises(tf.ModelError, match=rf"expected a transformers PreTrainedModel, got {named}; unwrap it first"):
        tf.Scorer.from_module(module, None)


def test_a_model_without_a_head() -> None:
    with pytest.raises(tf.ModelError, match=r"LlamaModel: expected a language-model head .* got NoneType"):
        tf.Scorer.from_module(tiny_model("llama").model, None)


def test_a_quantised_head() -> None:
    module = tiny_model("llama")
    del module.lm_head.weight
    module.lm_head.register_buffer("weight", torch.zeros(VOCABULARY, 64, dtype=torch.int8))
    with pytest.raises(tf.ModelError, match=r"floating-point .* load a causal language model with an unquantised head"):
        tf.Scorer.from_module(module, None)


def test_nan_among_the_weights_is_found_on_loading() -> None:
    module = tiny_model("llama")
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    with pytest.raises(tf.ModelError, match=r"NaN or Inf in the model's own output; check its weights and dtype"):
        tf.Scorer.from_module(module, None)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dtype": "float64"}, r"dtype: expected one of float32, bfloat16, float16, got 'float64'"),
        ({"dtype": "int4"}, r"dtype: expected one of float32, bfloat16, float16, got 'int4'"),
        ({"device": "gpu"}, r"device: expected auto, cpu, cuda or cuda:N, got 'gpu'"),
        ({"device": "meta"}, r"device: expected auto, cpu, cuda or cuda:N, got 'meta'"),
        ({"backend": "turbo"}, r"backend: expected auto, triton, native, torch, reference, got 'turbo'"),
    ],
    ids=str,
)
def test_unknown_settings(tmp_path: Path, setting: dict[str, str], message: str) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(tf.ConfigError, match=message):
        tf.Scorer.from_pretrained(str(tmp_path), **{"device": "cpu", **setting})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(tf.ConfigError, match=r"'cuda:1' was asked for, but torch .* sees no CUDA device"):
        tf.Scorer.from_pretrained(str(tmp_path), device="cuda:1")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"alias": "best"}, r"alias: expected one of max, mean, logsumexp, got 'best'"),
        ({"backend": "turbo"}, r"backend: expected auto, triton, native, torch, reference, got 'turbo'"),
        ({"max_tokens_per_pack": 0}, r"max_tokens_per_pack: expected at least 1 or auto, got 0"),
    ],
    ids=str,
)
def test_unknown_settings_around_a_module(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(tf.ConfigError, match=message):
        tf.Scorer.from_module(tiny_model("llama"), None, **setting)


# --- files of a model -----------------------------------------------------------------------------------------------


def refused(model: Path) -> str:
    """The message with which a model's files are refused; it names them."""
    with pytest.raises(tf.ModelError) as caught:
        tf.Scorer.from_pretrained(str(model), dtype="float32", device="cpu")
    assert str(model) in str(caught.value)
    return str(caught.value)


@pytest.fixture
def checkpoint(tmp_path: Path, smollm2_tokenizer: Any) -> Path:
    """A folder that loads: a tiny model and a tokenizer."""
    folder = tmp_path / "tiny"
    tiny_model("llama").save_pretrained(folder)
    smollm2_tokenizer.save_pretrained(folder)
    return folder


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "no such folder" in refused(tmp_path / "none")


def test_a_gguf_file_that_is_not_there(tmp_path: Path) -> None:
    assert "no such GGUF file" in refused(tmp_path / "none.gguf")


@pytest.mark.parametrize("kept", [0, 4, 200, 100_000, 3_000_000])
def test_a_gguf_file_that_ends_too_early(tmp_path: Path, smollm2_gguf: Path, kept: int) -> None:
    cut = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as whole:
        cut.write_bytes(whole.read(kept))
    assert "cannot load the weights" in refused(cut)


def test_a_gguf_file_that_is_something_else(tmp_path: Path) -> None:
    page = tmp_path / "page.gguf"
    page.write_bytes(b"<html>404 not found</html>" * 100)
    assert "is not a GGUF file" in refused(page)


@pytest.mark.parametrize("damage", ["empty", "half", "text"])
def test_corrupt_safetensors(checkpoint: Path, damage: str) -> None:
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "text": b"<html>404</html>" * 100}[damage])
    assert "cannot load the weights" in refused(checkpoint)


@pytest.mark.parametrize("missing", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_are_missing_from_the_checkpoint(checkpoint: Path, missing: str) -> None:
    """transformers fills them with random numbers and only warns: scores of such a model mean nothing."""
    from safetensors.torch import load_file, save_file

    weights = checkpoint / "model.safetensors"
    tensors = load_file(weights)
    del tensors[missing]
    save_file(tensors, weights, metadata={"format": "pt"})
    assert missing in refused(checkpoint)


def test_a_folder_without_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "cannot load the weights" in refused(checkpoint)


def test_a_folder_without_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    assert "cannot read the config" in refused(checkpoint)


def test_a_folder_without_tokenizer(checkpoint: Path) -> None:
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    assert "cannot load the tokenizer" in refused(checkpoint)


# --- the rollout ----------------------------------------------------------------------------------------------------


def good_and_changed(**changes: Any) -> list[tf.Rollout]:
    """Two good rollouts around one with these fields changed; all of one prompt."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCABULARY, 20)
    first, bad, last = (random_rollout(rng, name, prompt=prompt, turns=2) for name in ("first", "bad", "last"))
    return [first, dataclasses.replace(bad, source="file.jsonl:7", **changes), last]


def assert_only_the_bad_one_is_refused(module: PreTrainedModel, pack: list[tf.Rollout], kind: str) -> str:
    """Returns the message. The others keep their bits; without a callback the error is raised."""
    scorer = tf.Scorer.from_module(module, None)
    errors: list[tf.RolloutError] = []
    scores = scorer.score(pack, errors=errors.append, trunk_logprobs=True)
    assert [(e.rollout_id, e.source, e.kind) for e in errors] == [("bad", "file.jsonl:7", kind)]
    assert [s.id for s in scores] == ["first", "last"]
    for rollout, score in zip([r for r in pack if r.id != "bad"], scores, strict=True):
        alone = scorer.score([rollout], trunk_logprobs=True)[0]
        np.testing.assert_array_equal(score.alias_mean_logprobs, alone.alias_mean_logprobs)
        np.testing.assert_array_equal(score.trunk_logprobs, alone.trunk_logprobs)
    with pytest.raises(tf.RolloutError, match="rollout 'bad'"):
        scorer.score(pack)
    return errors[0].reason


def test_written_tokens_are_unknown_without_a_mask() -> None:
    """They are refused before the pass; the others' are scored."""
    first, bad, last = good_and_changed()
    first, last = (dataclasses.replace(r, loss_mask=np.ones(len(r.input_ids), bool)) for r in (first, last))
    errors: list[tf.RolloutError] = []
    scorer = tf.Scorer.from_module(tiny_model("llama"), None)
    scores = scorer.score([first, bad, last], errors=errors.append, written_logprobs=True)
    assert [(e.rollout_id, e.kind) for e in errors] == [("bad", "format")]
    assert errors[0].reason == "loss_mask: expected one, since the tokens that the policy wrote are to be scored"
    assert [(s.id, len(s.written_logprobs)) for s in scores] == [  # type: ignore[arg-type]
        (r.id, len(r.input_ids) - 1) for r in (first, last)
    ]


def replaced(values: np.ndarray, at: int, value: int) -> np.ndarray:
    values = values.copy()
    values[at] = value
    return values


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**40])
@pytest.mark.parametrize("field", ["input_ids", "answers", "openers", "state_prefixes"])
def test_ids_outside_the_vocabulary(field: str, token: int) -> None:
    pack = good_and_changed()
    bad, states = pack[1], range(4)
    name = {"input_ids": "input_ids", "answers": "gold answer 0", "openers": "opener of state 2"}.get(field)
    if field == "input_ids":
        changed: Any = replaced(bad.input_ids, 2, token)
    elif field == "answers":
        changed = (replaced(bad.answers[0], 2, token),)
    elif field == "openers":
        changed = tuple(replaced(bad.openers[k], 2, token) if k == 2 else bad.openers[k] for k in states)
    else:
        changed = tuple(replaced(bad.prefix(k), 2, token) if k == 2 else bad.prefix(k) for k in states)
        name = "prefix of state 2"
    pack[1] = dataclasses.replace(bad, **{field: changed})
    message = assert_only_the_bad_one_is_refused(tiny_model("llama"), pack, "vocabulary")
    assert message.startswith(f"{name}[2]: expected a token id in 0..{VOCABULARY - 1} ")
    assert f"got {token}; the rollout was tokenised for another model" in message


def test_a_rollout_longer_than_the_models_positions() -> None:
    pack = good_and_changed()
    longest = max(len(r.input_ids) + len(r.openers[-1]) + len(r.answers[0]) - 1 for r in pack)
    answer = np.concatenate([pack[1].answers[0], pack[1].answers[0]])
    pack[1] = dataclasses.replace(pack[1], answers=(pack[1].answers[0][:1], answer))  # the longest alias counts
    module = tiny_model("llama", max_position_embeddings=longest)
    message = assert_only_the_bad_one_is_refused(module, pack, "length")
    assert f"has {longest + 4} tokens; expected at most {longest} for LlamaForCausalLM" in message
    assert "because its position embeddings end there" in message


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([20, 60, 50, 140], r"boundaries must not decrease, got b_1 = 60 > b_2 = 50"),
        ([20, 60, 90, 141], r"boundaries must lie within 0\.\.140 .* got 20\.\.141"),
        ([-1, 60, 90, 140], r"boundaries must lie within 0\.\.140 .* got -1\.\.140"),
        ([20, 60], r"expected T\+1 or T\+2 boundaries for T = 2 turns, got 2"),
    ],
)
def test_boundaries_out_of_order_or_range(boundaries: list[int], message: str) -> None:
    with pytest.raises(tf.RolloutError, match=message) as caught:
        good_and_changed(boundaries=np.array(boundaries))
    assert caught.value.kind == "boundary"


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ((), "expected at least one gold answer, got none"),
        ((np.array([5]), np.array([], dtype=int)), "gold answer 1 is empty; an empty answer has no log-probability"),
    ],
)
def test_an_empty_answer(answers: tuple[np.ndarray, ...], message: str) -> None:
    with pytest.raises(tf.RolloutError, match=message) as caught:
        good_and_changed(answers=answers)
    assert caught.value.kind == "answer"


def test_a_state_without_any_token() -> None:
    none = np.empty(0, dtype=np.int64)
    with pytest.raises(tf.RolloutError, match=r"state 0 has no token at all") as caught:
        good_and_changed(boundaries=np.array([0, 60, 90, 140]), openers=(none,) * 4)
    assert caught.value.kind == "boundary"


# --- NaN and Inf ----------------------------------------------------------------------------------------------------


def unprobed_token() -> int:
    """A token id that loading does not run through the model, so that only rollouts meet it."""
    probed = set((torch.arange(32) * 7919 % VOCABULARY).tolist())
    return next(t for t in range(3, VOCABULARY) if t not in probed)


def pack_with_token(token: int) -> list[tf.Rollout]:
    """``token`` stands in the bad rollout alone, before its last two states. That rollout comes first, so the prompt of
    all is a piece of it; after it a shorter one, whose depths it still fills, and one deeper than a key block."""
    rng = np.random.default_rng(1)
    allowed = np.array([t for t in range(3, VOCABULARY) if t != token])
    prompt, opener, answer = (rng.choice(allowed, n) for n in (20, 3, 4))

    def make(name: str, length: int) -> tf.Rollout:
        ids = np.concatenate([prompt, rng.choice(allowed, length)])
        cuts = np.array([20, 20 + length // 4, 20 + length // 2, len(ids)])
        return tf.Rollout(
            id=name, group="g", input_ids=ids, boundaries=cuts, n_turns=2, answers=(answer,), openers=(opener,) * 4
        )

    bad, first, last = make("bad", 560), make("first", 60), make("last", 700)
    ids = replaced(bad.input_ids, 20 + 560 // 4 + 5, token)
    return [dataclasses.replace(bad, input_ids=ids, source="file.jsonl:7"), first, last]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "mistral-window", "gemma2", "gpt-oss"])
def test_a_poisoned_weight_that_one_rollout_meets(name: str, poison: float) -> None:
    module = tiny_model(name, tie_word_embeddings=False)
    with torch.no_grad():
        module.get_input_embeddings().weight[unprobed_token(), 5] = poison
    message = assert_only_the_bad_one_is_refused(module, pack_with_token(unprobed_token()), "non_finite")
    # behind a window the scored rows may be sound, and only the rollout's own tokens show it
    assert re.search(r"the model gave (mean|trunk)_logprobs = nan; expected finite numbers <= 0. Check the", message)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])  # these multiply the embedding by 8: float16 ends at 65,504
def test_float16_overflow_in_one_rollout(name: str) -> None:
    module = tiny_model(name, torch.float16, tie_word_embeddings=False)
    with torch.no_grad():
        module.get_input_embeddings().weight[unprobed_token()] = 30000.0
    pack = pack_with_token(unprobed_token())
    message = assert_only_the_bad_one_is_refused(module, pack, "non_finite")
    assert "score in float32 if the model overflows in this dtype" in message

    in_float32 = module.float()  # the advice helps
    score = tf.Scorer.from_module(in_float32, None).score(pack[:1])[0]
    wanted = oracle.mean_logprobs(oracle.double_precision(in_float32), pack[0])
    np.testing.assert_allclose(score.alias_mean_logprobs, wanted, rtol=0, atol=1e-4)


def test_weights_that_break_after_loading() -> None:
    """A trainer's module may turn NaN between two calls: then every rollout is an error, and none a number."""
    module = tiny_model("llama")
    scorer = tf.Scorer.from_module(module, None)
    pack = good_and_changed()
    assert len(scorer.score(pack)) == 3
    with torch.no_grad():
        module.model.layers[2].mlp.down_proj.weight[0, 0] = torch.nan
    errors: list[tf.RolloutError] = []
    assert scorer.score(pack, errors=errors.append) == []
    assert [(e.rollout_id, e.kind) for e in errors] == [(r.id, "non_finite") for r in pack]
