"""One row a rollout and method: what is written to ``rows.jsonl``, drawn and printed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from trace_fast.errors import OutputError

GROWTH_TARGET = 0.10
Numbers = Literal["right", "differ", "failed", "absent"]


class Row(BaseModel):
    """One method on one rollout.

    ``numbers``: ``right``, ``differ`` (beyond the rule of ``trace_fast.bench.rule``), ``failed`` (it raised) or
    ``absent`` (it cannot run here); ``reason`` says why for the last two. Seconds, memory and what follows from them
    exist only where numbers are right. Errors are against float64, in nats. ``flops`` are those of the distinct tokens,
    the same for every method, so that ``fraction_of_gemm_roofline`` = flops / gemm rate / seconds compares them.
    ``added_by_doubled_turns`` is what this row's time adds to that of the same method on half its turns and as many
    distinct tokens, measured before it in the same run (0.1: a tenth more); it should stay below ``GROWTH_TARGET``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    date: str
    machine: str
    python: str
    torch: str
    transformers: str
    triton: str
    trace_fast: str
    commit: str
    model: str
    backend: str
    dtype: str
    gemm_gflops: float
    rollout: str
    turns: int
    states: int
    tokens_trunk: int
    tokens_unique: int
    tokens_naive: int
    flops: float
    method: str
    numbers: Numbers
    yardstick: str | None = None
    reason: str | None = None
    mean_abs_error: float | None = None
    max_abs_error: float | None = None
    first_seconds: float | None = None
    seconds: float | None = None
    runs: list[float] | None = None
    speedup_over_kv_cache: float | None = None
    peak_extra_bytes: int | None = None
    fraction_of_gemm_roofline: float | None = None
    added_by_doubled_turns: float | None = None

    @model_validator(mode="after")
    def _no_speed_for_wrong_numbers(self) -> Row:
        speeds = (
            self.seconds,
            self.runs,
            self.first_seconds,
            self.speedup_over_kv_cache,
            self.peak_extra_bytes,
            self.fraction_of_gemm_roofline,
            self.added_by_doubled_turns,
        )
        if self.numbers != "right" and any(value is not None for value in speeds):
            raise ValueError(f"{self.method}: numbers are {self.numbers!r}, so no speed may be reported")
        return self

    def to_json(self) -> str:
        """One line; keys without a value are left out."""
        return json.dumps(self.model_dump(exclude_none=True), allow_nan=False)


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Adds lines to a file. Raises ``OutputError`` where that is impossible."""
    append_json(path, (row.to_json() for row in rows))


def append_json(path: Path, lines: Iterable[str]) -> None:
    """As ``append_rows``, for lines that are JSON already."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as out:
            out.writelines(line + "\n" for line in lines)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file as plain dictionaries (older files may lack newer keys)."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
