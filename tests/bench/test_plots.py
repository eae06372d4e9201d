"""Plots are valid SVG whose lines hold as many points as there are rows with right numbers."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from trace_fast.bench.plots import PLOTS, lines_of, why_no_plots, write_plots
from trace_fast.bench.rows import Row
from trace_fast.errors import OutputError

SVG = "{http://www.w3.org/2000/svg}"
SPEEDS = ("seconds", "runs", "first_seconds", "speedup_over_kv_cache", "peak_extra_bytes", "fraction_of_gemm_roofline")

pytestmark = pytest.mark.skipif(why_no_plots() is not None, reason="matplotlib is not installed (extra bench)")


@pytest.fixture
def rows(row: Callable[..., Row]) -> list[Row]:
    """Two methods; the slower one's numbers differ at 60 turns. 30 turns also at other tokens."""
    wrong = dict.fromkeys(SPEEDS)
    return [
        row(turns=60, seconds=2.2),
        row(turns=30, seconds=2.0),
        row(turns=30, tokens_trunk=8030, seconds=5.0),
        row(method="kv_cache", turns=30, seconds=4.0),
        row(method="kv_cache", turns=60, numbers="differ", **wrong),
        row(method="vllm", numbers="absent", reason="no endpoint", mean_abs_error=None, max_abs_error=None, **wrong),
    ]


def points(path: Path) -> dict[str, int]:
    """Markers of each line of a plot, by its label; their places must be numbers."""
    found = {}
    for group in ElementTree.parse(path).getroot().iter(f"{SVG}g"):
        if (group.get("id") or "").startswith("line: "):
            marks = list(group.iter(f"{SVG}use"))
            assert all(re.fullmatch(r"[\d.]+", mark.get(axis, "")) for mark in marks for axis in "xy")
            found[group.get("id", "").removeprefix("line: ")] = len(marks)
    return found


def test_every_plot_is_svg_with_a_point_a_row(rows: list[Row], tmp_path: Path) -> None:
    written = write_plots(rows, tmp_path / "new")
    assert [path.name for path in written] == [f"{plot.name}.svg" for plot in PLOTS]
    by_turns = {"trace_fast, 3,820 tokens": 2, "trace_fast, 8,030 tokens": 1, "kv_cache, 3,820 tokens": 1}
    by_tokens = {"trace_fast": 3, "kv_cache": 1}
    assert [points(path) for path in written] == [by_turns, by_tokens, by_turns, by_tokens]
    text = written[0].read_text()
    assert ">seconds<" in text  # letters stay letters


def test_lines_are_in_order_and_split_by_dtype(rows: list[Row], row: Callable[..., Row]) -> None:
    lines = lines_of(PLOTS[0], [*rows, row(dtype="bfloat16", seconds=1.0)])
    assert lines["trace_fast, float32, 3,820 tokens"] == [(30, 2.0), (60, 2.2)]
    assert lines["trace_fast, bfloat16, 3,820 tokens"] == [(30, 1.0)]


def test_nothing_to_draw_writes_nothing(rows: list[Row], tmp_path: Path) -> None:
    assert write_plots(rows[-1:], tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_same_rows_give_the_same_file(rows: list[Row], tmp_path: Path) -> None:
    first, second = write_plots(rows, tmp_path / "a")[0], write_plots(rows, tmp_path / "b")[0]
    assert first.read_bytes() == second.read_bytes()


def test_a_folder_that_cannot_be_written(rows: list[Row], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*file"):
        write_plots(rows, tmp_path / "file")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_no_plots() == "matplotlib is not installed (pip install 'trace-fast[bench]')"
