"""The shipped example rollouts, read as plain JSON: complete, well-formed, and true to their own documents."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib import resources
from typing import Any

import pytest

Record = dict[str, Any]

SITUATIONS = {
    "ferry-decisive-search": "decisive search",
    "ferry-decisive-open": "decisive open",
    "ferry-rescue-query": "rescue query",
    "ferry-distractor": "distractor, evidence never found",
    "bell-redundant-finds": "redundant finds",
    "bell-secured-then-lost": "secured answer lost to a distractor",
    "bell-empty-find-misread": "empty find misread as a negative",
    "bell-cut-off": "cut off without a final answer",
    "books-numeric": "numeric answer, two calls in one turn",
    "teahouse-chinese": "decisive open, in Chinese",
    "flag-no-tools": "no tools, a guess",
}
ARGUMENTS = {"browser.search": {"query": str}, "browser.open": {"id": int}, "browser.find": {"pattern": str}}
RESULT = re.compile(r"^\[(\d+)\] (.+) \((\S+)\)$", re.MULTILINE)
FINAL = re.compile(r"<answer>(.*?)</answer>")


def read_examples() -> list[Record]:
    text = resources.files("trace_fast").joinpath("examples/demo_rollouts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def accepted(record: Record) -> list[str]:
    return record["answer"] if isinstance(record["answer"], list) else [record["answer"]]


def calls(message: Record) -> list[tuple[str, dict[str, Any]]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]


@pytest.fixture(scope="module")
def examples() -> list[Record]:
    return read_examples()


def test_every_promised_situation_is_there_once(examples: list[Record]) -> None:
    assert {r["id"]: r["situation"] for r in examples} == SITUATIONS
    assert len(examples) == len(SITUATIONS)


def test_two_groups_of_four_and_three_singles(examples: list[Record]) -> None:
    assert Counter(r["group"] for r in examples) == {"ferry": 4, "bell": 4, "books": 1, "teahouse": 1, "flag": 1}
    rewards = {g: [r["reward"] for r in examples if r["group"] == g] for g in ("ferry", "bell")}
    assert rewards == {"ferry": [1, 1, 1, 0], "bell": [1, 0, 0, 0]}


def test_a_group_shares_prompt_and_answer(examples: list[Record]) -> None:
    for group in ("ferry", "bell"):
        members = [r for r in examples if r["group"] == group]
        assert all(r["messages"][:2] == members[0]["messages"][:2] for r in members)
        assert all(r["answer"] == members[0]["answer"] for r in members)


@pytest.mark.parametrize("record", read_examples(), ids=lambda r: r["id"])
class TestRecord:
    def test_keys(self, record: Record) -> None:
        assert set(record) == {"id", "group", "situation", "messages", "answer", "reward"}

    def test_roles_alternate_and_every_call_is_answered_in_order(self, record: Record) -> None:
        messages = record["messages"]
        assert [m["role"] for m in messages[:2]] == ["system", "user"]
        rest, seen = messages[2:], []
        while rest:
            action, rest = rest[0], rest[1:]
            assert action["role"] == "assistant"
            wanted = [(c["id"], c["function"]["name"]) for c in action.get("tool_calls", [])]
            answers, rest = rest[: len(wanted)], rest[len(wanted) :]
            assert [(m["tool_call_id"], m["name"]) for m in answers] == wanted
            assert {m["role"] for m in answers} <= {"tool"}
            seen += [call_id for call_id, _ in wanted]
            if not wanted:
                assert not rest, "only the last message may lack tool calls"
        assert len(seen) == len(set(seen))

    def test_calls_use_the_three_tools_with_their_arguments(self, record: Record) -> None:
        for message in record["messages"]:
            for name, arguments in calls(message):
                assert {key: type(value) for key, value in arguments.items()} == ARGUMENTS[name]

    def test_outcome_agrees_with_the_final_answer(self, record: Record) -> None:
        last = record["messages"][-1]
        if record["id"] == "bell-cut-off":
            assert last["role"] == "tool"
            assert record["reward"] == 0
            return
        (given,) = FINAL.findall(last["content"])
        assert record["reward"] == int(given in accepted(record))

    def test_open_and_find_show_what_the_documents_say(self, record: Record) -> None:
        results: list[str] = []
        page: list[str] = []
        observations = {m["tool_call_id"]: m["content"] for m in record["messages"] if m["role"] == "tool"}
        for message in record["messages"]:
            for call, (name, arguments) in zip(message.get("tool_calls", []), calls(message), strict=True):
                lines = observations[call["id"]].splitlines()
                if name == "browser.search":
                    results = [title for _, title, _ in RESULT.findall(observations[call["id"]])]
                    assert results
                elif name == "browser.open":
                    assert lines[0] == results[arguments["id"]]
                    page = lines[1:]
                else:
                    matches = [line for line in page if arguments["pattern"] in line]
                    assert [line for line in lines if re.match(r"L\d+: ", line)] == matches

    def test_sites_are_of_the_reserved_domain(self, record: Record) -> None:
        for message in record["messages"]:
            for _, _, url in RESULT.findall(message["content"] or ""):
                assert url.split("/")[0].endswith(".example")
