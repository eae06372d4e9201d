"""Text importers, detection and refusals on small records written by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trace_fast.errors import RolloutError
from trace_fast.formats import FieldKeys, read_rollouts, what_format

HEAD = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Ula?"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q": "Ula"}'}}
CHAT = [
    *HEAD,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "Ula is in Orm.", "tool_call_id": "c1"},
    {"role": "assistant", "content": "In Orm."},
]


# --- search_r1 ----------------------------------------------------------------------------------------------------


def test_search_r1(written: Any, read: Any, ids: Any, smollm2_tokenizer: Any) -> None:
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
    assert written(rollout, smollm2_tokenizer) == [pieces[0], pieces[2]]
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
    assert rollout.n_turns == 1
    assert rollout.boundaries.tolist() == [len(ids(default + "".join(blocks[:end]))) for end in (1, 3, 4)]
    assert rollout.input_ids.tolist() == ids(default + "".join(blocks[:4]))
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
    placed = read(record, keys=FieldKeys(messages="deep.chat"))
    assert placed.input_ids.tolist() == read({"messages": CHAT, "answer": "Orm"}).input_ids.tolist()
    assert (placed.n_turns, placed.extra) == (1, {"deep": {"chat": CHAT}, "messages": "not these"})
    traffic = [*HEAD, {"role": "assistant", "content": "<tool_call>{}</tool_call>"}]
    traffic += [{"role": "user", "content": "<tool_response>x</tool_response>"}]
    assert read({"messages": traffic, "answer": "Orm"}).n_turns == 1
    named = read({"messages": traffic, "answer": "Orm"}, format="messages")
    assert named.n_turns == 0  # as messages, tool traffic in text is just text
    assert error({"messages": CHAT, "answer": "Orm"}, format="tokens").kind == "format"


def test_no_tokenizer_for_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": CHAT, "answer": "Orm"}))
    with pytest.raises(RolloutError, match="needs a tokenizer") as caught:
        list(read_rollouts(path))
    assert caught.value.kind == "config"
