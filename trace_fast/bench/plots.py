"""Rows as SVG: time and memory against turns, time against tokens, fraction of the GEMM roofline against tokens.

Points are rows whose numbers are right. A line joins points of one method and dtype; against turns, only those of the
same trunk tokens, so that it shows what a turn costs. matplotlib (extra ``bench``) draws.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trace_fast.bench.rows import Row
from trace_fast.errors import OutputError

SETTINGS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "trace_fast",  # the same rows give the same file
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure: file name, axes, and what a row contributes (``None``: nothing)."""

    name: str
    title: str
    x_label: str
    y_label: str
    x: Callable[[Row], int]
    y: Callable[[Row], float | None]
    by_tokens: bool = False
    log: bool = False


PLOTS = (
    Plot("time_vs_turns", "Time against turns", "turns", "seconds", lambda r: r.turns, lambda r: r.seconds, True, True),
    Plot(
        "time_vs_tokens",
        "Time against tokens",
        "trunk tokens",
        "seconds",
        lambda r: r.tokens_trunk,
        lambda r: r.seconds,
        log=True,
    ),
    Plot(
        "memory_vs_turns",
        "Memory beside the weights, against turns",
        "turns",
        "MB at the peak",
        lambda r: r.turns,
        lambda r: None if r.peak_extra_bytes is None else r.peak_extra_bytes / 1e6,
        True,
    ),
    Plot(
        "roofline_vs_tokens",
        "Fraction of the GEMM roofline (distinct tokens' FLOPs)",
        "trunk tokens",
        "fraction",
        lambda r: r.tokens_trunk,
        lambda r: r.fraction_of_gemm_roofline,
    ),
)


def why_no_plots() -> str | None:
    """``None``, or what is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed (pip install 'trace-fast[bench]')"
    return None


def lines_of(plot: Plot, rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """Label of a line → its points in order of x."""
    lines: dict[str, list[tuple[int, float]]] = {}
    dtypes = {row.dtype for row in rows}
    for row in rows:
        y = plot.y(row)
        if y is None:
            continue
        label = row.method + (f", {row.dtype}" if len(dtypes) > 1 else "")
        label += f", {row.tokens_trunk:,} tokens" if plot.by_tokens else ""
        lines.setdefault(label, []).append((plot.x(row), y))
    return {label: sorted(points) for label, points in lines.items()}


def write_plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draws every plot that has a point; returns the files. Needs matplotlib (see ``why_no_plots``).

    Raises:
        OutputError: the folder cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    written = []
    for plot in PLOTS:
        lines = lines_of(plot, rows)
        if not lines:
            continue
        with rc_context(SETTINGS):  # type: ignore[arg-type]
            figure = Figure(figsize=(7, 4.2), layout="constrained")
            FigureCanvasSVG(figure)
            axes = figure.add_subplot()
            for label, points in lines.items():
                (line,) = axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.2, label=label)
                line.set_gid(f"line: {label}")
            title = f"{plot.title}\n{rows[0].model}, {rows[0].machine}"
            axes.set(xlabel=plot.x_label, ylabel=plot.y_label, title=title)
            if plot.log:
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            figure.legend(loc="outside right upper", frameon=False)
            path = folder / f"{plot.name}.svg"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, format="svg", metadata={"Date": None})
            except OSError as error:
                raise OutputError(f"cannot write {path}: {error.strerror}") from error
            written.append(path)
    return written
