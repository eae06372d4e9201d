"""Chat templates of many families: states, openers, masks, what is dropped, and the seam before the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trace_fast.errors import RolloutError
from trace_fast.formats import read_rollouts
from trace_fast.formats.answers import SeamSplitter, answer_ids, encode
from trace_fast.formats.body import Chat
from trace_fast.formats.render import NOTE_REWRITES, ChatRenderer, Rendered
from trace_fast.formats.template import ChatTemplate
from trace_fast.rollout import Rollout

ARGUMENTS = {"q": "Ula"}


def _call(number: int, text: str, reasoning: str | None) -> dict[str, Any]:
    function = {"name": "search", "arguments": {"q": text}}
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call0000{number}", "type": "function", "function": function}],
    }
    return message if reasoning is None else {**message, "reasoning_content": reasoning}


def _chat(*, reasoning: bool = True, second_question: bool = False) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is Ula?"},
        _call(1, "Ula", "I look." if reasoning else None),
        {"role": "tool", "content": "Ula is in Orm.", "tool_call_id": "call00001", "name": "search"},
    ]
    if second_question:
        chat.append({"role": "assistant", "content": "In Orm."} | ({"reasoning_content": "So."} if reasoning else {}))
        chat.append({"role": "user", "content": "And Orm?"})
    chat.append(_call(2, "Orm", "More." if reasoning else None))
    chat.append({"role": "tool", "content": "Orm is in Tal.", "tool_call_id": "call00002", "name": "search"})
    chat.append({"role": "assistant", "content": "In Tal."} | ({"reasoning_content": "Done."} if reasoning else {}))
    return chat


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "searches",
            "parameters": {"type": "object", "properties": {"q": {"type": "string", "description": "what"}}},
        },
    }
]


def _read(tmp_path: Path, tokenizer: Any, messages: Any, answer: Any = "Tal", **options: Any) -> Rollout:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": messages, "tools": TOOLS, "answer": answer}))
    (rollout,) = read_rollouts(path, tokenizer, **options)
    return rollout


def _written(rollout: Rollout | Rendered, tokenizer: Any) -> list[str]:
    assert rollout.loss_mask is not None
    cuts = np.flatnonzero(np.diff(np.concatenate([[False], rollout.loss_mask, [False]])))
    return [tokenizer.decode(rollout.input_ids[a:b]) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]


CHATML = ("<tool_call>", "</tool_call>", "<think>", "</think>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
GEMMA4 = (
    "<|turn>",
    "<turn|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|channel>",
    "<channel|>",
)
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>")

# template, special tokens, enable_thinking passed with the generation prompt, what follows the prompt, dropped
FAMILIES = [
    ("qwen2_5", CHATML, None, "", {"reasoning"}),
    ("qwen3", CHATML, False, "", set()),
    ("qwen3_instruct_2507", CHATML, None, "", {"reasoning"}),
    ("qwen3_5_think", CHATML, False, "", set()),
    ("qwen3_8", CHATML, None, "\n</think>\n\n", set()),
    ("llama3", LLAMA, None, "", {"reasoning", "tool_calls", "tools"}),
    ("llama3_1", LLAMA, None, "", {"content", "reasoning"}),
    ("llama3_2", LLAMA, None, "", {"content", "reasoning"}),
    ("glm4moe", ("<|assistant|>", "<|user|>", "<|system|>", "<|observation|>", "[gMASK]", "<sop>"), None, "", set()),
    ("nemotron_3_nano", CHATML, False, "", set()),
    ("lfm2_2_5", ("<|tool_call_start|>", "<|tool_call_end|>"), None, "", set()),
    ("phi3", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), None, "",
     {"reasoning", "tool", "tool_calls", "tools"}),
    ("smolvlm", ("<end_of_utterance>",), None, "", {"reasoning", "tool_calls", "tools"}),
    ("gemma4", GEMMA4, False, "", set()),
    ("gptoss", HARMONY, None, "<|channel|>final<|message|>", set()),
    ("cohere2", ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>",
                 "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"), None, "",
     {"reasoning", "tool", "tool_calls", "tools"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "special", "thinking", "closing", "drops"), FAMILIES, ids=[f[0] for f in FAMILIES])
@pytest.mark.parametrize("second_question", [False, True], ids=["one question", "two questions"])
def test_states_equal_the_template_rendered_naively(
    tmp_path: Path, with_template: Any, name: str, special: Any, thinking: Any, closing: str, drops: Any,
    second_question: bool,
) -> None:  # fmt: skip
    """Prefix + opener of every state = the ids of ``template(messages, generation prompt) + closing + <answer>``."""
    tokenizer = with_template(name, *special)
    template = ChatTemplate(tokenizer)
    assert template.drops - {"any reasoning"} == drops
    messages = _chat(second_question=second_question)
    rollout = _read(tmp_path, tokenizer, messages)
    adapted, _ = template.adapt(messages, TOOLS)
    if template.parts:
        adapted = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in adapted]
    ends = [2, 4, 8, 9] if second_question else [2, 4, 6, 7]
    options = {} if thinking is None else {"enable_thinking": thinking}
    for k, end in enumerate(ends):
        text = tokenizer.apply_chat_template(
            adapted[:end], tools=TOOLS, add_generation_prompt=True, tokenize=False, **options
        )
        end_of_prompt = closing if k < 3 or text.endswith(("<think>\n", "<|start|>assistant")) else ""
        state = np.concatenate([rollout.prefix(k), rollout.openers[k]]).tolist()
        assert state == encode(tokenizer, text + end_of_prompt + "<answer>").tolist()
        joint = encode(tokenizer, text + end_of_prompt + "<answer>Tal").tolist()
        assert joint == state + rollout.answers[0].tolist()
    full = tokenizer.apply_chat_template(adapted, tools=TOOLS, tokenize=False)
    assert rollout.input_ids.tolist() == encode(tokenizer, full).tolist()
    assert rollout.nested == (NOTE_REWRITES not in rollout.notes)


def test_qwen3_rewrites_history_when_a_user_speaks_again(tmp_path: Path, with_template: Any) -> None:
    tokenizer = with_template("qwen3", *CHATML)
    once = _read(tmp_path, tokenizer, _chat())
    assert (once.nested, NOTE_REWRITES in once.notes) == (True, False)
    twice = _read(tmp_path, tokenizer, _chat(second_question=True))
    assert (twice.nested, NOTE_REWRITES in twice.notes, twice.loss_mask) == (False, True, None)
    assert twice.boundaries.tolist() == [len(p) for p in twice.state_prefixes]
    assert "I look." in tokenizer.decode(twice.prefix(1))
    assert "I look." not in tokenizer.decode(twice.prefix(2))
    plain = _read(tmp_path, tokenizer, _chat(reasoning=False, second_question=True))
    assert plain.nested


def _hermes(q: str) -> str:
    return f'<tool_call>\n{{"name": "search", "arguments": {{"q": "{q}"}}}}\n</tool_call>'


def _qwen3_5(q: str) -> str:
    return f"<tool_call>\n<function=search>\n<parameter=q>\n{q}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "special", "expected"),
    [
        (
            "qwen3",
            CHATML,
            [
                f"<think>\nI look.\n</think>\n\n{_hermes('Ula')}<|im_end|>",
                f"<think>\nMore.\n</think>\n\n{_hermes('Orm')}<|im_end|>",
                "<think>\nDone.\n</think>\n\nIn Tal.<|im_end|>",
            ],
        ),
        (  # the generation prompt opens thinking, so the policy's first token is inside of it
            "qwen3_5_think",
            CHATML,
            [
                f"I look.\n</think>\n\n{_qwen3_5('Ula')}<|im_end|>",
                f"More.\n</think>\n\n{_qwen3_5('Orm')}<|im_end|>",
                "Done.\n</think>\n\nIn Tal.<|im_end|>",
            ],
        ),
        (
            "lfm2_2_5",
            ("<|tool_call_start|>", "<|tool_call_end|>"),
            [
                "<think>I look.</think><|tool_call_start|>[search(q='Ula')]<|tool_call_end|><|im_end|>",
                "<think>More.</think><|tool_call_start|>[search(q='Orm')]<|tool_call_end|><|im_end|>",
                "<think>Done.</think>In Tal.<|im_end|>",
            ],
        ),
    ],
)
def test_mask_runs_from_the_generation_prompt_to_the_end_of_turn(
    tmp_path: Path, with_template: Any, name: str, special: Any, expected: list[str]
) -> None:
    tokenizer = with_template(name, *special)
    assert _written(_read(tmp_path, tokenizer, _chat()), tokenizer) == expected


def test_text_arguments_for_templates_that_concatenate_them(tmp_path: Path, with_template: Any) -> None:
    tokenizer = with_template("deepseekv3", "<｜tool▁call▁end｜>")
    assert ChatTemplate(tokenizer).text_arguments
    rollout = _read(tmp_path, tokenizer, _chat(reasoning=False))
    assert '```json\n{"q": "Ula"}\n```' in tokenizer.decode(rollout.input_ids)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gemma", "System role not supported"),
        ("gemma3", "Conversation roles must alternate"),
        ("llava_next", "Only user and assistant roles are supported"),
    ],
)
def test_a_template_that_refuses_is_an_error_with_its_words(
    tmp_path: Path, with_template: Any, name: str, words: str
) -> None:
    with pytest.raises(RolloutError, match=words) as caught:
        _read(tmp_path, with_template(name), _chat())
    assert caught.value.kind == "template"


def test_a_template_that_fails_on_its_own_is_an_error(tmp_path: Path, with_template: Any) -> None:
    tokenizer = with_template("qwen3")
    for source in (
        "{{ messages[99].content.x }}",
        "{{ 1 / 0 }}",
        "{% for m in messages %}{{ m.content + 1 }}{% endfor %}",
    ):
        tokenizer.chat_template = source
        with pytest.raises(RolloutError, match="the chat template refuses these messages") as caught:
            _read(tmp_path, tokenizer, _chat())
        assert caught.value.kind == "template"


def test_no_chat_template(tmp_path: Path, with_template: Any) -> None:
    tokenizer = with_template("qwen3")
    tokenizer.chat_template = None
    with pytest.raises(RolloutError, match="segments form") as caught:
        _read(tmp_path, tokenizer, _chat())
    assert (caught.value.kind, caught.value.source.endswith("a.jsonl:1")) == ("template", True)


def test_dropped_roles_are_written_out(tmp_path: Path, with_template: Any) -> None:
    tokenizer = with_template("phi3", "<|user|>", "<|assistant|>", "<|end|>", "<|system|>")
    rollout = _read(tmp_path, tokenizer, _chat(reasoning=False))
    text = tokenizer.decode(rollout.input_ids)
    assert "<|user|>\n<tool_response>\nUla is in Orm.\n</tool_response><|end|>\n" in text
    assert any("does not render the tool role" in note for note in rollout.notes)
    assert any("does not render the list of tools" in note for note in rollout.notes)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'system' %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    rollout = _read(tmp_path, tokenizer, _chat(reasoning=False))
    assert tokenizer.decode(rollout.prefix(0)) == "<|user|>\nBe brief.\n\nWhere is Ula?<|end|>\n"
    assert any("does not render the system role" in note for note in rollout.notes)


# --- openers and the seam -----------------------------------------------------------------------------------------


def test_opener_text_takes_the_place_of_the_answer_tag(tmp_path: Path, with_template: Any) -> None:
    tokenizer = with_template("qwen3", *CHATML)
    rollout = _read(tmp_path, tokenizer, _chat(), opener="So the answer is:\n")
    text = "<|im_start|>assistant\n<think>\n\n</think>\n\nSo the answer is:\n"
    assert [o.tolist() for o in rollout.openers] == [encode(tokenizer, text).tolist()] * 4


def test_opener_ids_are_the_whole_opener(tmp_path: Path, smollm2_tokenizer: Any) -> None:
    rollout = _read(tmp_path, smollm2_tokenizer, _chat(), opener=[5, 6, 7])
    assert [o.tolist() for o in rollout.openers] == [[5, 6, 7]] * 4
    assert [a.tolist() for a in rollout.answers] == [encode(smollm2_tokenizer, "Tal").tolist()]
    assert "gold answer tokenised by itself, since the opener came as token ids" in rollout.notes


def test_answer_tokens_are_those_that_follow_the_opener(smollm2_tokenizer: Any) -> None:
    splitter = SeamSplitter(smollm2_tokenizer)
    for answer in ("Paris", "164,000", "May\xa05,\xa02017", "漢字", "two words", "1.50"):
        ids = splitter.answer("<answer>", answer)
        joint = encode(smollm2_tokenizer, "<answer>" + answer)
        assert np.concatenate([splitter.opener("<answer>"), ids]).tolist() == joint.tolist()
        assert smollm2_tokenizer.decode(ids) == answer


def test_a_token_across_the_seam_is_an_error_that_names_both_sides(tmp_path: Path, smollm2_tokenizer: Any) -> None:
    with pytest.raises(RolloutError) as caught:
        _read(tmp_path, smollm2_tokenizer, _chat(), answer=["Tal", '"Tal"'])
    assert caught.value.kind == "seam"
    for words in ("answer 1 ('\"Tal\"')", "ends in 'tart|>assistant\\n<answer>'", "('>\"')", "--opener", "answer_ids"):
        assert words in caught.value.reason
    rollout = _read(tmp_path, smollm2_tokenizer, _chat(), answer=["Tal", '"Tal"'], opener="<answer>\n")
    assert len(rollout.answers) == 2
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({"messages": _chat(), "answer": ['"Tal"'], "answer_ids": [3, 4]}))
    (rollout,) = read_rollouts(path, smollm2_tokenizer)
    assert ([a.tolist() for a in rollout.answers], rollout.answer_texts) == ([[3, 4]], ('"Tal"',))


def test_opener_that_ends_in_a_space_straddles(smollm2_tokenizer: Any) -> None:
    with pytest.raises(RolloutError, match="Paris") as caught:
        SeamSplitter(smollm2_tokenizer).answer("Answer: ", "Paris")
    assert caught.value.kind == "seam"


def test_qwen_seam_rates(qwen_tokenizer: Any) -> None:
    """Qwen joins '>' with a capital letter in some words; a line break after the tag keeps every answer apart."""
    splitter = SeamSplitter(qwen_tokenizer)

    def straddles(opener: str, answer: str) -> bool:
        try:
            splitter.answer(opener, answer)
        except RolloutError:
            return True
        return False

    letters = [chr(c) for c in range(ord("A"), ord("Z") + 1)]
    assert not straddles("<answer>", "Paris")
    assert not any(straddles("<answer>", digit) for digit in "0123456789")
    assert any(straddles("<answer>", letter) for letter in letters)
    others = ["(1)", '"x"', "$5", "-5", ".5", "#1", "[x]", "</a>", "漢字", "two words"]
    assert not any(straddles("<answer>\n", answer) for answer in letters + others)


def test_answers_that_differ_by_opener_are_an_error(smollm2_tokenizer: Any) -> None:
    class Splitter(SeamSplitter):
        def answer(self, opener: str, answer: str) -> np.ndarray:
            return encode(smollm2_tokenizer, opener[-1:] + answer)

    with pytest.raises(RolloutError, match="tokenises differently after the openers of different states"):
        answer_ids(Splitter(smollm2_tokenizer), ["a", "b"], ["x"])


# --- slow tokenizers ----------------------------------------------------------------------------------------------


class SlowTokenizer:
    """A tokenizer without offsets over a fast one, as Python tokenizers are."""

    is_fast = False

    def __init__(self, fast: Any) -> None:
        self._fast = fast

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)

    def __call__(self, text: str, **options: Any) -> Any:
        if options.get("return_offsets_mapping"):
            raise NotImplementedError("no offsets in Python tokenizers")
        return self._fast(text, **options)


def test_slow_tokenizers_give_the_same_states(tmp_path: Path, smollm2_tokenizer: Any) -> None:
    fast = _read(tmp_path, smollm2_tokenizer, _chat())
    slow = _read(tmp_path, SlowTokenizer(smollm2_tokenizer), _chat())
    assert slow.input_ids.tolist() == fast.input_ids.tolist()
    assert slow.boundaries.tolist() == fast.boundaries.tolist()
    assert [a.tolist() for a in slow.answers] == [a.tolist() for a in fast.answers]
    assert slow.loss_mask is None
    with pytest.raises(RolloutError, match="across the seam") as caught:
        _read(tmp_path, SlowTokenizer(smollm2_tokenizer), _chat(), answer='"Tal"')
    assert caught.value.kind == "seam"


def test_renderer_reuses_tokens_of_the_whole(smollm2_tokenizer: Any) -> None:
    """A long chat is tokenised once, not once a state."""
    calls: list[int] = []

    class Counting(SlowTokenizer):
        is_fast = True

        def __call__(self, text: str, **options: Any) -> Any:
            calls.append(len(text))
            return self._fast(text, **options)

    from trace_fast.formats.limits import Limits
    from trace_fast.formats.messages import clean_messages, steps_of

    turn = [{"role": "assistant", "content": "<tool_call>x"}, {"role": "tool", "content": "word " * 200}]
    messages, _ = clean_messages([{"role": "user", "content": "Q"}, *(turn * 30)], "messages", Limits())
    tokenizer: Any = Counting(smollm2_tokenizer)
    renderer = ChatRenderer(tokenizer, "<answer>", SeamSplitter(tokenizer))
    calls.clear()
    rendered = renderer.render(Chat(messages, steps_of(messages)), ["Orm"])
    assert rendered.n_turns == 30
    assert sorted(calls)[-2] < 100 < 30_000 < max(calls)


def test_prefixes_are_tokenised_alone_where_tokens_merge_across_the_seam(tmp_path: Path, with_template: Any) -> None:
    """Without special tokens in the template, ``][`` is one token of the whole, which no prefix up to ``]`` has."""
    tokenizer = with_template("qwen3")
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[{% endif %}"
    )
    rollout = _read(tmp_path, tokenizer, [m for m in _chat(reasoning=False) if m["role"] != "system"])
    full = tokenizer.decode(rollout.input_ids)
    assert rollout.input_ids.tolist() == encode(tokenizer, full).tolist()
    assert len(encode(tokenizer, "][")) == 1
    starts = [full.index("]") + 1, full.index("Ula is in Orm.]") + 15, full.index("Orm is in Tal.]") + 15, len(full)]
    for k, end in enumerate(starts):
        assert rollout.prefix(k).tolist() == encode(tokenizer, full[:end]).tolist()
    assert (rollout.nested, rollout.loss_mask) == (False, None)


def test_a_template_with_bos_gives_one_bos(tmp_path: Path, with_template: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = with_template("llama3_1", *LLAMA, bos="<|begin_of_text|>")
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    assert tokenizer("x")["input_ids"][0] == bos
    rollout = _read(tmp_path, tokenizer, _chat())
    for k in range(rollout.n_states):
        state = np.concatenate([rollout.prefix(k), rollout.openers[k], rollout.answers[0]])
        assert np.flatnonzero(state == bos).tolist() == [0]


@pytest.mark.parametrize(
    ("prompt", "prefixes", "opener"),
    [
        ("A:", ["(Q)A:", "(Q)(C)(T)A:", "(Q)(C)(T)(A)A:"], "<answer>"),  # no place to cut: the whole is the prefix
        ("<|im_start|>A:", ["(Q)", "(Q)(C)(T)", "(Q)(C)(T)(A)"], "<|im_start|>A:<answer>"),  # cut at the special token
    ],
)
def test_a_template_that_ends_otherwise_before_a_generation_prompt(
    tmp_path: Path, with_template: Any, prompt: str, prefixes: list[str], opener: str
) -> None:
    tokenizer = with_template("qwen3")
    tokenizer.chat_template = (
        "{% for m in messages %}({{ m.content }}){% endfor %}"
        f"{{% if add_generation_prompt %}}{prompt}{{% else %}}!{{% endif %}}"
    )
    chat = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "C"},
        {"role": "tool", "content": "T"},
        {"role": "assistant", "content": "A"},
    ]
    rollout = _read(tmp_path, tokenizer, chat)
    assert [rollout.prefix(k).tolist() for k in range(3)] == [encode(tokenizer, text).tolist() for text in prefixes]
    assert [o.tolist() for o in rollout.openers] == [encode(tokenizer, opener).tolist()] * 3
    assert tokenizer.decode(rollout.input_ids) == "(Q)(C)(T)(A)!"
