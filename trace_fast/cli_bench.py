"""``trace-fast bench``: scoring side by side with what people use today, numbers first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from trace_fast.cli_inputs import Inputs
from trace_fast.cli_terminal import EXIT_DONE, EXIT_NOTHING_DONE, EXIT_SOME_FAILED, plural, say
from trace_fast.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from trace_fast.bench.rows import Row
    from trace_fast.bench.run import PeerChoice
    from trace_fast.bench.shapes import Shape
    from trace_fast.rollout import Rollout
    from trace_fast.scorer import Scorer

PLAIN_WIDTH = 150  # columns of the table where standard output is no terminal


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What ``trace-fast bench`` was asked to do; field names are the options'."""

    inputs: Inputs | None
    model: str | None
    out: str
    dtypes: tuple[str, ...] = ("bfloat16",)
    device: str = "auto"
    backend: str = "auto"
    opener: str = "auto"
    shapes: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    rounds: int = 3
    limit: int = 4


OpenBenchScorer = Callable[[BenchSettings, str], "Scorer"]


def open_bench_scorer(settings: BenchSettings, dtype: str) -> Scorer:
    """The real scorer. Raises ``ModelError`` when the model cannot be loaded."""
    from trace_fast.scorer import Scorer

    assert settings.model is not None
    return Scorer.from_pretrained(settings.model, dtype=dtype, device=settings.device, backend=settings.backend)


def run_bench(settings: BenchSettings, *, open_scorer: OpenBenchScorer = open_bench_scorer) -> int:
    """Measures, prints a table on standard output, and adds rows and plots to the folder ``out``.

    Returns:
        0; 1 when a method's numbers differ or it failed, a peer that was named is not there, or a record failed.

    Raises:
        TraceFastError: nothing could be measured (no model, an unknown peer, a missing file, nothing to score).
    """
    from trace_fast.backends import dtype_of
    from trace_fast.bench.run import PeerChoice
    from trace_fast.bench.shapes import DEFAULT_SHAPES, parse_shapes

    if settings.model is None:
        raise ConfigError("model: expected a folder, a hub id or a GGUF file (--model), got nothing")
    for dtype in settings.dtypes:
        dtype_of(dtype)
    choice = PeerChoice.of(settings.peers, settings.endpoints)
    wanted = settings.shapes or (() if settings.inputs else DEFAULT_SHAPES)
    shapes = [shape for text in wanted for shape in parse_shapes(text)]
    if settings.inputs is not None:
        settings.inputs.check()
    failed: list[str] = []
    rows: list[Row] = []
    for dtype in settings.dtypes:
        scorer = open_scorer(settings, dtype)
        rollouts = _rollouts(settings, scorer, shapes, failed)
        if not rollouts:
            say("error: nothing to measure: no rollout that every method can score")
            return EXIT_NOTHING_DONE
        rows += _measure(settings, scorer, rollouts, choice, failed)
    _show(rows)
    _draw(rows, Path(settings.out))
    return EXIT_SOME_FAILED if failed or any(r.numbers in ("differ", "failed") for r in rows) else EXIT_DONE


def _measure(
    settings: BenchSettings, scorer: Scorer, rollouts: list[Rollout], choice: PeerChoice, failed: list[str]
) -> list[Row]:
    """The rows of one dtype; each rollout's are on disk before the next is measured."""
    from trace_fast.bench.rows import append_rows
    from trace_fast.bench.run import Bench

    assert settings.model is not None
    path = Path(settings.out) / "rows.jsonl"
    append_rows(path, [])  # a folder that cannot be written is noticed before anything is measured
    rows: list[Row] = []
    with Bench(scorer, settings.model, choice) as bench:
        for name, reason in bench.absent.items():
            say(f"not run: {name}: {reason}")
            failed += [name] if choice.asked_for(name) else []
        for found in bench.rows(rollouts, rounds=settings.rounds, say=say):
            append_rows(path, found)
            rows += found
    say(f"rows: {path}")
    return rows


def _rollouts(settings: BenchSettings, scorer: Scorer, shapes: list[Shape], failed: list[str]) -> list[Rollout]:
    """Generated ones and, of the files, the first ``limit`` that every method can score."""
    from trace_fast.bench.run import comparable
    from trace_fast.bench.shapes import generate


    def fail(error: Exception) -> None:
        failed.append(str(error))
        say(f"failed: {error}")

    found = []
    for shape in shapes:
        try:
            found.append(comparable(generate(shape, scorer.model.vocab_size), scorer))
        except RolloutError as error:  # longer than the model's positions
            fail(error)
    if settings.inputs is None:
        return found

    taken = 0
    reading = settings.inputs.rollouts(scorer.tokenizer, opener=settings.opener, errors=fail, unreadable=fail)
    for rollout in reading:
        if taken == settings.limit:
            say(f"measuring the first {plural(taken, 'usable rollout')} of the files (--limit)")
            break
        try:
            found.append(comparable(rollout, scorer))
        except RolloutError as error:
            fail(error)
        else:
            taken += 1
    return found


def _show(rows: list[Row]) -> None:
    from trace_fast.bench.table import growth_lines, table_of

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    console.print(table_of(row for row in rows if row.numbers != "absent"))
    for line in growth_lines(rows):
        console.print(line)


def _draw(rows: list[Row], folder: Path) -> None:
    from trace_fast.bench.plots import why_no_plots, write_plots

    reason = why_no_plots()
    if reason is not None:
        say(f"no plots: {reason}")
        return
    for path in write_plots(rows, folder):
        say(f"plot: {path}")
