"""Does turn credit know the turns that bring the answer? Of the rollouts that training runs have written.

    python benchmarks/credit_signal.py RUN... --tokenizer BASE

A turn brings the answer when its observation is the rollout's first to contain a gold answer as text. For every step of
which the runs hold rollouts and scores, a row goes to ``results/credit_signal.jsonl`` and to the terminal: the mean
step of the value (nats; Eq. 7) at turns that bring the answer and at turns without it, how often one of the first is
above one of the others (area under the ROC curve), the share of rollouts that find the answer, and the share of these
that answer right, by hops.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from trace_fast.bench.about import about
from trace_fast.bench.rows import append_json, read_rows
from trace_fast.model import load_tokenizer

RESULTS = Path(__file__).parent / "results" / "credit_signal.jsonl"


@dataclass(frozen=True, slots=True)
class Reading:
    """One rollout: steps of the value at turns that bring the answer and at turns without it, and how it ended."""

    bringing: list[float]
    without: list[float]
    found: bool
    right: bool
    hops: int


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs of one algorithm, such as its seeds")
    parser.add_argument("--tokenizer", required=True, help="model folder of the runs' policy")
    options = parser.parse_args(arguments)
    tokenizer = load_tokenizer(options.tokenizer)
    by_step: dict[int, list[Reading]] = defaultdict(list)
    for run in options.runs:
        for path in sorted((run / "rollouts").glob("step-*[0-9].jsonl")):
            by_step[int(path.stem.removeprefix("step-"))] += readings(path, tokenizer)
    if not by_step:
        parser.error(f"{', '.join(map(str, options.runs))}: expected rollouts/step-*.jsonl, found none")
    names = [run.name for run in options.runs]
    rows = [{**about(torch.device("cpu")), "runs": names, **row_of(step, by_step[step])} for step in sorted(by_step)]
    append_json(RESULTS, map(json.dumps, rows))
    columns = ("step", "rollouts", "brings the answer", "does not", "area", "found", "right of found")
    table = Table(*columns, title=" ".join(names))
    for row in rows:
        values = (row[key] for key in ("bringing", "without", "area", "found", "right_of_found"))
        table.add_row(str(row["step"]), str(row["rollouts"]), *map(shown, values))
    Console(width=120).print(table)
    return 0


def readings(path: Path, tokenizer: Any) -> Iterator[Reading]:
    """Of the rollouts of one step; those without scores have no steps of the value."""
    scored = path.with_suffix(".scores.jsonl")
    deltas = {row["id"]: row["deltas"] for row in read_rows(scored)} if scored.exists() else {}
    for row in read_rows(path):
        n_turns, shown_ids = row["n_turns"], list(zip(row["input_ids"], row["loss_mask"], strict=True))
        holds = []
        for begin, end in list(pairwise(row["boundaries"]))[:n_turns]:
            text = tokenizer.decode([token for token, written in shown_ids[begin:end] if not written])
            holds.append(any(answer in text for answer in row["answer"]))
        first = holds.index(True) if True in holds else None
        steps = deltas.get(row["id"], [])[:n_turns]
        yield Reading(
            bringing=[step for turn, step in enumerate(steps) if turn == first],
            without=[step for turn, step in enumerate(steps) if not holds[turn]],
            found=first is not None,
            right=bool(row["extra"]["correct"]),
            hops=int(row["extra"]["hops"]),
        )


def row_of(step: int, found: Sequence[Reading]) -> dict[str, Any]:
    """What the module's text says; ``None`` where there is nothing to take a mean of."""
    bringing = [x for reading in found for x in reading.bringing]
    without = [x for reading in found for x in reading.without]
    hops = sorted({reading.hops for reading in found})
    return {
        "step": step,
        "rollouts": len(found),
        "turns": {"bringing": len(bringing), "without": len(without)},
        "bringing": mean(bringing),
        "without": mean(without),
        "without_std": float(np.std(without)) if without else None,
        "area": area(bringing, without),
        "found": mean([reading.found for reading in found]),
        "right_of_found": mean([reading.right for reading in found if reading.found]),
        "found_by_hops": {n: mean([r.found for r in found if r.hops == n]) for n in hops},
        "right_of_found_by_hops": {n: mean([r.right for r in found if r.hops == n and r.found]) for n in hops},
    }


def area(higher: Sequence[float], lower: Sequence[float]) -> float | None:
    """How often one of ``higher`` is above one of ``lower``, ties counting half."""
    if not higher or not lower:
        return None
    a, b = np.asarray(higher)[:, None], np.asarray(lower)[None]
    return float((a > b).mean() + 0.5 * (a == b).mean())


def mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
