"""The page itself: template, styles, scripts and data in one file that may load nothing else.

The page's content security policy allows only the two scripts below, by their hashes, and no connection at all;
data travels as JSON that cannot end its script element; the scripts write rollout text through ``textContent``
and give none of it to the chart library, which would read pseudo-HTML in it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from trace_fast.atomic_write import write_atomically
from trace_fast.errors import ConfigError, OutputError
from trace_fast.report.analysis import RIGHT_AT, RolloutView, credit_scale, summarize, turn_tools
from trace_fast.report.record import ReportEntry, ScoreRecord, parse_entry
from trace_fast.report.text import embed_json, label, visible
from trace_fast.report.transcripts import CutSummary, TranscriptStore

SCRIPTS = ("core.js", "overview.js", "table.js", "heatmap.js", "charts.js", "transcript.js", "detail.js", "route.js")


def write_report(
    path: str | os.PathLike[str],
    entries: Iterable[ReportEntry],
    *,
    title: str,
    secured_threshold: float = -0.3,
    settings: Mapping[str, str] | None = None,
    max_bytes: int = 38_000_000,
) -> None:
    """Writes one self-contained HTML file; the file appears whole or not at all.

    Args:
        path: the file to write; an existing one is replaced at the end.
        entries: score records with transcripts, in the order of the page.
        title: heading of the page.
        secured_threshold: mean log-probability (nats) from which a state counts as secured.
        settings: names and values to show, such as the credit settings.
        max_bytes: size the file should keep; transcripts are cut evenly to what the rest leaves of it, and the
            page says by how much. Numbers are never cut, so score records alone may exceed it.

    Raises:
        ConfigError: plotly is not installed (extra ``report``).
        RolloutError: kind ``format``, a record or transcript is not as expected; nothing is written then.
        OutputError: the file cannot be written; what was at ``path`` before is still there.
    """
    plotly = _plotly_source()
    store = TranscriptStore(max_bytes - len(plotly.encode()))
    views: list[RolloutView] = []
    with_transcript = 0
    for place, entry in enumerate(entries, start=1):
        record = parse_entry(entry, place)
        tools = turn_tools(entry.transcript, record.n_turns)
        views.append(RolloutView(record, record.first_secured(secured_threshold), tools))
        with_transcript += bool(entry.transcript)
        store.add(_texts(entry, record))
    data = _page_data(views, secured_threshold, settings or {})
    frame = _render(title, data, [], plotly, with_transcript, None)
    wrapping = 64 * len(views)  # the script element around each rollout's texts
    cut = store.finish(max_bytes - len(frame.encode()) - wrapping - store.structure_bytes)
    page = _render(title, data, store.embedded(), plotly, with_transcript, cut)
    try:
        write_atomically(Path(path), page)
    except OSError as exc:
        raise OutputError(f"cannot write the report {path}: {exc.strerror or exc}") from exc


def _plotly_source() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as exc:
        raise ConfigError(
            f"the report's charts need plotly, which cannot be imported ({exc}): pip install 'trace-fast[report]'"
        ) from exc
    source: str = get_plotlyjs()
    if "</script" in source.lower() or "<!--" in source:
        raise ConfigError("this version of plotly.js cannot be placed inside a page (it holds a closing script tag)")
    return source


def _texts(entry: ReportEntry, record: ScoreRecord) -> Iterator[tuple[str, int, str | None, str]]:
    for segment in entry.transcript:
        tool = None if segment.tool is None else label(segment.tool)
        yield visible(segment.role), segment.turn, tool, visible(segment.text)
    for key, value in record.extra.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield "extra", 0, label(key), visible(text)


def _page_data(views: Sequence[RolloutView], threshold: float, settings: Mapping[str, str]) -> dict[str, Any]:
    groups = {name: i for i, name in enumerate(dict.fromkeys(view.record.group for view in views))}
    models = list(dict.fromkeys(view.record.model for view in views if view.record.model))
    named = [view for view in views if "secured_at" in view.record.model_fields_set]
    disagreeing = sum(view.secured_at != view.record.secured_at for view in named)
    summary = summarize(views).as_json()
    for tool in summary["tools"]:
        tool["name"] = None if tool["name"] is None else label(tool["name"])
    return {
        "threshold": threshold,
        "disagreeing": disagreeing,
        "right_at": RIGHT_AT,
        "scale": credit_scale(views),
        "settings": [[label(str(key)), label(str(value))] for key, value in settings.items()],
        "models": [label(model) for model in models],
        "groups": [label(name) for name in groups],
        "summary": summary,
        "rollouts": [_rollout_data(view, groups) for view in views],
    }


def _rollout_data(view: RolloutView, groups: Mapping[str, int]) -> dict[str, Any]:
    record = view.record
    answers = record.answer if isinstance(record.answer, list) else [record.answer] if record.answer else []
    return {
        "id": label(record.id),
        "group": groups[record.group],
        "answer": label(" | ".join(answers)) if answers else None,
        "turns": record.n_turns,
        "finished": record.finished,
        "boundaries": record.boundaries,
        "mean_logprobs": record.mean_logprobs,
        "values": record.values,
        "deltas": record.deltas,
        "rewards": record.turn_rewards,
        "advantage": record.outcome_advantage,
        "reward": record.reward,
        "outcome": view.outcome,
        "secured": view.secured,
        "secured_at": view.secured_at,
        "decisive": view.decisive_turn,
        "harmful": view.harmful_turn,
        "post_secured": len(view.post_secured_turns),
        "tools": [None if tool is None else label(tool) for tool in view.tools],
        "source": label(record.source),
        "model": label(record.model),
    }


def _render(
    title: str,
    data: Mapping[str, Any],
    transcripts: Sequence[str],
    plotly: str,
    with_transcript: int,
    cut: CutSummary | None,
) -> str:
    folder = resources.files("trace_fast.report")
    scripts = "\n".join(folder.joinpath("assets", name).read_text(encoding="utf-8") for name in SCRIPTS)
    app = f'(() => {{\n"use strict";\n{scripts}\n}})();'
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(folder.joinpath("templates", "report.html.j2").read_text(encoding="utf-8"))
    return template.render(
        title=label(title),
        css=folder.joinpath("assets", "report.css").read_text(encoding="utf-8"),
        plotly=plotly,
        app=app,
        script_hashes=[_csp_hash(plotly), _csp_hash(app)],
        data=embed_json(data),
        transcripts=transcripts,
        rollouts=len(data["rollouts"]),
        groups=len(data["groups"]),
        models=data["models"],
        threshold=data["threshold"],
        right_at=RIGHT_AT,
        with_transcript=with_transcript,
        cut=cut,
    )


def _csp_hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
