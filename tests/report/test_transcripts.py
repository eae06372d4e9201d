"""Texts under a byte budget: whole while they fit, else one cap for all."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from trace_fast.report.text import embed_json
from trace_fast.report.transcripts import CutSummary, TranscriptStore, even_cap


def size(text: str) -> int:
    return len(embed_json(text).encode()) - 2


def test_everything_stays_while_it_fits() -> None:
    store = TranscriptStore(1000)
    store.add([("tool", 0, "search", "a<b"), ("assistant", 1, None, "done")])
    assert store.finish(1000) == CutSummary(segments=2, cut_segments=0, total_chars=7, kept_chars=7)
    assert [json.loads(text) for text in store.embedded()] == [
        [["tool", 0, "search", "a<b", "", 0], ["assistant", 1, None, "done", "", 0]]
    ]


def test_cap_is_the_same_for_all_and_short_texts_stay_whole() -> None:
    assert even_cap([10, 100, 1000], 1110) is None
    assert even_cap([10, 100, 1000], 500) == 390
    assert even_cap([10, 100, 1000], 150) == 70
    assert even_cap([5, 5], 4) == 2
    assert even_cap([], 0) is None


def test_cut_keeps_head_and_tail_and_counts_the_rest() -> None:
    store = TranscriptStore(1000)
    store.add([("tool", 0, None, "a" * 500 + "b" * 500), ("tool", 1, None, "short")])
    assert store.finish(95) == CutSummary(segments=2, cut_segments=1, total_chars=1005, kept_chars=95)
    [[long, short]] = [json.loads(text) for text in store.embedded()]
    assert long == ["tool", 0, None, "a" * 60, "b" * 30, 910]
    assert short == ["tool", 1, None, "short", "", 0]


def test_cutting_on_the_way_ends_where_cutting_once_does() -> None:
    texts = ["x" * 700 + "y" * 300] * 40
    once, streamed = TranscriptStore(10**6), TranscriptStore(4000)
    for text in texts:
        once.add([("tool", 0, None, text)])
        streamed.add([("tool", 0, None, text)])
    assert streamed.finish(4000) == once.finish(4000)
    assert streamed.embedded() == once.embedded()
    assert json.loads(once.embedded()[0]) == [["tool", 0, None, "x" * 67, "y" * 33, 900]]


def test_no_budget_leaves_no_text_and_says_so() -> None:
    store = TranscriptStore(-5)
    store.add([("tool", 0, None, "abc")])
    assert store.finish(-5) == CutSummary(segments=1, cut_segments=1, total_chars=3, kept_chars=0)


@given(st.lists(st.text(max_size=60), max_size=8), st.integers(0, 200))
def test_kept_text_fits_and_adds_up(texts: list[str], budget: int) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    store = TranscriptStore(budget)
    for text in texts:
        store.add([("tool", 0, None, text)])
    store.finish(budget)
    rows = [json.loads(document)[0] for document in store.embedded()]
    assert sum(size(head) + size(tail) for *_, head, tail, _ in rows) <= budget
    for text, (*_, head, tail, omitted) in zip(texts, rows, strict=True):
        assert text.startswith(head)
        assert text.endswith(tail)
        assert len(head) + omitted + len(tail) == len(text)
        assert omitted > 0 or head == text
