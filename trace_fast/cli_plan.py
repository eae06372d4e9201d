"""``trace-fast plan``: what scoring a file would cost, without loading the weights."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trace_fast.cli_inputs import Inputs
from trace_fast.cli_terminal import EXIT_DONE, EXIT_NOTHING_DONE, EXIT_SOME_FAILED, plural, say
from trace_fast.config import DType

if TYPE_CHECKING:
    from trace_fast.plan import PlanSummary


def run_plan(
    inputs: Inputs,
    *,
    model: str,
    dtype: DType,
    opener: str,
    max_tokens_per_pack: int | None,
    as_json: bool,
) -> int:
    """Prints the plan on standard output and returns the exit code; failed records go to stderr, a line each.

    Raises:
        TraceFastError: nothing could be planned; ``ModelError`` for a model that could not be scored either.
    """
    from trace_fast.model import ModelSpec, load_tokenizer
    from trace_fast.plan import estimate

    inputs.check()
    spec = ModelSpec.from_pretrained(model)
    spec.check_supported()
    failed: list[Exception] = []

    def report(error: Exception) -> None:
        failed.append(error)
        say(f"failed: {error}")

    rollouts = inputs.rollouts(load_tokenizer(model), opener=opener, errors=report, unreadable=report)
    summary = estimate(rollouts, spec, dtype=dtype, max_tokens_per_pack=max_tokens_per_pack, errors=report)
    if as_json:
        typer.echo(
            json.dumps(dataclasses.asdict(summary) | {"ratio": summary.ratio, "n_failed": len(failed)}, allow_nan=False)
        )
    else:
        _print(summary, len(failed))
    if failed:
        return EXIT_SOME_FAILED if summary.n_rollouts else EXIT_NOTHING_DONE
    return EXIT_DONE


def _print(summary: PlanSummary, n_failed: int) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    for name, value in _rows(summary, n_failed):
        table.add_row(Text(name), Text(value))
    Console(highlight=False).print(table)


def _rows(summary: PlanSummary, n_failed: int) -> list[tuple[str, str]]:
    rows = [
        ("rollouts", f"{summary.n_rollouts:,}"),
        ("states to score", f"{summary.n_states:,}"),
        ("with rewritten history", f"{summary.n_rewritten:,}"),
        ("tokens, one pass a state", f"{summary.tokens_naive:,}"),
        ("tokens, each distinct one once", f"{summary.tokens_unique:,}"),
        ("ratio", f"{summary.ratio:.2f}"),
        ("packs", f"{summary.n_packs:,}"),
        ("tokens of the largest pack", f"{summary.largest_pack:,}"),
        ("predicted peak memory", _bytes(summary.peak_bytes)),
        ("of which weights", _bytes(summary.weight_bytes)),
        ("predicted operations", _flops(summary.flops)),
        ("predicted operations, one pass a state", _flops(summary.flops_naive)),
    ]
    return rows + ([("cannot be scored", plural(n_failed, "record"))] if n_failed else [])


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _flops(count: float) -> str:
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PFLOP"
