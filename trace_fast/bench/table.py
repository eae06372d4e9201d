"""Rows as people read them: a table, and what more turns cost at the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from trace_fast.bench.rows import GROWTH_TARGET, Row
from trace_fast.cli_terminal import printable


def table_of(rows: Iterable[Row]) -> Table:
    """One line a rollout and method; no speed where numbers are not right."""
    table = Table(pad_edge=False)
    for name in ("rollout", "dtype", "method"):
        table.add_column(name, overflow="fold")
    for name in ("seconds", "x kv_cache", "of GEMM roof", "extra MB", "mean |error|", "max |error|"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            _speed(row),
            _cell(row.speedup_over_kv_cache, "{:.2f}"),
            _cell(row.fraction_of_gemm_roofline, "{:.0%}"),
            _cell(None if row.peak_extra_bytes is None else row.peak_extra_bytes / 1e6, "{:,.0f}"),
            _cell(row.mean_abs_error, "{:.1e}"),
            _cell(row.max_abs_error, "{:.1e}"),
        ]
        table.add_row(Text(printable(row.rollout, 40)), row.dtype, row.method, *cells)
    return table


def _speed(row: Row) -> str:
    if row.seconds is not None:
        return f"{row.seconds:.3g}"
    return {"differ": "numbers differ", "failed": "failed", "absent": "not run"}[row.numbers]


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def growth_lines(rows: Sequence[Row]) -> list[str]:
    """For every method: what doubling the turns adds to its time, at equal trunk tokens and at equal distinct ones."""
    times = {(r.method, r.dtype, r.tokens_trunk, r.turns): r.seconds for r in rows if r.seconds is not None}
    lines = []
    for (method, dtype, tokens, turns), seconds in times.items():
        doubled = times.get((method, dtype, tokens, 2 * turns))
        if turns and doubled is not None:
            added = doubled / seconds - 1
            lines.append(f"{method}, {dtype}, {tokens:,} trunk tokens: {turns} -> {2 * turns} turns {added:+.1%} time")
    for row in rows:
        if row.added_by_doubled_turns is not None:
            turned = f"{row.turns // 2} -> {row.turns} turns {row.added_by_doubled_turns:+.1%} time"
            told = f"{row.method}, {row.dtype}, {row.tokens_unique:,} tokens with branches: {turned}"
            if row.method == "trace_fast":
                met = "met" if row.added_by_doubled_turns < GROWTH_TARGET else "MISSED"
                told += f" (target below {GROWTH_TARGET:+.0%}: {met})"
            lines.append(told)
    return lines
