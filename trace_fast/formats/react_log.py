"""Plain-text ReAct logs: where one rollout of a file begins and the next one ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trace_fast.errors import RolloutError
from trace_fast.formats.limits import Limits
from trace_fast.formats.strict_json import not_utf8, oversize

_START = b"Question:"


def split_logs(lines: Iterable[bytes | None], limits: Limits) -> Iterator[tuple[int, str | RolloutError]]:
    """Yields ``(line number, log)``; a log runs from a line that begins ``Question:`` to the next such line.

    Lines before the first ``Question:`` are a log of their own when they hold more than white space (the reader
    of ReAct text then decides). ``lines`` holds None for a line beyond the limits.
    """
    start = 1
    pieces: list[bytes] = []
    size = 0
    too_long = False
    for number, line in enumerate(lines, start=1):
        if line is not None and line.startswith(_START):
            if too_long or any(piece.strip() for piece in pieces):
                yield start, _log(pieces, too_long, limits)
            start, pieces, size, too_long = number, [], 0, False
        size += 0 if line is None else len(line)
        too_long = too_long or line is None or size > limits.max_record_bytes
        if too_long:
            pieces.clear()
        elif line is not None:
            if not pieces and not line.strip():
                start = number + 1  # blank lines before a log do not count as its beginning
                continue
            pieces.append(line)
    if too_long or any(piece.strip() for piece in pieces):
        yield start, _log(pieces, too_long, limits)


def _log(pieces: list[bytes], too_long: bool, limits: Limits) -> str | RolloutError:
    if too_long:
        return RolloutError("parse", oversize(limits))
    raw = b"".join(pieces)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return RolloutError("parse", not_utf8(raw, error))
