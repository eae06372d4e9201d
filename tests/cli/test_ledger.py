"""What was read and is not yet written: input order, strict mode, and no cost for what waits."""

from __future__ import annotations

import time

import pytest

from trace_fast.cli_ledger import Ledger
from trace_fast.errors import RolloutError


def _error(source):
    return RolloutError("parse", "broken", source=source)


def _sources(errors):
    return [error.source for error in errors]


def test_only_the_settled_head_is_taken_in_input_order():
    ledger = Ledger(strict=False)
    for source in ("a", "b", "d"):
        ledger.read(source)
        if source == "b":
            ledger.failed(_error("c"))
    ledger.scored("b", b"B")
    assert ledger.pop_ready() == ([], [])
    assert ledger.n_failed_waiting == 1
    ledger.scored("a", b"A")
    scores, errors = ledger.pop_ready()
    assert (scores, _sources(errors), ledger.n_failed_waiting) == ([b"A", b"B"], ["c"], 0)
    with pytest.raises(AssertionError, match="neither a number nor an error for d"):
        ledger.check_empty()
    ledger.scored("d", b"D")
    assert ledger.pop_ready() == ([b"D"], [])
    ledger.check_empty()


def test_strict_takes_nothing_after_the_first_failure():
    ledger = Ledger(strict=True)
    for source in ("a", "b", "c"):
        ledger.read(source)
    ledger.failed(_error("b"))
    assert ledger.stopping
    ledger.failed(_error("x"))  # was read after the stop
    ledger.scored("a", b"A")
    scores, errors = ledger.pop_ready()
    assert (scores, _sources(errors), ledger.closed) == ([b"A"], ["b"], True)
    ledger.scored("c", b"C")
    ledger.failed(_error("c"))
    assert ledger.pop_ready() == ([], [])
    assert ledger.n_failed_waiting == 0


def test_what_waits_behind_the_head_costs_nothing():
    """50,000 records that are looked at as often: a copy of all of them each time would take minutes."""
    ledger = Ledger(strict=False)
    ledger.read("head")
    started = time.process_time()
    for number in range(50_000):
        ledger.failed(_error(str(number)))
        assert ledger.pop_ready() == ([], [])
    ledger.scored("head", b"H")
    scores, errors = ledger.pop_ready()
    assert (scores, _sources(errors)) == ([b"H"], [str(number) for number in range(50_000)])
    for number in range(50_000):
        ledger.read(str(number))
    for number in range(50_000):
        ledger.scored(str(number), b"x")
        assert ledger.pop_ready() == ([b"x"], [])
    assert time.process_time() - started < 5.0
