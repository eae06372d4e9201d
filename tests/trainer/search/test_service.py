"""Many callers of one retriever: common batches, own results, nothing searched twice, no one waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from trace_fast.errors import ConfigError
from trace_fast.trainer.search import Match, QueryService, SearchError


class Recorder:
    """Finds rows ``len(query)``, ``len(query) + 1``, ...; keeps its batches; waits for ``gate``; fails where told."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.failures: list[SearchError] = []
        self.short = False

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Match]]:
        self.batches.append(list(queries))
        self.entered.set()
        assert self.gate.wait(20)
        if self.failures:
            raise self.failures.pop()
        lists = [[Match(len(query) + i, 1 / (1 + i)) for i in range(k)] for query in queries]
        return lists[1:] if self.short else lists


def _rows(matches: list[Match]) -> list[int]:
    return [match.row for match in matches]


def test_what_comes_in_while_a_batch_runs_is_one_batch() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    with QueryService(recorder, depth=5) as service, ThreadPoolExecutor(32) as callers:
        first = callers.submit(service.retrieve, ["q"], 1)
        assert recorder.entered.wait(20)
        others = {n: callers.submit(service.retrieve, ["q" * n], 2) for n in range(2, 30)}
        while len(service._running) < 29:
            threading.Event().wait(0.001)
        recorder.gate.set()
        assert _rows(first.result(20)[0]) == [1]
        for n, caller in others.items():
            assert _rows(caller.result(20)[0]) == [n, n + 1]
    assert len(recorder.batches) == 2
    assert sorted(map(len, recorder.batches[1])) == list(range(2, 30))


def test_a_query_that_is_being_searched_is_not_searched_again() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    with QueryService(recorder, cache_size=0) as service, ThreadPoolExecutor(4) as callers:
        waiting = [callers.submit(service.retrieve, ["abc"], 1)]
        assert recorder.entered.wait(20)
        waiting += [callers.submit(service.retrieve, ["abc"], n) for n in (2, 3)]
        while sum(caller.running() for caller in waiting) < 3:
            threading.Event().wait(0.001)
        threading.Event().wait(0.05)  # until both have asked: the second search, if there is one, comes after the gate
        recorder.gate.set()
        assert [_rows(caller.result(20)[0]) for caller in waiting] == [[3], [3, 4], [3, 4, 5]]
    assert recorder.batches == [["abc"]]


def test_batches_have_a_largest_size() -> None:
    recorder = Recorder()
    with QueryService(recorder, max_batch=4) as service:
        lists = service.retrieve(["x" * n for n in range(1, 11)], 1)
    assert [_rows(matches) for matches in lists] == [[n] for n in range(1, 11)]
    assert max(map(len, recorder.batches)) <= 4
    assert sum(map(len, recorder.batches)) == 10


def test_a_query_is_searched_once_however_many_ask_and_however_many_results_they_want() -> None:
    recorder = Recorder()
    with QueryService(recorder, depth=9) as service:
        assert _rows(service.retrieve(["abc"], 2)[0]) == [3, 4]
        assert _rows(service.retrieve(["abc"], 9)[0]) == list(range(3, 12))
        assert [_rows(matches) for matches in service.retrieve(["abc", "abc"], 1)] == [[3], [3]]
    assert recorder.batches == [["abc"]]


def test_the_query_used_longest_ago_leaves_the_cache_first() -> None:
    recorder = Recorder()
    with QueryService(recorder, cache_size=2) as service:
        for query in ("a", "bb", "a", "ccc", "a", "bb"):
            service.retrieve([query], 1)
    assert recorder.batches == [["a"], ["bb"], ["ccc"], ["bb"]]


def test_without_a_cache_every_query_is_searched() -> None:
    recorder = Recorder()
    with QueryService(recorder, cache_size=0) as service:
        for _ in range(3):
            service.retrieve(["a"], 1)
    assert recorder.batches == [["a"]] * 3


def test_a_failure_reaches_its_callers_and_is_not_remembered() -> None:
    recorder = Recorder()
    recorder.failures = [SearchError("rate limit")]
    with QueryService(recorder) as service:
        with pytest.raises(SearchError, match="rate limit"):
            service.retrieve(["a"], 1)
        assert _rows(service.retrieve(["a"], 1)[0]) == [1]


def test_a_retriever_that_loses_a_list_is_an_error_and_not_a_shift() -> None:
    recorder = Recorder()
    recorder.short = True
    with QueryService(recorder) as service, pytest.raises(SearchError, match="0 lists of matches for 1 queries"):
        service.retrieve(["a"], 1)


@pytest.mark.parametrize("k", [0, -1, 6])
def test_more_than_its_depth_is_refused(k: int) -> None:
    with QueryService(Recorder(), depth=5) as service, pytest.raises(ConfigError, match=r"k: expected 1\.\.5"):
        service.retrieve(["a"], k)


@pytest.mark.parametrize("setting", [{"depth": 0}, {"max_batch": 0}, {"cache_size": -1}, {"timeout_s": 0.0}])
def test_settings_below_their_least_are_refused(setting) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        QueryService(Recorder(), **setting)
