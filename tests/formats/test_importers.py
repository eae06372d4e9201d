"""Every importer on small records written by hand: exact ids, boundaries, masks and transcripts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trace_fast.errors import RolloutError
from trace_fast.formats import FieldKeys, read_rollouts, what_format
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


@pytest.fixture
def read(tmp_path: Path, smollm2_tokenizer: Any) -> Any:
    def one(record: dict[str, Any], **options: Any) -> Rollout:
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps(record))
        (rollout,) = read_rollouts(path, smollm2_tokenizer, **options)
        return rollout

    return one


@pytest.fixture
def error(read: Any) -> Any:
    def one(record: dict[str, Any], **options: Any) -> RolloutError:
        with pytest.raises(RolloutError) as caught:
            read(record, **options)
        return caught.value

    return one


@pytest.fixture
def ids(smollm2_tokenizer: Any) -> Any:
    return lambda text: smollm2_tokenizer(text, add_special_tokens=False)["input_ids"]


def _written(rollout: Rollout, tokenizer: Any) -> list[str]:
    """The pieces of text that the mask says the policy wrote."""
    assert rollout.loss_mask is not None
    cuts = np.flatnonzero(np.diff(np.concatenate([[False], rollout.loss_mask, [False]])))
    return [tokenizer.decode(rollout.input_ids[a:b]) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]


def _check(rollout: Rollout, texts: list[str], ids: Any, n_turns: int) -> None:
    """States are ``texts``, tokenised alone; they are nested."""
    assert rollout.n_turns == n_turns
    assert rollout.boundaries.tolist() == [len(ids(text)) for text in texts]
    for k, text in enumerate(texts):
        assert rollout.prefix(k).tolist() == ids(text)
    assert rollout.nested


# --- messages -----------------------------------------------------------------------------------------------------


def test_messages(read: Any, ids: Any, smollm2_tokenizer: Any) -> None:
    rollout = read({"id": 7, "group": 3, "messages": CHAT, "answer": "Orm", "reward": 1, "tag": {"a": [1.5]}})
    _check(rollout, CHAT_TEXTS, ids, 1)
    assert rollout.finished
    assert rollout.input_ids.tolist() == ids(CHAT_TEXTS[-1])
    assert (rollout.id, rollout.group, rollout.reward, rollout.extra) == ("7", "3", 1.0, {"tag": {"a": [1.5]}})
    opener = ids(PROMPT + "<answer>")
    assert [o.tolist() for o in rollout.openers] == [opener] * 3
    assert [a.tolist() for a in rollout.answers] == [ids(PROMPT + "<answer>Orm")[len(opener) :]]
    assert rollout.answer_texts == ("Orm",)
    assert _written(rollout, smollm2_tokenizer) == [CALL + "<|im_end|>", "In Orm.<|im_end|>"]
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


def test_arguments_that_are_no_json_stay_as_they_were_written(read: Any, smollm2_tokenizer: Any) -> None:
    broken = {"function": {"name": "look", "arguments": '{"q": "Ula'}}
    rollout = read({"messages": [*HEAD, {"role": "assistant", "tool_calls": [broken]}, CHAT[3]], "answer": "Orm"})
    expected = '<tool_call>\n{"name": "look", "arguments": {"q": "Ula}\n</tool_call><|im_end|>'
    assert _written(rollout, smollm2_tokenizer) == [expected]


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


def test_reasoning_that_the_template_drops_is_written_out(read: Any, smollm2_tokenizer: Any) -> None:
    messages = [*HEAD, {"role": "assistant", "content": "In Orm.", "reasoning_content": "Hm."}]
    rollout = read({"messages": messages, "answer": "Orm"})
    assert _written(rollout, smollm2_tokenizer) == ["<think>\nHm.\n</think>\n\nIn Orm.<|im_end|>"]
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


def test_chatml_messages(read: Any, ids: Any, smollm2_tokenizer: Any) -> None:
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
    assert _written(rollout, smollm2_tokenizer) == [
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


# --- search_r1 ----------------------------------------------------------------------------------------------------


def test_search_r1(read: Any, ids: Any, smollm2_tokenizer: Any) -> None:
    pieces = [
        "<think>a</think>\n<search> Ula </search>",
        "\n\n<information>Doc 1</information>\n\n",
        "<think>b</think><answer> Orm </answer>",
    ]
    record = {"question": "Where is Ula?", "full_output": "".join(pieces), "golden": ["Orm", "orm"], "correct": True}
    assert what_format(record) == "search_r1"
    rollout = read(record)
    tokens = [ids("Where is Ula?\n"), *map(ids, pieces)]
    assert rollout.input_ids.tolist() == list(itertools.chain(*tokens))
    assert rollout.boundaries.tolist() == [len(tokens[0]), sum(map(len, tokens[:3])), sum(map(len, tokens))]
    assert (rollout.n_turns, rollout.finished, rollout.reward) == (1, True, 1.0)
    assert _written(rollout, smollm2_tokenizer) == [pieces[0], pieces[2]]
    assert [o.tolist() for o in rollout.openers] == [ids("<answer>")] * 3
    assert [s.tool for s in rollout.transcript] == [None, "search", "search", None]
    assert rollout.notes == ("the prompt was not recorded; the question stands for it",)
    bare = read({"output": "".join(pieces[:2]) + "<search> x </search>", "gold": "Orm"})
    assert bare.boundaries.tolist() == [0, len(tokens[1]) + len(tokens[2])]
    assert (bare.n_turns, bare.finished, bare.notes) == (1, False, ("no prompt was recorded",))


# --- react --------------------------------------------------------------------------------------------------------

REACT = [
    "Question: Where is Ula?\n",
    "Thought 1: I look.\nAction 1: Search[Ula]\n",
    "Observation 1: Ula is in Orm.\nAction: not an action of this log\n",
    "Thought 2: Done.\nAction 2: Finish[Orm]\n",
]
VERDICT = "Observation 2: Answer is CORRECT\n"


def test_react_log(tmp_path: Path, smollm2_tokenizer: Any, ids: Any) -> None:
    path = tmp_path / "a.txt"
    log = "".join(REACT) + VERDICT + "Correct answer: Orm\n"
    halted = "".join(REACT[:3]) + "Correct answer: Orm \n\n"
    path.write_text("\n" + log + "\n" + halted)
    rollouts = list(read_rollouts(path, smollm2_tokenizer))
    tokens = [ids(piece) for piece in REACT]
    lengths = np.cumsum([len(t) for t in tokens]).tolist()
    assert rollouts[0].input_ids.tolist() == list(itertools.chain(*tokens))
    assert rollouts[0].boundaries.tolist() == [lengths[0], lengths[2], lengths[3]]
    assert (rollouts[0].n_turns, rollouts[0].finished, rollouts[0].reward) == (1, True, 1.0)
    assert rollouts[1].boundaries.tolist() == [lengths[0], lengths[2]]
    assert (rollouts[1].n_turns, rollouts[1].finished, rollouts[1].reward) == (1, False, None)
    assert [r.answer_texts for r in rollouts] == [("Orm",), ("Orm",)]
    assert [r.source for r in rollouts] == [f"{path}:2", f"{path}:12"]
    assert "".join(s.text for s in rollouts[0].transcript) == "".join(REACT)
    assert [s.tool for s in rollouts[0].transcript] == [None, "Search", "Search", None]


@pytest.mark.parametrize(
    ("log", "kind", "words"),
    [
        ("".join(REACT), "answer", "Correct answer"),
        ("Question: x\nThought 4: y\nCorrect answer: z", "format", "begins with Thought 1, got number 4"),
        ("Question: x\nCorrect answer: z", "format", "expected lines that begin"),
        ("Question: x\nThought 1: y\nCorrect answer: ", "answer", "empty"),
    ],
)
def test_bad_react_logs(tmp_path: Path, smollm2_tokenizer: Any, log: str, kind: str, words: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(log)
    errors: list[RolloutError] = []
    assert list(read_rollouts(path, smollm2_tokenizer, errors=errors.append)) == []
    assert [(e.kind, e.source) for e in errors] == [(kind, f"{path}:1")]
    assert words in errors[0].reason


def test_react_string_and_dict_of_records(tmp_path: Path, smollm2_tokenizer: Any, ids: Any) -> None:
    head = "### Instruction:\nWhere is Ula?\n\n### Response:\n"
    pieces = ["Thought: I look.\nAction: search[Ula]\n", "Observation: Orm.\n", "Thought: ok\nAction:  finish[Orm]\n"]
    path = tmp_path / "a.json"
    records = {"17": {"traj": head + "".join(pieces) + "Observation: Episode finished, reward = True\n", "gt": "orm"}}
    path.write_text(json.dumps(records))
    (rollout,) = read_rollouts(path, smollm2_tokenizer)
    tokens = [ids(head), *map(ids, pieces)]
    assert (rollout.id, rollout.group) == ("17", "17")
    assert rollout.input_ids.tolist() == list(itertools.chain(*tokens))
    assert rollout.boundaries.tolist() == [len(tokens[0]), sum(map(len, tokens[:3])), sum(map(len, tokens))]
    assert rollout.notes == ("what the environment said after the final answer is left out",)


def test_react_chat(read: Any, ids: Any) -> None:
    chat = [
        HEAD[1],
        {"role": "assistant", "content": "Thought: a\nAction: search[Ula]"},
        {"role": "user", "content": "Observation: Orm"},
        {"role": "assistant", "content": "Thought: b\nAction: finish[Orm]"},
        {"role": "user", "content": "Observation: Episode finished, reward = True"},
    ]
    record = {"traj": chat, "gt": "Orm"}
    assert what_format(record) == "react"
    rollout = read(record)
    default = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    blocks = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat]
    _check(rollout, [default + "".join(blocks[:end]) for end in (1, 3, 4)], ids, 1)
    assert len(rollout.input_ids) == rollout.boundaries[-1]


def test_an_early_finish_is_an_ordinary_action(read: Any) -> None:
    text = "Thought: a\nAction: finish[x]\nObservation: None\nThought: b\nAction: search[y]\nObservation: c\n"
    rollout = read({"text": text, "question": "Q", "answer": "Orm"})
    assert (rollout.n_turns, rollout.finished) == (2, False)


# --- detection and refusals ---------------------------------------------------------------------------------------


def test_nothing_matches(error: Any) -> None:
    caught = error({"foo": 1, "answer": "x"})
    assert caught.kind == "format"
    for word in ("'foo'", "'answer'", "tokens", "segments", "responses", "completion", "chatml", "search_r1", "react"):
        assert word in caught.reason


def test_verl_dump_is_inexact(error: Any) -> None:
    caught = error({"input": "a", "output": "<search>", "gts": "x", "score": 1.0, "step": 1, "uid": "u"})
    assert caught.kind == "inexact"
    assert "token ids" in caught.reason
    assert "input_ids, boundaries, loss_mask" in caught.reason


def test_format_and_place_can_be_named(read: Any, error: Any, ids: Any) -> None:
    record = {"deep": {"chat": CHAT}, "messages": "not these", "answer": "Orm"}
    _check(read(record, keys=FieldKeys(messages="deep.chat")), CHAT_TEXTS, ids, 1)
    named = read({"messages": CHATML, "answer": "Orm"}, format="messages")
    assert named.n_turns == 0  # as messages, tool traffic in text is just text
    assert error({"messages": CHAT, "answer": "Orm"}, format="tokens").kind == "format"


def test_no_tokenizer_for_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": CHAT, "answer": "Orm"}))
    with pytest.raises(RolloutError, match="needs a tokenizer") as caught:
        list(read_rollouts(path))
    assert caught.value.kind == "config"
