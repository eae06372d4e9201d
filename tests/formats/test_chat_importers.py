"""Chat importers on small records written by hand: exact ids, boundaries, masks and transcripts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trace_fast.formats import what_format
from trace_fast.rollout import Rollout, Segment

SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"
USER = "<|im_start|>user\nWhere is Ula?<|im_end|>\n"
PROMPT = "<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {"q": "Ula"}}\n</tool_call>'


def call(name: str = "look", q: str = "Ula", call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps({"q": q})}}


HEAD = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Ula?"}]
CHAT = [
    *HEAD,
    {"role": "assistant", "content": None, "tool_calls": [call()]},
    {"role": "tool", "content": "Ula is in Orm.", "tool_call_id": "c1"},
    {"role": "assistant", "content": "In Orm."},
]
CHAT_TEXTS = [SYSTEM + USER]
CHAT_TEXTS.append(CHAT_TEXTS[-1] + PROMPT + CALL + "<|im_end|>\n<|im_start|>tool\nUla is in Orm.<|im_end|>\n")
CHAT_TEXTS.append(CHAT_TEXTS[-1] + PROMPT + "In Orm.<|im_end|>\n")


def _check(rollout: Rollout, texts: list[str], ids: Any, n_turns: int) -> None:
    """States are ``texts``, tokenised alone; they are nested."""
    assert rollout.n_turns == n_turns
    assert rollout.boundaries.tolist() == [len(ids(text)) for text in texts]
    for k, text in enumerate(texts):
        assert rollout.prefix(k).tolist() == ids(text)
    assert rollout.nested


# --- messages -----------------------------------------------------------------------------------------------------


def test_messages(written: Any, read: Any, ids: Any, smollm2_tokenizer: Any) -> None:
    rollout = read({"id": 7, "group": 3, "messages": CHAT, "answer": "Orm", "reward": 1, "tag": {"a": [1.5]}})
    _check(rollout, CHAT_TEXTS, ids, 1)
    assert rollout.finished
    assert rollout.input_ids.tolist() == ids(CHAT_TEXTS[-1])
    assert (rollout.id, rollout.group, rollout.reward, rollout.extra) == ("7", "3", 1.0, {"tag": {"a": [1.5]}})
    opener = ids(PROMPT + "<answer>")
    assert [o.tolist() for o in rollout.openers] == [opener] * 3
    assert [a.tolist() for a in rollout.answers] == [ids(PROMPT + "<answer>Orm")[len(opener) :]]
    assert rollout.answer_texts == ("Orm",)
    assert written(rollout, smollm2_tokenizer) == [CALL + "<|im_end|>", "In Orm.<|im_end|>"]
    assert rollout.transcript == (
        Segment("system", "Be brief.", -1),
        Segment("user", "Where is Ula?", -1),
        Segment("assistant", CALL, 0, "look"),
        Segment("tool", "Ula is in Orm.", 0, "look"),
        Segment("assistant", "In Orm.", 1),
    )
    assert rollout.notes == ("chat template does not render tool_calls; written into the content",)


@pytest.mark.parametrize(
    "variant",
    [
        {"tool_calls": [json.dumps(call())]},
        {"tool_calls": [{"name": "look", "arguments": {"q": "Ula"}}]},
        {"tool_calls": [{"function": {"name": "look", "arguments": {"q": "Ula"}}}]},
        {"function_call": {"name": "look", "arguments": '{"q": "Ula"}'}},
    ],
)
@pytest.mark.parametrize("role", ["tool", "function"])
def test_shapes_of_tool_calls_are_the_same_call(read: Any, ids: Any, variant: dict[str, Any], role: str) -> None:
    action = {"role": "assistant", "content": "", **variant}
    messages = [*HEAD, action, {"role": role, "name": "look", "content": "Ula is in Orm."}, CHAT[-1]]
    rollout = read({"messages": messages, "answer": "Orm"})
    _check(rollout, CHAT_TEXTS, ids, 1)
    assert [s.tool for s in rollout.transcript] == [None, None, "look", "look", None]


def test_arguments_that_are_no_json_stay_as_they_werewritten(written: Any, read: Any, smollm2_tokenizer: Any) -> None:
    broken = {"function": {"name": "look", "arguments": '{"q": "Ula'}}
    rollout = read({"messages": [*HEAD, {"role": "assistant", "tool_calls": [broken]}, CHAT[3]], "answer": "Orm"})
    expected = '<tool_call>\n{"name": "look", "arguments": {"q": "Ula}\n</tool_call><|im_end|>'
    assert written(rollout, smollm2_tokenizer) == [expected]


def test_parallel_calls_and_consecutive_results_are_one_turn(read: Any, ids: Any) -> None:
    calls = [call(call_id="c1"), call("open", "2", "c2"), call("find", "x", "c3")]
    results = [{"role": "tool", "tool_call_id": i, "content": i} for i in ("c2", "c1", "c3")]
    rollout = read({"messages": [*HEAD, {"role": "assistant", "tool_calls": calls}, *results], "answer": "Orm"})
    assert (rollout.n_turns, rollout.finished) == (1, False)
    shown = "\n".join(
        f'<tool_call>\n{{"name": "{c["function"]["name"]}", "arguments": {c["function"]["arguments"]}}}\n</tool_call>'
        for c in calls
    )
    tools = "".join(f"<|im_start|>tool\n{i}<|im_end|>\n" for i in ("c2", "c1", "c3"))
    _check(rollout, [SYSTEM + USER, SYSTEM + USER + PROMPT + shown + "<|im_end|>\n" + tools], ids, 1)
    assert [s.tool for s in rollout.transcript[2:]] == ["look, open, find", "open", "look", "find"]


def test_results_without_ids_are_matched_in_order(read: Any) -> None:
    calls = [call(call_id="c1"), call("open", "2", "c2")]
    results = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    rollout = read({"messages": [*HEAD, {"role": "assistant", "tool_calls": calls}, *results], "answer": "Orm"})
    assert [s.tool for s in rollout.transcript[3:]] == ["look", "open"]


def _roles(words: str) -> list[dict[str, Any]]:
    """Messages from letters: s(ystem) u(ser) a(ssistant) c(all) t(ool)."""
    made = {
        "s": {"role": "system", "content": "S"},
        "u": {"role": "user", "content": "U"},
        "a": {"role": "assistant", "content": "A"},
        "c": {"role": "assistant", "content": "C", "tool_calls": [call()]},
        "t": {"role": "tool", "content": "T"},
    }
    return [made[letter] for letter in words]


@pytest.mark.parametrize(
    ("words", "ends", "n_turns"),
    [
        ("u", [1], 0),  # only a prompt
        ("ua", [1, 2], 0),  # no tools
        ("sua", [2, 3], 0),
        ("suct", [2, 4], 1),  # cut off after an observation
        ("sucta", [2, 4, 5], 1),
        ("suctcta", [2, 4, 6, 7], 2),
        ("suctt", [2, 5], 1),  # consecutive results
        ("suctc", [2, 4], 1),  # a call nobody answered is neither a turn nor an answer
        ("suc", [2], 0),
        ("suctac", [2, 4], 1),
        ("suctau", [2, 4, 5], 1),  # someone speaks after the answer
        ("sucuta", [2, 5, 6], 1),  # a user between call and result belongs to the turn
        ("suauctua", [2, 6, 8], 1),  # talk before the first call belongs to turn 0, a question to the answer's span
        ("suctuta", [2, 6, 7], 1),  # results without a new action in between are the same turn
        ("suaua", [2, 5], 0),
    ],
)
def test_turn_rules(read: Any, smollm2_tokenizer: Any, words: str, ends: list[int], n_turns: int) -> None:
    messages = _roles(words)
    rollout = read({"messages": messages, "answer": "Orm"})
    assert rollout.n_turns == n_turns
    shown = [{"role": m["role"], "content": m["content"]} for m in messages]
    for message, original in zip(shown, messages, strict=True):
        message["content"] += "\n" + CALL if "tool_calls" in original else ""
    lengths = [
        len(smollm2_tokenizer.apply_chat_template(shown[:end], tokenize=True, return_dict=False)) for end in ends
    ]
    assert rollout.boundaries.tolist() == lengths
    assert rollout.finished == (len(ends) == n_turns + 2)


def test_reasoning_that_the_template_drops_is_written_out(written: Any, read: Any, smollm2_tokenizer: Any) -> None:
    messages = [*HEAD, {"role": "assistant", "content": "In Orm.", "reasoning_content": "Hm."}]
    rollout = read({"messages": messages, "answer": "Orm"})
    assert written(rollout, smollm2_tokenizer) == ["<think>\nHm.\n</think>\n\nIn Orm.<|im_end|>"]
    assert "chat template does not render reasoning_content; written into the content" in rollout.notes


def test_content_parts(read: Any, error: Any, ids: Any) -> None:
    parts = [{"type": "text", "text": "Where is "}, {"type": "text", "text": "Ula?"}]
    rollout = read({"messages": [HEAD[0], {"role": "user", "content": parts}, *CHAT[2:]], "answer": "Orm"})
    _check(rollout, CHAT_TEXTS, ids, 1)
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    caught = error({"messages": [{"role": "user", "content": [*parts, image]}], "answer": "Orm"})
    assert caught.kind == "inexact"
    assert "messages[0].content[2]: a part of type 'image_url'" in caught.reason


def test_developer_is_system(read: Any, ids: Any) -> None:
    rollout = read({"messages": [{"role": "developer", "content": "Be brief."}, *CHAT[1:]], "answer": "Orm"})
    _check(rollout, CHAT_TEXTS, ids, 1)
    assert "role developer read as system" in rollout.notes


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "got a record that is none of them"),
        ([{"role": "robot", "content": "x"}], "messages[0].role: expected one of system, developer, user"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content: expected text or a list of parts, got int 5"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]: expected a content part"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": "x"}], "expected a list"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": ["x"]}],
            "expected JSON of a tool call",
        ),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{}]}], "with a function name"),
        ([{"role": "assistant", "content": "x"}], "expected a message before the policy's first one"),
    ],
)
def test_bad_messages(error: Any, messages: Any, words: str) -> None:
    caught = error({"messages": messages, "answer": "Orm"})
    assert caught.kind == "format"
    assert words in caught.reason


# --- completion ---------------------------------------------------------------------------------------------------


def test_completion(read: Any, ids: Any) -> None:
    action = {"role": "assistant", "content": "", "tool_calls": [json.dumps(call())]}
    result = {"role": "tool", "content": "Ula is in Orm.", "tool_calls": None}
    record = {"id": 0, "prompt": HEAD, "completion": [action, result, CHAT[-1]], "answer": "Orm", "reward": 1.0}
    assert what_format(record) == "completion"
    rollout = read(record)
    _check(rollout, CHAT_TEXTS, ids, 1)
    assert rollout.id == rollout.source  # the integer counts examples, several rollouts share it
    assert rollout.extra == {"id": 0}
    assert read({**record, "id": "mine"}).id == "mine"


def test_completion_prompt_may_show_examples(read: Any, ids: Any) -> None:
    shot = [{"role": "assistant", "content": "Shot."}, {"role": "user", "content": "And?"}]
    rollout = read({"prompt": HEAD + shot, "completion": [CHAT[-1]], "answer": "Orm"})
    prompt = SYSTEM + USER + PROMPT + "Shot.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
    _check(rollout, [prompt, prompt + PROMPT + "In Orm.<|im_end|>\n"], ids, 0)
    assert rollout.loss_mask[: rollout.boundaries[0]].sum() == 0


# --- responses ----------------------------------------------------------------------------------------------------

ITEMS = [
    {"type": "reasoning", "summary": [], "encrypted_content": None},
    {"type": "function_call", "name": "look", "arguments": '{"q": "Ula"}', "call_id": "c1"},
    {"type": "function_call_output", "call_id": "c1", "output": "Ula is in Orm."},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "In Orm."}]},
]


@pytest.mark.parametrize(
    "record",
    [
        {"responses_create_params": {"input": HEAD}, "response": {"output": ITEMS}},
        {"responses_create_params": {"input": HEAD[1:], "instructions": "Be brief."}, "response": {"output": ITEMS}},
        {"instructions": "Be brief.", "input": "Where is Ula?", "output": ITEMS},
    ],
)
def test_responses(read: Any, ids: Any, record: dict[str, Any]) -> None:
    assert what_format(record) == "responses"
    rollout = read({**record, "expected_answer": "Orm"})
    _check(rollout, CHAT_TEXTS, ids, 1)
    assert rollout.finished
    assert rollout.notes[0].startswith("reasoning items without text")
    assert rollout.extra == {}


def test_responses_parallel_calls_are_one_turn_and_open_reasoning_is_kept(read: Any) -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    said = {"type": "message", "role": "assistant", "content": "I look."}
    second = {**ITEMS[1], "name": "open", "call_id": "c2"}
    items = [thought, said, ITEMS[1], second, ITEMS[2], {**ITEMS[2], "call_id": "c2", "output": "b"}]
    rollout = read({"input": HEAD, "output": items, "answer": "Orm"})
    assert (rollout.n_turns, rollout.finished) == (1, False)
    assert [(s.role, s.turn, s.tool) for s in rollout.transcript[2:]] == [
        ("assistant", 0, "look, open"),
        ("tool", 0, "look"),
        ("tool", 0, "open"),
    ]
    assert rollout.transcript[2].text.startswith("<think>\nHm.\n</think>\n\nI look.\n<tool_call>")


def test_responses_hidden_tools_are_inexact(error: Any) -> None:
    caught = error({"input": HEAD, "output": [{"type": "web_search_call", "id": "w"}, *ITEMS], "answer": "Orm"})
    assert (caught.kind, "web_search_call" in caught.reason) == ("inexact", True)


# --- chatml -------------------------------------------------------------------------------------------------------

CHATML = [
    *HEAD,
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n" + CALL},
    {"role": "user", "content": "<tool_response>\nUla is in Orm.\n</tool_response>"},
    {"role": "assistant", "content": "<answer>In Orm.</answer>"},
]


def _chatml_texts() -> list[str]:
    blocks = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHATML]
    return ["".join(blocks[:end]) for end in (2, 4, 5)]


def test_chatml_messages(written: Any, read: Any, ids: Any, smollm2_tokenizer: Any) -> None:
    record = {"messages": CHATML, "answer": [["Orm"], ["orm", "Orm"]]}
    assert what_format(record) == "chatml"
    rollout = read(record)
    _check(rollout, _chatml_texts(), ids, 1)
    assert rollout.answer_texts == ("Orm", "orm")
    assert [(s.role, s.turn, s.tool) for s in rollout.transcript[2:]] == [
        ("assistant", 0, "look"),
        ("tool", 0, "look"),
        ("assistant", 1, None),
    ]
    assert written(rollout, smollm2_tokenizer) == [
        m["content"] + "<|im_end|>" for m in CHATML if m["role"] == "assistant"
    ]


def test_chatml_string(read: Any, error: Any, ids: Any) -> None:
    text = _chatml_texts()[-1]
    record = {"text": text, "answer": "Orm"}
    assert what_format(record) == "chatml"
    _check(read(record), _chatml_texts(), ids, 1)
    cut = read({"text": text.removesuffix("<|im_end|>\n"), "answer": "Orm"})
    assert (cut.n_turns, cut.finished) == (1, False)
    assert cut.notes == ("the last ChatML message is not closed, so it is read as cut off",)
    prompted = read({"text": _chatml_texts()[1] + PROMPT, "answer": "Orm"})
    _check(prompted, _chatml_texts()[:2], ids, 1)
    caught = error({"text": "hello " + text, "answer": "Orm"})
    assert (caught.kind, "outside of them" in caught.reason) == ("format", True)


def test_chatml_call_without_result_is_cut_off(read: Any, ids: Any) -> None:
    rollout = read({"messages": CHATML[:3], "answer": "Orm"})
    _check(rollout, _chatml_texts()[:1], ids, 0)
    assert len(rollout.input_ids) > rollout.boundaries[-1]
