"""Known public failures between text, tokens and scores; each test names the report it answers.

Rollouts are read from files with SmolLM2's real tokenizer and scored by a tiny random model of its vocabulary size;
what they should have been is put together here by hand.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from tiny_models import tiny_model
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel

import trace_fast as tf

# Like Qwen3's in what matters here: thinking is kept after the last user message only.
THINKING_TEMPLATE = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last -%}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
BOS = "<|endoftext|>"


@pytest.fixture(scope="module")
def model(smollm2_tokenizer: Any) -> PreTrainedModel:
    return tiny_model("qwen3", vocab_size=len(smollm2_tokenizer))


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def read_one(folder: Path, tokenizer: Any, record: dict[str, Any], **options: Any) -> tf.Rollout:
    path = folder / "rollouts.jsonl"
    path.write_text(json.dumps(record))
    (rollout,) = tf.read_rollouts(path, tokenizer, **options)
    return rollout


def assert_scored_as(model: PreTrainedModel, rollout: tf.Rollout, states: list[list[int]], answer: list[int]) -> None:
    """The rollout's scores are those of these token sequences, forwarded one by one in float64."""
    score = tf.Scorer.from_module(model, None).score([rollout])[0]
    truth = oracle.double_precision(model)
    wanted = [oracle.sequence_logprobs(truth, np.array(state + answer))[-len(answer) :] for state in states]
    assert score.answer_ids.tolist() == answer
    np.testing.assert_allclose(score.mean_logprobs, [w.mean() for w in wanted], rtol=0, atol=1e-4)
    for found, each in zip(score.token_logprobs, wanted, strict=True):
        np.testing.assert_allclose(found, each, rtol=0, atol=3e-4)


def test_a_template_that_strips_earlier_thinking(
    tmp_path: Path, smollm2_tokenizer: Any, model: PreTrainedModel
) -> None:
    """verl #6854, prime-rl #1334: the thinking of earlier turns is not in later prompts, so prefixes are not nested;
    each state is what the template shows at that time."""
    tokenizer = copy.deepcopy(smollm2_tokenizer)
    tokenizer.chat_template = THINKING_TEMPLATE
    messages = [
        {"role": "user", "content": "Where is Ula?"},
        {"role": "assistant", "reasoning_content": "I should look.", "content": "search: Ula"},
        {"role": "tool", "content": "Ula is a town in Orm."},
        {"role": "assistant", "reasoning_content": "That is it.", "content": "In Orm."},
        {"role": "user", "content": "And where is Orm?"},
        {"role": "assistant", "reasoning_content": "Look again.", "content": "search: Orm"},
        {"role": "tool", "content": "Orm is an island off Tal."},
        {"role": "assistant", "reasoning_content": "So it is Tal.", "content": "Off Tal."},
    ]

    def says(role: str, text: str) -> str:
        return f"<|im_start|>{role}\n{text}<|im_end|>\n"

    def thinks(thought: str, text: str) -> str:
        return says("assistant", f"<think>\n{thought}\n</think>\n\n{text}")

    first = says("user", "Where is Ula?")
    found = says("tool", "Ula is a town in Orm.")
    stripped = first + says("assistant", "search: Ula") + found + says("assistant", "In Orm.")
    second = stripped + says("user", "And where is Orm?") + thinks("Look again.", "search: Orm")
    second += says("tool", "Orm is an island off Tal.")
    texts = [
        first,
        first + thinks("I should look.", "search: Ula") + found,
        second,
        second + thinks("So it is Tal.", "Off Tal."),
    ]
    rollout = read_one(tmp_path, tokenizer, {"messages": messages, "answer": "off Tal"})
    assert not rollout.nested
    answer = ids_of(tokenizer, "<answer>off Tal")[len(ids_of(tokenizer, "<answer>")) :]
    states = [ids_of(tokenizer, text + "<|im_start|>assistant\n<answer>") for text in texts]
    assert_scored_as(model, rollout, states, answer)


def test_ids_that_text_would_not_give_back(tmp_path: Path, smollm2_tokenizer: Any, model: PreTrainedModel) -> None:
    """trl #5224: decoding and encoding again changed what the policy had sampled. The ids given are those scored."""
    ids, answer = ([i for letter in text for i in ids_of(smollm2_tokenizer, letter)] for text in ("searching", "river"))
    for spelled in (ids, answer):
        again = ids_of(smollm2_tokenizer, smollm2_tokenizer.decode(spelled))
        assert len(again) < len(spelled), "these ids must not survive text"
    opener = ids_of(smollm2_tokenizer, "<answer>")
    record = {"input_ids": ids, "boundaries": [3, 6, 9], "answer_ids": answer, "opener_ids": opener}
    rollout = read_one(tmp_path, smollm2_tokenizer, record)
    assert rollout.input_ids.tolist() == ids
    assert_scored_as(model, rollout, [ids[:3] + opener, ids[:6] + opener, ids + opener], answer)


def test_short_logprob_lists_raise(tmp_path: Path, smollm2_tokenizer: Any) -> None:
    """rllm #816: lists shorter than the tokens were filled up with zeros, that is, with certainty."""
    record = {
        "input_ids": list(range(40, 50)),
        "boundaries": [2, 6, 10],
        "answer_ids": [7],
        "opener_ids": [8],
        "logprobs": [-0.5] * 9,
    }
    with pytest.raises(tf.RolloutError, match=r"logprobs: expected 10 entries \(one a token\), got .*9") as caught:
        read_one(tmp_path, smollm2_tokenizer, record)
    assert caught.value.kind == "format"
    rollout = read_one(tmp_path, smollm2_tokenizer, {**record, "logprobs": [-0.5] * 10})
    np.testing.assert_array_equal(rollout.logprobs, np.full(10, -0.5, dtype=np.float32))


def test_an_answer_that_merges_with_the_opener(tmp_path: Path, smollm2_tokenizer: Any, model: PreTrainedModel) -> None:
    """lm-eval #4055: the answer's first token merged with the end of the context, and another token was scored. It is
    an error that names both pieces; both ways out that it names work."""
    merged = ids_of(smollm2_tokenizer, "the answer")
    assert merged[: len(ids_of(smollm2_tokenizer, "the answ"))] != ids_of(smollm2_tokenizer, "the answ")
    segments = [{"role": "prompt", "text": "A question."}, {"role": "assistant", "text": " A word."}]
    with pytest.raises(tf.RolloutError) as caught:
        read_one(tmp_path, smollm2_tokenizer, {"segments": segments, "answer": "er"}, opener="the answ")
    assert caught.value.kind == "seam"
    for piece in ("'the answ'", "'er'", "across the seam", "another opener", "answer_ids"):
        assert piece in caught.value.reason

    prompt, word = ids_of(smollm2_tokenizer, "A question."), ids_of(smollm2_tokenizer, " A word.")
    answer = ids_of(smollm2_tokenizer, "er")
    for record, opener in (({"answer": "er"}, "<answer>"), ({"answer_ids": answer}, "the answ")):
        rollout = read_one(tmp_path, smollm2_tokenizer, {"segments": segments, **record}, opener=opener)
        lead = ids_of(smollm2_tokenizer, opener)
        assert_scored_as(model, rollout, [prompt + lead, prompt + word + lead], answer)


@pytest.mark.parametrize("written", [False, True], ids=["added by the tokenizer", "in the text"])
@pytest.mark.parametrize("form", ["messages", "segments"])
def test_one_beginning_of_sequence_only(
    tmp_path: Path, smollm2_tokenizer: Any, model: PreTrainedModel, form: str, written: bool
) -> None:
    """OpenRLHF #393: the template writes a beginning-of-sequence token, and the tokenizer puts another before it."""
    tokenizer = copy.deepcopy(smollm2_tokenizer)
    bos = tokenizer.convert_tokens_to_ids(BOS)
    tokenizer.add_special_tokens({"bos_token": BOS})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    assert tokenizer("a")["input_ids"][0] == bos, "this tokenizer must add one by itself"
    begin = BOS if written else ""
    tokenizer.chat_template = (
        f"{begin}{{% for m in messages %}}[{{{{ m.role }}}}] {{{{ m.content }}}}\n{{% endfor %}}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    answer = ids_of(tokenizer, "Orm")
    if form == "messages":
        chat = [{"role": "user", "content": "Where is Ula?"}, {"role": "assistant", "content": "In Orm."}]
        record: dict[str, Any] = {"messages": chat, "answer": "Orm"}
        texts = ["[user] Where is Ula?\n", "[user] Where is Ula?\n[assistant] In Orm.\n"]
        states = [ids_of(tokenizer, text + "[assistant] <answer>") for text in texts]
        expected = int(written)  # a template without one has decided so
    else:
        prompt = {"role": "prompt", "text": f"{begin}Where is Ula?"}
        record = {"segments": [prompt, {"role": "assistant", "text": " In Orm."}], "answer": "Orm"}
        lead = ids_of(tokenizer, "<answer>")
        pieces = [ids_of(tokenizer, text) for text in ("Where is Ula?", " In Orm.")]
        states = [pieces[0] + lead, pieces[0] + pieces[1] + lead]
        expected = 1
    rollout = read_one(tmp_path, tokenizer, record)
    assert rollout.input_ids.tolist().count(bos) == expected
    states = [[bos] * expected + state for state in states]
    assert_scored_as(model, rollout, states, answer)
