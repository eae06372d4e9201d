"""Known public failures of packed scoring, in attention and positions; each test names the report it answers.

Those of the head and of reductions are in ``test_public_failures_head.py``, those of text and tokens in
``test_public_failures_text.py``. Not here, because one device cannot show them: a head seen as its local shard
(Megatron-LM #4888, #6700) and a fused kernel under sequence parallelism (verl #3723). Both belong to the trainer's
parallelism and have no test yet.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import oracle
import pytest
import torch
from tiny_models import CONFIGS, VOCABULARY, random_rollout, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import trace_fast as tf
from trace_fast.kernels.prefix_attention import plan_attention, prefix_attention
from trace_fast.layout import SpanRanges, pack_layout
from trace_fast.model_spec import ModelSpec


def draw(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(3, VOCABULARY, count)


def rollout_of(
    name: str, ids: np.ndarray, boundaries: Sequence[int], opener: np.ndarray, *answers: np.ndarray
) -> tf.Rollout:
    """A finished rollout with one opener for all states."""
    return tf.Rollout(
        id=name,
        group="g",
        input_ids=ids,
        boundaries=np.array(boundaries),
        n_turns=len(boundaries) - 2,
        answers=answers,
        openers=(opener,) * len(boundaries),
    )


def score_exactly(module: PreTrainedModel, pack: list[tf.Rollout]) -> list[tf.RolloutScore]:
    """Scores a pack in one pass and holds every alias of every state against the naive float64 pass."""
    scores = tf.Scorer.from_module(module, None).score(pack)
    truth = oracle.double_precision(module)
    for rollout, score in zip(pack, scores, strict=True):
        wanted = oracle.mean_logprobs(truth, rollout)
        np.testing.assert_allclose(score.alias_mean_logprobs, wanted, rtol=0, atol=1e-4)
    return scores


def gpt_oss_with_sinks(offset: float, **changes: int) -> PreTrainedModel:
    """The tiny gpt-oss with all its sinks shifted."""
    module = tiny_model("gpt-oss", **changes)
    with torch.no_grad():
        for layer in module.model.layers:
            layer.self_attn.sinks.add_(offset)
    return module


def nested_pack(seed: int = 0) -> list[tf.Rollout]:
    """Each rollout leaves the one before in the middle of a turn; openers and aliases share beginnings, too."""
    rng = np.random.default_rng(seed)
    prompt, opener, answer = draw(rng, 20), draw(rng, 4), draw(rng, 3)
    aliases = [answer, np.concatenate([answer, draw(rng, 2)]), np.concatenate([answer[:2], draw(rng, 3)])]
    trunk, pack = np.concatenate([prompt, draw(rng, 60)]), []
    for r in range(4):
        start = 20 + 15 * r
        trunk = np.concatenate([trunk[:start], draw(rng, 60)])
        trunk[start + 5 : start + 7] = opener[:2]  # the opener's first tokens go on like the rollout does
        boundaries = [20, start + 5, start + 40, len(trunk)]
        pack.append(rollout_of(f"r{r}", trunk, boundaries, opener, *aliases))
    return pack


def test_no_mask_leak_past_one_tree_level() -> None:
    """verl #6689: a mask that knows parent and child only lets grandchildren see their cousins."""
    pack = nested_pack()
    layout = pack_layout(pack)
    assert max(len(layout.spans.ancestors(p)) for p in range(len(layout.spans))) >= 5, "the trie must be deep"
    score_exactly(tiny_model("llama"), pack)
    score_exactly(tiny_model("gpt-oss"), pack)


def test_a_changed_token_reaches_its_own_descendants_only() -> None:
    """verl #6689, from the other side: all other numbers stay, bit for bit."""
    scorer = tf.Scorer.from_module(tiny_model("llama"), None)
    pack = nested_pack()
    before = scorer.score(pack)
    ids = pack[1].input_ids.copy()
    ids[60] = 3 + (ids[60] - 2) % (VOCABULARY - 3)  # in rollout 1, after 2 and 3 have left it
    assert ids[60] != pack[1].input_ids[60]
    boundaries = pack[1].boundaries
    changed = rollout_of("r1", ids, boundaries.tolist(), pack[1].openers[0], *pack[1].answers)
    after = scorer.score([pack[0], changed, *pack[2:]])
    for r in (0, 2, 3):
        np.testing.assert_array_equal(after[r].alias_mean_logprobs, before[r].alias_mean_logprobs)
    sees = boundaries > 60
    assert sees.tolist() == [False, False, True, True]
    np.testing.assert_array_equal(after[1].alias_mean_logprobs[~sees], before[1].alias_mean_logprobs[~sees])
    assert (np.abs(after[1].alias_mean_logprobs[sees] - before[1].alias_mean_logprobs[sees]) > 1e-3).all()


def test_hybrid_layers_are_refused_instead_of_running_across_rollouts() -> None:
    """NeMo-RL #4167: recurrent layers of a packed hybrid model carry their state into the next rollout."""
    config = CONFIGS["qwen3_next"](num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(tf.ModelError, match=r"linear_attention layers: their state runs through every token"):
        ModelSpec.from_config(config, "hybrid").check_supported()


@pytest.mark.parametrize("window", [1, 2, 33])
def test_window_and_sinks_mask_together(window: int) -> None:
    """flash-attention #2563: with sinks, the window's edge was off."""
    pack = [random_rollout(np.random.default_rng(window), tokens=90, answers=(1, 5))]
    narrow = score_exactly(gpt_oss_with_sinks(2.0, sliding_window=window), pack)
    wide = score_exactly(gpt_oss_with_sinks(2.0, sliding_window=60), pack)
    assert np.abs(narrow[0].mean_logprobs - wide[0].mean_logprobs).max() > 1e-2


def test_no_nan_from_rows_whose_key_blocks_are_fully_masked() -> None:
    """unsloth #9848: a window that hides whole key blocks gave NaN; here past two blocks of 512 depths."""
    rng = np.random.default_rng(3)
    ids, opener, answer = draw(rng, 1300), draw(rng, 3), draw(rng, 5)
    deep = rollout_of("deep", ids, [500, 1023, 1100, 1300], opener, answer)
    score_exactly(tiny_model("mistral-window", num_hidden_layers=2), [deep])
    score_exactly(tiny_model("gpt-oss", num_hidden_layers=2, layer_types=["sliding_attention"] * 2), [deep])


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no softcap", "softcap"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [1, 37, 511, 512, 513, None])
def test_padding_rows_stay_apart_and_no_block_edge_shows(
    window: int | None, sinks: bool, softcap: float | None
) -> None:
    """unsloth #9848: padding rows have no key at all; here they hold NaN, give zeros, and nobody sees them."""
    rows, padding, heads, kv_heads, dim = 1100, 52, 4, 2, 32
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(rows + padding, n, dim, generator=generator) for n in (heads, kv_heads, kv_heads))
    for tensor in (query, key, value):
        tensor[rows:] = math.nan
    sinks_H = torch.randn(heads, generator=generator) if sinks else None
    plan = plan_attention(SpanRanges.single(rows), "torch")
    out = prefix_attention(query, key, value, plan, scale=0.5, window=window, softcap=softcap, sinks_H=sinks_H)

    q, k, v = (t[:rows].double().transpose(0, 1) for t in (query, key, value))
    scores = q @ k.repeat_interleave(2, 0).transpose(1, 2) * 0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(rows)[:, None] - torch.arange(rows)
    hidden = (distance < 0) | (distance >= (window or rows))
    weights = scores.masked_fill(hidden, -math.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks_H is not None:
        total = total + sinks_H.double().exp()[:, None, None]
    wanted = (weights / total @ v.repeat_interleave(2, 0)).transpose(0, 1)
    torch.testing.assert_close(out[:rows].double(), wanted, rtol=0, atol=1e-5)
    assert (out[rows:] == 0).all()


def test_states_without_ancestors_merge_nothing() -> None:
    """flashinfer #4054: merging two empty attention states gave NaN; here prompts and whole rollouts are empty."""
    rng = np.random.default_rng(4)
    opener, none = draw(rng, 3), np.empty(0, dtype=np.int64)
    pack = [
        rollout_of("no prompt", draw(rng, 40), [0, 0, 25, 40], opener, draw(rng, 1), draw(rng, 4)),
        rollout_of("nothing at all", none, [0, 0], opener, draw(rng, 4)),
        rollout_of("another first token", draw(rng, 30), [0, 10, 30], draw(rng, 1), draw(rng, 2)),
    ]
    for name in ("llama", "mistral-window", "gpt-oss"):
        score_exactly(tiny_model(name), pack)
    masked = [dataclasses.replace(rollout, loss_mask=np.arange(len(rollout.input_ids)) % 2 == 0) for rollout in pack]
    scores = tf.Scorer.from_module(tiny_model("llama"), None).score(masked, trunk_logprobs=True, written_logprobs=True)
    assert [(len(s.trunk_logprobs), len(s.written_logprobs)) for s in scores] == [(39, 19), (0, 0), (29, 14)]
    few = tf.Scorer.from_module(tiny_model("llama"), None).score(masked, written_logprobs=True)
    assert [len(s.written_logprobs) for s in few] == [19, 0, 14]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", {"attn_logit_softcapping": 1.0}),
        ("gemma2", {"final_logit_softcapping": 30.0}),
        ("gemma2", {"sliding_window": 4}),
        ("gemma3", {"sliding_window": 4}),
        ("mistral-window", {"sliding_window": 4}),
        ("granite", {"attention_multiplier": 1.0}),
    ],
    ids=str,
)
def test_what_attention_means_is_never_dropped(name: str, change: dict[str, float]) -> None:
    """sglang #33915: softcap and window were silently ignored by a backend. Changing one changes our numbers as it
    changes the naive pass's."""
    pack = [random_rollout(np.random.default_rng(5), tokens=100, answers=(3,))]
    as_is = score_exactly(tiny_model(name), pack)
    changed = score_exactly(tiny_model(name, **change), pack)
    assert np.abs(as_is[0].mean_logprobs - changed[0].mean_logprobs).max() > 1e-2


@pytest.mark.parametrize("offset", [-1e4, 4.0])
def test_sinks_stand_in_the_denominator_without_a_value(offset: float) -> None:
    """transformers #41083: sinks were put into the softmax like a key. Far below all scores they must vanish; above
    them they must take the weight."""
    pack = [random_rollout(np.random.default_rng(6), tokens=100, answers=(3,))]
    as_is = score_exactly(tiny_model("gpt-oss"), pack)
    changed = score_exactly(gpt_oss_with_sinks(offset), pack)
    assert np.abs(as_is[0].mean_logprobs - changed[0].mean_logprobs).max() > 1e-2


def test_positions_are_those_of_each_rollout_alone() -> None:
    """TransformerLens #1610: left padding without positions took the loss from 4.50 to 13.59. A model with absolute
    positions notices every shift."""
    config = CONFIGS["gpt2"](
        vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4, n_positions=256, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    pack = nested_pack()
    score_exactly(module, pack)

    ids = torch.as_tensor(pack[0].input_ids)[None]
    shifted = torch.arange(ids.shape[1])[None] + 7
    with torch.no_grad():
        difference = (module(ids).logits - module(ids, position_ids=shifted).logits).abs().max()
    assert difference > 0.1, "the model must notice its positions"


def rope_model(rope_type: str, max_positions: int, **parameters: float | list[float]) -> PreTrainedModel:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, **parameters}
    return tiny_model("llama", rope_parameters=rope, max_position_embeddings=max_positions)


def of_length(rng: np.random.Generator, name: str, forwarded: int) -> tf.Rollout:
    """A rollout whose longest state forwards so many tokens: its own, an opener of 3, an answer of 4 less one."""
    ids = draw(rng, forwarded - 6)
    return rollout_of(name, ids, [20, len(ids) // 2, len(ids)], draw(rng, 3), draw(rng, 4))


def test_dynamic_ntk_is_exact_in_its_range_and_refused_beyond() -> None:
    """transformers #25104: the RoPE base depends on the longest row of a call, so a long rollout changed short ones."""
    module = rope_model("dynamic", 128)
    rng = np.random.default_rng(7)
    short, beyond, full = of_length(rng, "short", 90), of_length(rng, "beyond", 129), of_length(rng, "full", 128)
    errors: list[tf.RolloutError] = []
    scorer = tf.Scorer.from_module(module, None)
    scores = scorer.score([short, beyond, full], errors=errors.append)
    assert [(e.rollout_id, e.kind) for e in errors] == [("beyond", "length")]
    assert "has 129 tokens; expected at most 128" in errors[0].reason
    assert "dynamic RoPE changes every position's angles" in errors[0].reason
    assert [s.id for s in scores] == ["short", "full"]
    np.testing.assert_array_equal(scores[0].mean_logprobs, scorer.score([short])[0].mean_logprobs)

    truth = oracle.double_precision(module)
    np.testing.assert_allclose(scores[0].alias_mean_logprobs, oracle.mean_logprobs(truth, short), rtol=0, atol=1e-4)
    # The oracle also feeds the answer's last token, one position too many for a full rollout: leave it out here.
    ids = torch.as_tensor(np.concatenate([full.input_ids, full.openers[2], full.answers[0]]))
    with torch.no_grad():
        logprobs = torch.log_softmax(truth(input_ids=ids[None, :-1], use_cache=False).logits[0], -1)
    wanted = logprobs[-4:].gather(1, ids[-4:, None]).mean()
    assert abs(scores[1].mean_logprobs[2] - float(wanted)) <= 1e-4

    longer = np.concatenate([short.input_ids, draw(rng, 300)])
    own, with_longer = (oracle.sequence_logprobs(truth, s)[:80] for s in (short.input_ids, longer))
    assert np.abs(own - with_longer).max() > 1e-2, "a longer row must change the model's own numbers"


def test_longrope_is_exact_in_its_range_and_refused_beyond() -> None:
    """transformers #25104, the other RoPE whose angles depend on the length."""
    module = rope_model(
        "longrope", 512, short_factor=[1.0 + 0.1 * i for i in range(16)], long_factor=[3.0] * 16,
        original_max_position_embeddings=128,
    )  # fmt: skip
    rng = np.random.default_rng(8)
    score_exactly(module, [of_length(rng, "inside", 120)])
    with pytest.raises(tf.RolloutError, match=r"129 tokens; expected at most 128 .* longrope RoPE"):
        tf.Scorer.from_module(module, None).score([of_length(rng, "beyond", 129)])


@pytest.mark.parametrize("original", [99, 100, 101, 200])
def test_yarn_whose_original_length_is_the_longest_rollout(original: int) -> None:
    """torchtitan #4117: YaRN was off when the cache length equalled the original length."""
    module = rope_model("yarn", 4 * original, original_max_position_embeddings=original)
    plain = tiny_model("llama", max_position_embeddings=4 * original)
    rollout = of_length(np.random.default_rng(9), "r", 100)
    scores = score_exactly(module, [rollout])
    unscaled = score_exactly(plain, [rollout])
    assert np.abs(scores[0].mean_logprobs - unscaled[0].mean_logprobs).max() > 1e-2, "YaRN must change something"
