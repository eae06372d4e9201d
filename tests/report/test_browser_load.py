"""A thousand rollouts of twenty turns: under 40 MB, open in under 3 s, and quick to use."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trace_fast.report import ReportEntry, write_report

pytest.importorskip("selenium", reason="selenium (extra dev) drives the browser")

ROLLOUTS, TURNS = 1000, 20


@pytest.fixture(scope="module")
def large_page(
    tmp_path_factory: pytest.TempPathFactory,
    make_record: Callable[..., dict[str, Any]],
    make_transcript: Callable[..., Any],
) -> Path:
    """More text than fits: 20 observations of 2,000 characters a rollout, 40 MB in all."""
    path = tmp_path_factory.mktemp("large") / "large.html"
    chance = random.Random(0)
    transcript = make_transcript(["search", "open"] * (TURNS // 2), "An <observation> with evidence. " * 62)

    def entry(i: int) -> ReportEntry:
        deltas = [chance.gauss(0.1, 0.9) for _ in range(TURNS + 1)]
        return ReportEntry(make_record(f"rollout-{i}", deltas, group=f"q{i // 8}", reward=float(i % 2)), transcript)

    write_report(path, map(entry, range(ROLLOUTS)), title="A thousand rollouts")
    return path


def test_size_and_time_to_open(page: Any, large_page: Path) -> None:
    assert 35_000_000 < large_page.stat().st_size < 40_000_000
    seconds = []
    for _ in range(3):  # the best of three: other work on the machine is not the page's
        page.open(large_page)
        seconds.append(page.js("return performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000)
        assert page.text("#shown") == "1,000 of 1,000 rollouts, the first 100 shown"
        if seconds[-1] < 3:
            break
    assert 0 < min(seconds) < 3
    assert page.js("return document.getElementById('first-secured').classList.contains('js-plotly-plot')")
    assert "were cut in their middle" in page.text("#transcripts-cut")


def test_interactions_take_less_than_a_second(page: Any, large_page: Path) -> None:
    page.keep(large_page)
    laid_out = "document.body.offsetHeight"
    timed = f"{{}}; {laid_out}; const t = performance.now(); {{}}; {laid_out}; return performance.now() - t"
    sort = "document.querySelectorAll('#table thead button')[8].click()"
    go = "location.hash = '#{}'; dispatchEvent(new HashChangeEvent('hashchange'))"
    for before, action in (
        ("", sort),
        (sort, "document.querySelector('#more button:last-child').click()"),
        ("", "const g = document.getElementById('heat-group'); g.value = '77'; g.dispatchEvent(new Event('change'))"),
        (go.format("rollout-500"), go.format("rollout-501")),
        (go.format("rollout-501"), go.format("rollout-502/turn-7")),
        (go.format("rollout-501"), go.format("rollouts")),
    ):
        # the best of three: other work on the machine is not the page's
        assert 0 < min(page.js(timed.format(before, action)) for _ in range(3)) < 1000, action


def test_rows_come_a_page_at_a_time(page: Any, large_page: Path) -> None:
    page.keep(large_page)
    page.js(
        "location.hash = '#rollouts'; while (arguments[0].ariaSort !== 'ascending') arguments[0].firstChild.click()",
        page.find("#table thead th"),
    )
    rows = "return document.querySelectorAll('#table tbody tr').length"
    assert page.js(rows) == 100
    page.find("#more button").click()
    assert page.js(rows) == 200
    assert page.js("return document.activeElement.textContent") == "rollout-100"
    page.find("#more button:last-child").click()
    assert page.js(rows) == ROLLOUTS
    assert page.texts("#more button") == []


def test_a_cut_text_says_what_is_missing(page: Any, large_page: Path) -> None:
    page.keep(large_page)
    page.go(1000)
    shown = page.text("#turn-3 .segment:last-child .text")
    assert shown.startswith("An <observation> with evidence. ")
    assert shown.endswith("(turn 3)")
    assert " characters cut to keep this file small]" in shown
