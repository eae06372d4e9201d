"""SIGTERM and SIGINT as a wish to stop, which training looks at between phases and between the turns of rollouts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SAME_WISH_S = 5.0  # a terminal, a scheduler and a launcher may each pass on one Ctrl-C


class StopSignal:
    """Within the ``with`` block the first signal is noted; one that comes later than ``SAME_WISH_S`` behind it ends the
    process as usual.

    Args:
        clock: seconds, monotonic.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.requested = False
        self._clock = clock
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        if not self.requested:
            self.requested, self._since = True, now
        elif now - self._since > SAME_WISH_S:
            signal.signal(number, self._before[signal.Signals(number)])
            signal.raise_signal(number)
