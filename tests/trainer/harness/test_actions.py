"""Every row of the table in ``actions``: what the policy wrote and what comes of it, in both parsers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_fast.trainer.harness.actions import ActionParser, Answer, Invalid, Nothing, Parsed, split_reasoning
from trace_fast.trainer.harness.call_formats import Call, CallFormat

OBJECT = '{"name": "browser.search", "arguments": {"query": "x"}}'
PYTHON = "{'name': 'browser.search', 'arguments': {'query': 'x'}}"
TAGGED = f"<tool_call>\n{OBJECT}\n</tool_call>"
CALL = Call("browser.search", {"query": "x"})
OTHER = '<tool_call>{"name": "browser.open", "arguments": {"id": 1}}</tool_call>'
FUNCTION = "<tool_call>\n<function=browser.search>\n<parameter=query>\nx\n</parameter>\n</function>\n</tool_call>"


def _parse(text: str, repair: bool, call_format: CallFormat = "json_tag", opened: bool = False) -> Parsed:
    return ActionParser(call_format, repair=repair, thinking_open=opened).parse(text)


ROWS: list[tuple[str, Any, Any, tuple[str, ...]]] = [
    # what was written, strict, repair, repairs
    (TAGGED, CALL, CALL, ()),
    (f"<think>\nlet me see\n</think>\n\n{TAGGED}", CALL, CALL, ()),
    (f"I search. {TAGGED}\n ", CALL, CALL, ()),
    ("<answer> Bern </answer>", Answer("Bern", True), Answer("Bern", True), ()),
    ("<think>a</think><answer>B</answer> or <answer>C</answer>", Answer("C", True), Answer("C", True), ()),
    ("<answer></answer>", Answer("", False), Answer("", False), ()),
    ("<answer>Bern", Nothing(), Answer("Bern", False), ("unclosed_answer",)),
    ("<think><answer>Bern</answer></think>", Nothing(), Nothing(), ()),
    (f"<think>{TAGGED}</think>\nI called.", "call_in_reasoning", CALL, ("call_in_reasoning",)),
    (f"<think>{OTHER}{TAGGED}", "call_in_reasoning", CALL, ("call_in_reasoning",)),
    ("<think>never closed <answer>Bern</answer>", Nothing(), Nothing(), ()),
    (f"{TAGGED}\n{OTHER}", "several_calls", CALL, ("several_calls",)),
    (f"<tool_call>{OBJECT}\n{OBJECT}</tool_call>", "several_calls", CALL, ("several_calls",)),
    (f"<tool_call>{OBJECT}, {OBJECT}</tool_call>", "several_calls", CALL, ("several_calls",)),
    (f"{TAGGED}<answer>Bern</answer>", "call_and_answer", CALL, ("call_and_answer",)),
    (f"<answer>Bern</answer>{TAGGED}", "call_and_answer", CALL, ("call_and_answer",)),
    (f"{TAGGED}\n<tool_response>made up</tool_response>", "text_after_call", CALL, ("text_after_call",)),
    (f"<tool_call>{OBJECT}", "unclosed_call", CALL, ("unclosed_call",)),
    (f"<tool_call>{PYTHON}</tool_call>", "malformed_call", CALL, ("json",)),
    (f"<tool_call>{OBJECT[:-1]}</tool_call>", "malformed_call", CALL, ("json",)),
    (f"<tool_call>{OBJECT}}}</tool_call>", "malformed_call", CALL, ("json",)),
    (f"<tool_call>{OBJECT[:-3]}", "malformed_call", CALL, ("json", "unclosed_call")),
    (f"<tool_call>```json\n{OBJECT}\n```</tool_call>", "malformed_call", CALL, ("json",)),
    (TAGGED.replace('"x"', '"x",'), "malformed_call", CALL, ("json",)),
    (TAGGED.replace("arguments", "parameters"), "malformed_call", CALL, ("shape",)),
    ('<tool_call>{"name": "browser.search", "arguments": "{\\"query\\": \\"x\\"}"}</tool_call>', "malformed_call", CALL,
     ("shape",)),
    (f'<tool_call>{{"type": "function", "function": {OBJECT}}}</tool_call>', "malformed_call", CALL, ("shape",)),
    ("<tool_call>search for x</tool_call>", "malformed_call", "malformed_call", ()),
    ("<tool_call></tool_call>", "malformed_call", "malformed_call", ()),
    ("<tool_call>[1]</tool_call>", "malformed_call", "malformed_call", ()),
    ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "malformed_call", "malformed_call", ()),
    ('<tool_call>{"name": "a", "name": "b", "arguments": {}}</tool_call>', "malformed_call", Call("b", {}), ("json",)),
    ("<tool_call>" + "[" * 5000, "malformed_call", "malformed_call", ()),
    ("<tool_call>" + '{"a":' * 5000 + "</tool_call>", "malformed_call", "malformed_call", ()),
    ('<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>', Call("search", {"query": "x"}), CALL,
     ("tool_name",)),
    ('<tool_call>{"name": "browser.open", "arguments": {"id": "1"}}</tool_call>', Call("browser.open", {"id": "1"}),
     Call("browser.open", {"id": 1}), ("argument_type",)),
    ('<tool_call>{"name": "nothing", "arguments": {}}</tool_call>', Call("nothing", {}), Call("nothing", {}), ()),
    ('<tool_call>{"name": "browser.search", "arguments": {"query": "</tool_call><answer>"}}</tool_call>',
     Call("browser.search", {"query": "</tool_call><answer>"}),
     Call("browser.search", {"query": "</tool_call><answer>"}), ()),
    ("", Nothing(), Nothing(), ()),
    ("The answer is Bern.", Nothing(), Nothing(), ()),
]  # fmt: skip


def _outcome(parsed: Parsed) -> Any:
    return parsed.action.kind if isinstance(parsed.action, Invalid) else parsed.action


@pytest.mark.parametrize(("text", "strict", "mended", "repairs"), ROWS)
def test_every_row_of_the_table(text: str, strict: Any, mended: Any, repairs: tuple[str, ...]) -> None:
    parsed = _parse(text, repair=False)
    assert _outcome(parsed) == strict
    assert parsed.repairs == ()
    parsed = _parse(text, repair=True)
    assert _outcome(parsed) == mended
    assert parsed.repairs == repairs


@pytest.mark.parametrize("repair", [False, True])
def test_the_templates_own_formats(repair: bool) -> None:
    function = f"thinking aloud\n{FUNCTION}"
    assert _parse(function, repair, "function_tag") == Parsed(CALL)
    bare = '{"name": "browser.search", "parameters": {"query": "x"}}'
    assert _parse(bare, repair, "bare_json") == Parsed(CALL)
    assert _parse("<answer>{}</answer>", repair, "bare_json") == Parsed(Answer("{}", True))


def test_values_between_tags_get_the_schemas_type() -> None:
    text = (
        "<tool_call><function=browser.open><parameter=id>\n2\n</parameter>\n<parameter=loc>x</parameter>"
        "</function></tool_call>"
    )
    assert _parse(text, False, "function_tag").action == Call("browser.open", {"id": 2, "loc": "x"})
    lines = FUNCTION.replace("\nx\n", "\n1\n2\n")
    assert _parse(lines, False, "function_tag").action == Call("browser.search", {"query": "1\n2"})


@pytest.mark.parametrize(
    ("text", "call_format", "kind"),
    [
        (FUNCTION + FUNCTION, "function_tag", "several_calls"),
        (FUNCTION.replace("</parameter>", ""), "function_tag", "malformed_call"),
        (FUNCTION.replace("\n</tool_call>", ""), "function_tag", "unclosed_call"),
        (FUNCTION.replace("<parameter=query>", "<parameter=query>a</parameter><parameter=query>"), "function_tag",
         "malformed_call"),
        ('{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', "bare_json", "several_calls"),
        ('{"name": "a", "parameters": {}} and so on', "bare_json", "malformed_call"),
        ('{"name": "a"', "bare_json", "malformed_call"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_the_templates_own_formats(text: str, call_format: CallFormat, kind: str) -> None:
    assert _outcome(_parse(text, False, call_format)) == kind


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("<think>a</think>b", False, ("a", "b")),
        ("\n<think>a</think>b</think>c", False, ("a", "b</think>c")),
        ("a</think>b", True, ("a", "b")),
        ("a", True, ("a", "")),
        ("a</think>b", False, ("a", "b")),
        ("a <think>b</think>c", False, ("", "a <think>b</think>c")),
        ("a", False, ("", "a")),
    ],
)
def test_reasoning_is_what_a_message_begins_with(text: str, opened: bool, parts: tuple[str, str]) -> None:
    assert split_reasoning(text, opened) == parts


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "<answer>", "</answer>", OBJECT, "{", "}", '"', "\\", "[",
     "'", "<function=", "x", ">", "\n", ",", "name", ":", "<parameter=q>", "</parameter>", "</function>"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=14).map("".join), st.sampled_from(["json_tag", "function_tag", "bare_json"]))
def test_no_text_raises_and_what_strict_accepts_is_the_same_mended(text: str, call_format: CallFormat) -> None:
    strict, mended = _parse(text, False, call_format), _parse(text, True, call_format)
    if isinstance(strict.action, Answer) or strict.action == CALL:
        assert mended == strict
