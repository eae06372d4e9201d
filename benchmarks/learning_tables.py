"""Table and plots of the learning curves, made from the committed rows alone.

``benchmarks/results/learning_curves.jsonl`` has a row a run, ``learning_curves.md`` the table, and
``learning_curves_<figure>.svg`` success and turns against steps.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from trace_fast.atomic_write import write_atomically
from trace_fast.bench.plots import SETTINGS
from trace_fast.bench.rows import read_rows

RESULTS = Path(__file__).resolve().parent / "results"
ROWS = "learning_curves.jsonl"
TABLE = "learning_curves.md"
FIGURES = ("algorithms", "forms", "horizons", "answers", "updates")
COLUMNS = (
    "run",
    "seeds",
    "success before",
    "final success",
    "lowest–highest",
    "final at 1 / 2 / 3 hops",
    "steps to GRPO's final",
    "turns before",
    "final turns",
    "step (s)",
    "scoring",
)
Row = dict[str, Any]


def add_rows(rows: Sequence[Row], results: Path = RESULTS) -> None:
    """Puts rows in the place of older ones of the same run and seed; others stay."""
    path = results / ROWS
    new = {(row["run"], row["seed"]) for row in rows}
    kept = [row for row in (read_rows(path) if path.exists() else []) if (row["run"], row["seed"]) not in new]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in [*kept, *rows]))


def write_results(results: Path = RESULTS) -> None:
    """Writes table and plots."""
    rows = read_rows(results / ROWS)
    write_atomically(results / TABLE, table(rows))
    for figure in FIGURES:
        drawn = [row for row in rows if figure in row["figures"]]
        if drawn:
            plot(drawn, results / f"learning_curves_{figure}.svg")


def table(rows: Sequence[Row]) -> str:
    """Markdown: what was measured, and a line a run's name."""
    target = statistics.fmean(map(final, grpo)) if (grpo := [row for row in rows if row["run"] == "GRPO"]) else None
    named = {name: [row for row in rows if row["run"] == name] for name in dict.fromkeys(row["run"] for row in rows)}
    lines = [
        "# Learning curves on docworld",
        "",
        f"Printed by `make learning-curves` from `{ROWS}`. {caption(rows)}",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
        *(f"| {' | '.join(cells(name, own, target))} |" for name, own in named.items()),
    ]
    return "\n".join(lines) + "\n"


def caption(rows: Sequence[Row]) -> str:
    """What the figures are, in sentences."""
    first = rows[0]
    n, by_hops = first["questions"], first["questions_by_hops"]
    best = max(map(final, rows))
    error = math.sqrt(best * (1 - best) / n)
    return (
        f"{first['steps']} steps of {first['rollouts_a_step']} rollouts and one update; '2 updates' takes the same "
        "rollouts in two halves; 'whole answers' gives answer tokens the whole outcome advantage instead of about 0.05 "
        f"of it. Success: of one sampled rollout on each of "
        f"{n} held-out questions ({' / '.join(map(str, by_hops.values()))} of {' / '.join(by_hops)} hops); the "
        f"standard error of one evaluation is up to {error:.3f}. Final: the mean of the last two evaluations. "
        "Seeds are of training, all from one base policy and world. Steps to GRPO's final: the first of two "
        "evaluations in a row that both reach the mean final success of the GRPO runs. Seconds are medians of a step "
        f"without evaluation, on one thread, {first['jobs']} runs at a time; scoring is its share of them. "
        f"{_all(rows, 'date', lambda date: date[:10])}; {_all(rows, 'machine')}; torch {_all(rows, 'torch')}; commit "
        f"{_all(rows, 'commit')}."
    )


def cells(name: str, own: Sequence[Row], target: float | None) -> list[str]:
    finals = [final(row) for row in own]
    reached = [steps_to(row, target) for row in own] if target is not None else []
    return [
        name,
        str(len(own)),
        f"{statistics.fmean(row['success'][0] for row in own):.3f}",
        f"{statistics.fmean(finals):.3f}",
        f"{min(finals):.3f}–{max(finals):.3f}" if len(own) > 1 else "–",
        " / ".join(f"{final_at(own, hops):.3f}" for hops in sorted(own[0]["success_by_hops"])),
        ", ".join("never" if step is None else str(step) for step in reached) or "–",
        f"{statistics.fmean(row['turns'][0] for row in own):.2f}",
        f"{statistics.fmean(x for row in own for x in row['turns'][-2:]):.2f}",
        f"{statistics.fmean(row['seconds']['step'] for row in own):.1f}",
        f"{statistics.fmean(row['scoring_share'] for row in own):.1%}",
    ]


def final(row: Row) -> float:
    """Success at the end: the mean of the last two evaluations."""
    return statistics.fmean(row["success"][-2:])


def final_at(rows: Sequence[Row], hops: str) -> float:
    """Final success, over seeds, on the questions of so many hops."""
    return statistics.fmean(value for row in rows for value in row["success_by_hops"][hops][-2:])


def steps_to(row: Row, target: float) -> int | None:
    """The first of two evaluations in a row, after the start, that both reach the target: one alone may be luck."""
    trained = list(zip(row["evaluated"], row["success"], strict=True))[1:]
    return next((step for (step, now), (_, then) in pairwise(trained) if min(now, then) >= target), None)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Success and turns against steps: the mean over seeds, and their range as a band. Needs matplotlib (see
    ``why_no_plots``)."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(SETTINGS):
        canvas = Figure(figsize=(9, 3.4), layout="constrained")
        axes = canvas.subplots(1, 2)
        for name in dict.fromkeys(row["run"] for row in rows):
            own = [row for row in rows if row["run"] == name]
            for axis, key in zip(axes, ("success", "turns"), strict=True):
                columns = list(zip(*(row[key] for row in own), strict=True))
                steps = own[0]["evaluated"]
                (line,) = axis.plot(steps, [statistics.fmean(c) for c in columns], label=f"{name} ({len(own)})")
                low, high = [min(c) for c in columns], [max(c) for c in columns]
                axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.15)
        for axis, label in zip(axes, ("success on held-out questions", "tool turns a rollout"), strict=True):
            axis.set(xlabel="training steps", ylabel=label)
        axes[0].legend(frameon=False)
        canvas.savefig(path, metadata={"Date": None})


def _all(rows: Sequence[Row], key: str, shown: Any = str) -> str:
    return ", ".join(dict.fromkeys(shown(row[key]) for row in rows))
