"""SIGTERM and SIGINT as a wish to stop that the training loop looks at between phases."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """Within the ``with`` block the first signal is noted; a second one ends the process as usual."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(number, self._before[signal.Signals(number)])
