"""``trace-fast report``: score records and transcripts to one HTML file."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from trace_fast.cli_inputs import Inputs
from trace_fast.cli_terminal import EXIT_DONE, EXIT_SOME_FAILED, plural, say
from trace_fast.config import CreditConfig
from trace_fast.errors import ConfigError, InputError, OutputError
from trace_fast.output import read_score_records
from trace_fast.report import ReportEntry, write_report
from trace_fast.report.record import transcript_fits
from trace_fast.rollout import Segment
from trace_fast.score_writer import run_files

Transcript = Sequence[Segment]


def check_report_path(path: str, scores: str, *, overwrite: bool) -> None:
    """Before minutes of work: can the report be written at all?

    Raises:
        OutputError: the folder is missing, or the file exists and ``overwrite`` is not set.
        ConfigError: it is one of the run's own files (scores, errors, description); the chart library is not installed.
    """
    file = Path(path)
    own = next((own for own in run_files(Path(scores)) if os.path.realpath(own) == os.path.realpath(path)), None)
    if own is not None:
        raise ConfigError(f"{path}: expected a file of its own for the report, got {own.name} of the run itself")
    if not file.parent.is_dir():
        raise OutputError(f"{path}: the folder {str(file.parent)!r} does not exist")
    if file.exists() and not file.is_file():
        raise OutputError(f"{path}: expected a regular file, got something else")
    if file.exists() and not overwrite:
        raise OutputError(f"{path} exists; replace it with --overwrite, or give another name")
    check_charts()


def check_charts() -> None:
    """Raises ``ConfigError`` when the chart library is not installed."""
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError("the report's charts need plotly, which is not installed: pip install 'trace-fast[report]'")


def report_scores(
    path: str,
    scores: Path | Iterable[bytes],
    inputs: Inputs | None,
    *,
    run: Mapping[str, Any] | None,
    secured_threshold: float,
    unreadable: Callable[[InputError], None],
) -> int:
    """Writes the report of a score file (or of encoded records) and returns the number of rollouts in it.

    Args:
        inputs: where the rollouts came from, for the transcripts; ``None`` leaves them out.
        run: the run's description (``NAME.run.json``), shown as settings; ``None`` when it is not known.
        secured_threshold: mean log-probability (nats) from which a state counts as secured.
        unreadable: told of each input that breaks off; what came before it is in the report.
    """
    records = list(read_score_records(scores)) if isinstance(scores, Path) else [json.loads(line) for line in scores]
    entries = [ReportEntry(record) for record in records]
    if inputs is not None:
        entries = match_transcripts(records, inputs, unreadable)
    name = scores.name if isinstance(scores, Path) else "standard output"
    settings = {key: _shown(value) for key, value in _settings_shown(run or {})}
    write_report(path, entries, title=f"TRACE credit: {name}", secured_threshold=secured_threshold, settings=settings)
    return len(records)


def match_transcripts(
    records: Sequence[dict[str, Any]], inputs: Inputs, unreadable: Callable[[InputError], None]
) -> list[ReportEntry]:
    """Finds each record's transcript by source; else by id, else by file name and line, where those are unambiguous.

    The last two are for rollouts files that have been moved since they were scored. What has no transcript is said;
    so is one with turns that its record does not have (the file was written anew), which is left out.
    """
    wanted_sources = {r.get("source") for r in records}
    wanted_ids = {r["id"] for r in records}
    wanted_lines = {_name_and_line(str(r.get("source"))) for r in records}
    by_source: dict[str, Transcript] = {}
    by_id: dict[str, Transcript] = {}
    by_line: dict[str, Transcript] = {}
    ids: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for source, rollout_id, segments in inputs.transcripts(unreadable):
        line = _name_and_line(source)
        ids[rollout_id] += 1
        lines[line] += 1
        if source in wanted_sources:
            by_source[source] = segments
        elif rollout_id in wanted_ids:
            by_id[rollout_id] = segments
        elif line in wanted_lines:
            by_line[line] = segments
    entries: list[ReportEntry] = []
    missing = unfit = 0
    for record in records:
        line = _name_and_line(str(record.get("source")))
        found = by_source.get(str(record.get("source")))
        if found is None and ids[record["id"]] == 1:
            found = by_id.get(record["id"])
        if found is None and lines[line] == 1:
            found = by_line.get(line)
        missing += found is None
        turns = record.get("n_turns")
        if found is not None and isinstance(turns, int) and not transcript_fits(found, turns):
            unfit, found = unfit + 1, None
        entries.append(ReportEntry(record, found or ()))
    if missing:
        say(f"note: no transcript in the rollouts given for {missing:,} of {plural(len(records), 'record')}")
    if unfit:
        say(
            f"note: the transcript found for {unfit:,} of {plural(len(records), 'record')} has other turns than the "
            "record and is left out; the rollouts given are not those that were scored"
        )
    return entries


def _name_and_line(source: str) -> str:
    return PurePath(source).name


def read_run(scores: Path) -> dict[str, Any] | None:
    """The run's description beside a score file, or ``None`` when there is none.

    Raises:
        InputError: it is there and is not what this program writes.
    """
    _, _, path = run_files(scores)
    try:
        run = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected JSON, got something else ({error})") from error
    if not isinstance(run, dict) or not isinstance(run.get("settings"), dict):
        raise InputError(f"{path}: expected the description of a run, got something else")
    return run


def secured_threshold_of(run: Mapping[str, Any] | None) -> float:
    """The threshold (nats) that the run was scored with, the default when that is not known."""
    credit = (run or {}).get("settings", {}).get("credit", {})
    return float(credit.get("secured_threshold", CreditConfig().secured_threshold))


def _settings_shown(run: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for key in ("reference", "version"):
        if key in run:
            yield key, run[key]
    settings = dict(run.get("settings", {}))
    yield from settings.pop("credit", {}).items()
    yield from settings.items()


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def run_report(
    scores: str,
    inputs: Inputs | None,
    *,
    out: str,
    secured_threshold: float | None = None,
    overwrite: bool = False,
) -> int:
    """The ``report`` command; returns its exit code (1 when a rollouts file breaks off).

    Raises:
        TraceFastError: the score file cannot be read, a rollouts file is missing, or the page cannot be written.
    """
    path = Path(scores)
    if not path.is_file():
        raise InputError(f"{scores}: there is no such file")
    check_report_path(out, scores, overwrite=overwrite)
    if inputs is not None:
        inputs.check(out)
    run = read_run(path)
    threshold = secured_threshold_of(run) if secured_threshold is None else secured_threshold
    if not math.isfinite(threshold):
        raise ConfigError(f"secured_threshold: expected a finite number, got {threshold}")
    broken: list[InputError] = []

    def unreadable(error: InputError) -> None:
        broken.append(error)
        say(f"error: {error}")

    count = report_scores(out, path, inputs, run=run, secured_threshold=threshold, unreadable=unreadable)
    say(f"report of {plural(count, 'rollout')}: {out}")
    return EXIT_SOME_FAILED if broken else EXIT_DONE
