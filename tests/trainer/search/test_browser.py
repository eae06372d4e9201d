"""The browser: its three tools, the state between calls, and everything a policy can get wrong."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_fast.errors import ConfigError
from trace_fast.trainer.search import Browser, Document, SearchError, SearchIndex, tool_schemas
from trace_fast.trainer.search.bm25 import Bm25Retriever
from trace_fast.trainer.search.index import Hit

LONG = "\n".join(f"row {n} holds {n * n}" for n in range(200))


def _count(text: str) -> int:
    return len(text.split())


def _browser(documents: list[Document], budget: int = 200) -> Browser:
    index = SearchIndex(documents, Bm25Retriever.build(f"{d.title}\n{d.text}" for d in documents))
    return Browser(index, observation_tokens=budget, count_tokens=_count)


@pytest.fixture
def browser(documents: list[Document]) -> Browser:
    return _browser([*documents, Document("long", "https://zoo/long", "Long", LONG)])


def _call(browser: Browser, tool: str, **arguments: Any) -> str:
    observation = browser.call(f"browser.{tool}", arguments)
    assert not observation.error, observation.text
    return observation.text


def _error(browser: Browser, tool: str, **arguments: Any) -> str:
    observation = browser.call(f"browser.{tool}", arguments)
    assert observation.error, observation.text
    assert observation.text.startswith("Error: ")
    return observation.text


def test_search_lists_titles_addresses_and_summaries(browser: Browser) -> None:
    assert _call(browser, "search", query="the camel", topn=1) == (
        "Results for 'the camel':\n[0] Camel\n    https://zoo/camel\n    The camel lives here. It eats at 5 p.m."
    )


def test_search_lists_ten_documents_by_default(browser: Browser) -> None:
    many = [Document(str(n), f"u/{n}", f"T{n}", "same words") for n in range(12)]
    assert _call(_browser(many), "search", query="words").count("\n[") == 10
    assert _call(_browser(many), "search", query="words", topn=3).count("\n[") == 3


def test_open_shows_numbered_lines_of_a_result(browser: Browser) -> None:
    _call(browser, "search", query="camel eagle", topn=2)
    assert _call(browser, "open", id=0, loc=0) == (
        "Camel\nhttps://zoo/camel\npage 0, 2 lines\n0: The camel lives here.\n1: It eats at 5 p.m."
    )


def test_open_of_a_result_begins_at_the_passage_that_matches(browser: Browser) -> None:
    _call(browser, "search", query="holds 1600")
    shown = _call(browser, "open", id=0, num_lines=2).splitlines()
    assert shown[3:] == ["40: row 40 holds 1600", "41: row 41 holds 1681"]
    assert _call(browser, "open", id=0, loc=7, num_lines=1).splitlines()[3:] == ["7: row 7 holds 49"]


def test_open_without_id_moves_within_the_page_and_minus_one_is_its_top(browser: Browser) -> None:
    _call(browser, "search", query="holds 1600")
    _call(browser, "open", id=0)
    assert _call(browser, "open", loc=199).splitlines()[3:] == ["199: row 199 holds 39601"]
    assert _call(browser, "open", num_lines=1).splitlines()[3:] == ["0: row 0 holds 0"]


def test_cursors_stay_with_their_documents(browser: Browser) -> None:
    _call(browser, "search", query="camel")
    assert "page 0, 2 lines" in _call(browser, "open", id=0)
    _call(browser, "search", query="eagle")
    assert "page 1, 2 lines" in _call(browser, "open", id=0)
    _call(browser, "search", query="camel")
    assert "page 0, 2 lines" in _call(browser, "open", id=0)
    assert _call(browser, "find", pattern="lives") == "1 line has 'lives' on page 0:\n0: The camel lives here."
    assert _call(browser, "find", pattern="lives", cursor=1).endswith("0: The eagle lives here.")
    assert _call(browser, "open").startswith("Eagle\n")


def test_ids_are_those_of_the_last_search(browser: Browser) -> None:
    _call(browser, "search", query="camel")
    _call(browser, "search", query="zebra")
    assert "the last search found 0 documents, got 0" in _error(browser, "open", id=0)


def test_find_says_where_and_also_when_there_is_nothing(browser: Browser) -> None:
    _call(browser, "search", query="holds 1600")
    _call(browser, "open", id=0)
    found = "\n".join(f"{n}: row {n} holds {n * n}" for n in range(200) if " 100" in f"row {n} holds {n * n}")
    assert _call(browser, "find", pattern=" 100") == f"{found.count('row')} lines have ' 100' on page 0:\n{found}"
    assert _call(browser, "find", pattern="Row") == "No line of page 0 has 'Row'."
    assert _call(browser, "find", pattern="row.1") == "No line of page 0 has 'row.1'."


def test_the_document_of_a_call_is_named(browser: Browser) -> None:
    _call(browser, "search", query="camel")
    assert browser.call("browser.open", {"id": 0}).docid == "d1"
    assert browser.call("browser.find", {"pattern": "x"}).docid == "d1"
    assert browser.call("browser.search", {"query": "x"}).docid is None


@pytest.mark.parametrize(
    ("tool", "arguments", "reason"),
    [
        ("search", {}, "the argument query is missing"),
        ("search", {"query": 3}, "query: expected text that is not blank, got 3"),
        ("search", {"query": " "}, "query: expected text that is not blank"),
        ("search", {"query": "a", "topn": 0}, "topn: expected an integer in 1..50, got 0"),
        ("search", {"query": "a", "topn": True}, "topn: expected an integer in 1..50, got True"),
        ("search", {"query": "a", "topn": 2.0}, "topn: expected an integer in 1..50, got 2.0"),
        ("search", {"query": "a", "topn": "3"}, "got '3'"),
        ("search", {"query": "a", "n": 3}, "unknown argument 'n'; it takes query, topn"),
        ("open", {"id": 0}, "nothing was searched yet"),
        ("open", {}, "no page is open"),
        ("open", {"id": -2}, "id: expected an integer of at least -1, got -2"),
        ("find", {"pattern": "a"}, "no page is open"),
        ("find", {"pattern": "a", "cursor": 10**400}, "no page is open"),
        ("close", {}, "unknown tool 'browser.close'; the tools are browser.search, browser.open, browser.find"),
    ],
)
def test_wrong_calls_are_observations(browser: Browser, tool: str, arguments: Any, reason: str) -> None:
    assert reason in _error(browser, tool, **arguments)


@pytest.mark.parametrize("arguments", [None, "text", [1], 7])
def test_arguments_that_are_no_object_are_observations(browser: Browser, arguments: Any) -> None:
    observation = browser.call("browser.search", arguments)
    assert observation.error
    assert "arguments: expected an object" in observation.text


def test_a_wrong_call_changes_nothing(browser: Browser) -> None:
    _call(browser, "search", query="camel")
    shown = _call(browser, "open", id=0, loc=0)
    assert "id: the last search found 1 documents, got 5" in _error(browser, "open", id=5)
    assert "loc: the page has lines 0..1, got 2" in _error(browser, "open", loc=2)
    assert "num_lines: expected -1 or at least 1, got 0" in _error(browser, "open", num_lines=0)
    assert "cursor: the pages opened are 0..0, got 1" in _error(browser, "find", pattern="a", cursor=1)
    _error(browser, "search", query="")
    assert _call(browser, "open") == shown


def test_an_empty_document_can_be_opened() -> None:
    browser = _browser([Document("e", "u", "Empty page", "")])
    _call(browser, "search", query="empty")
    assert _call(browser, "open", id=0) == "Empty page\nu\npage 0, 0 lines"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["browser.search", "browser.open", "browser.find", "browser", ""]),
            st.one_of(
                st.dictionaries(
                    st.sampled_from(["query", "topn", "id", "loc", "num_lines", "pattern", "cursor", "x"]),
                    st.one_of(st.integers(-2, 60), st.text(max_size=8), st.none(), st.sampled_from(["row", "camel"])),
                    max_size=3,
                ),
                st.none(),
            ),
        ),
        max_size=12,
    )
)
def test_no_sequence_of_calls_raises_or_outgrows_the_budget(calls: list[tuple[str, Any]]) -> None:
    documents = [Document("a", "u", "Row camel", LONG), Document("b", "u", "", "camel " * 300)]
    browser = _browser(documents, 64)
    for name, arguments in calls:
        observation = browser.call(name, arguments)
        assert _count(observation.text) <= 64
        assert observation.text


def test_a_budget_too_small_is_refused(documents: list[Document]) -> None:
    with pytest.raises(ConfigError, match="observation_tokens: expected at least 64, got 63"):
        _browser(documents, 63)


def test_a_search_that_fails_is_an_observation_and_the_next_one_works() -> None:
    class Limited:
        calls = 0

        def search(self, query: str, topn: int) -> list[Hit]:
            self.calls += 1
            if self.calls == 2:
                raise SearchError("too many requests")
            return [Hit(Document("a", "u", "A", "text"), 1.0)]

    browser = Browser(Limited(), observation_tokens=64, count_tokens=_count)
    _call(browser, "search", query="x")
    assert _error(browser, "search", query="y") == "Error: browser.search: the search failed: too many requests"
    assert _call(browser, "open", id=0).startswith("A\n")  # the results before it are still there
    assert _call(browser, "search", query="z").startswith("Results for 'z'")


def test_schemas_are_the_callers_own_to_change() -> None:
    tool_schemas()[0]["function"]["name"] = "changed"
    assert [tool["function"]["name"] for tool in tool_schemas()] == ["browser.search", "browser.open", "browser.find"]
