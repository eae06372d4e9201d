"""Pages: lines, exact search over wraps, the relevant line, budgets that cut on the edge of a line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_fast.trainer.search import Document
from trace_fast.trainer.search.pages import CUT_MARK, LINE_WIDTH, Page, cut_text, cut_to_budget

TEXT = st.text(st.sampled_from("ab cdé.\n\r\u2028 \t-"), max_size=400)


def _page(text: str) -> Page:
    return Page.of(Document("d", "u", "T", text))


def _words(text: str) -> int:
    return len(text.split())


def test_short_lines_are_kept_with_their_numbers() -> None:
    assert _page("one\n\n  three  \nfour").lines == ("one", "", "three", "four")
    assert _page("").lines == ()


@given(TEXT)
def test_wrapping_loses_no_word_and_keeps_the_width(text: str) -> None:
    page = _page(text)
    assert all(len(line) <= LINE_WIDTH for line in page.lines)
    assert "".join("".join(page.lines).split()) == "".join("".join(text.splitlines()).split())
    assert len(page.starts) == len(page.lines)
    assert list(page.first_lines) == sorted(page.first_lines)


def test_a_word_longer_than_a_line_is_cut() -> None:
    page = _page("x" * 250 + " end")
    assert page.lines == ("x" * 100, "x" * 100, "x" * 50 + " end")


def test_find_is_exact_text_and_sees_over_wraps() -> None:
    paragraph = "word " * 19 + "alpha beta gamma"
    page = _page(f"first Beta\n{paragraph}\nlast beta beta")
    assert len(page.lines) == 4
    assert "beta" not in page.lines[1]
    assert page.find("beta") == [2, 3]
    assert page.find("alpha beta") == [1]
    assert page.find("a.*a") == []
    assert page.find("word") == [1]


@given(TEXT, st.text(st.sampled_from("ab cd"), min_size=1, max_size=3))
def test_find_names_a_line_for_every_place_and_no_other(text: str, pattern: str) -> None:
    page = _page(text)
    wanted = set()
    for number, paragraph in enumerate(text.splitlines()):
        first = page.first_lines[number]
        after = page.first_lines[number + 1] if number + 1 < len(page.first_lines) else len(page.lines)
        for at in range(len(paragraph)):
            if paragraph[at:].startswith(pattern):
                begun = [line for line in range(first, after) if page.starts[line] <= at]
                wanted.add(begun[-1] if begun else first)
    assert page.find(pattern) == sorted(wanted)


def test_relevant_line_prefers_rare_words_and_then_the_earlier_line() -> None:
    page = _page("the river\nthe city\nthe river Aare\nthe Aare")
    assert page.relevant_line("the river") == 0
    assert page.relevant_line("the Aare") == 2
    assert page.relevant_line("the river AARE") == 2
    assert page.relevant_line("nothing of this") == 0
    assert _page("").relevant_line("x") == 0


@given(st.lists(st.text(st.sampled_from("ab c"), max_size=30), max_size=12), st.integers(4, 40))
def test_a_budget_cuts_on_a_line_edge_and_takes_all_that_fits(lines: list[str], budget: int) -> None:
    text, taken = cut_to_budget("the head", lines, budget, _words)
    assert _words(text) <= budget
    if not text.endswith(CUT_MARK):
        assert text == "\n".join(["the head", *lines[:taken]])
        assert taken == len(lines) or _words("\n".join(["the head", *lines[: taken + 1]])) > budget
    else:
        assert taken == 1
        assert _words(f"the head\n{lines[0]}") > budget


@pytest.mark.parametrize("budget", [5, 17, 64])
def test_text_is_cut_to_the_last_character_that_fits(budget: int) -> None:
    text = "0123456789" * 30
    cut = cut_text(text, budget + len(CUT_MARK), len)
    assert cut == text[:budget] + CUT_MARK
    assert cut_text("short", 5, len) == "short"
