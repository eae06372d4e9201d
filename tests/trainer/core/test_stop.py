"""Signals: the first is a wish, its echoes are the same wish, a later one ends the process as usual."""

from __future__ import annotations

import signal

import pytest

from trace_fast.trainer.stop import SAME_WISH_S, StopSignal


def test_one_ctrl_c_that_arrives_twice_is_one_wish_and_a_second_one_ends() -> None:
    """A terminal sends SIGINT to the whole group, and the launcher in it passes it on to its children."""
    now = 100.0
    before = signal.getsignal(signal.SIGINT)
    with StopSignal(clock=lambda: now) as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        now += SAME_WISH_S + 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
