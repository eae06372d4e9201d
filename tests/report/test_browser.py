"""The page in a real browser: what it shows, where keys and clicks lead, both themes, paper."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trace_fast.report import ReportEntry, write_report

pytest.importorskip("selenium", reason="selenium (extra dev) drives the browser")

ARROW_LEFT, ARROW_RIGHT, ARROW_DOWN, ENTER, ESCAPE, TAB = "\ue012", "\ue014", "\ue015", "\ue007", "\ue00c", "\ue004"
FOCUSED = "document.activeElement.id"


def number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


def column(page: Any, heading: str) -> list[str]:
    headings = page.texts("#table thead th")
    return list(page.texts(f"#table tbody tr > :nth-child({headings.index(heading) + 1})"))


def luminance(page: Any, selector: str, style: str) -> float:
    script = """const c = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
        c.fillStyle = getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]; c.fillRect(0, 0, 1, 1);
        return [...c.getImageData(0, 0, 1, 1).data].slice(0, 3)"""
    channels = [value / 255 for value in page.js(script, selector, style)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(page: Any, selector: str, background: str) -> float:
    one, two = luminance(page, selector, "color"), luminance(page, background, "backgroundColor")
    return (max(one, two) + 0.05) / (min(one, two) + 0.05)


@pytest.fixture
def opened(page: Any, a5_page: Path) -> Any:
    """The page, for tests that need no fresh one."""
    page.keep(a5_page)
    return page


@pytest.fixture
def file_view(opened: Any) -> Any:
    """The file's part of the open page, without filters, in the file's order."""
    opened.js(
        """location.hash = "#overview"; document.querySelector("#filters [type=reset]").click();
        const first = document.querySelector("#table thead th");
        while (first.ariaSort !== "ascending") first.firstChild.click();"""
    )
    opened.until("!document.getElementById('file-view').hidden")
    opened.until("document.querySelectorAll('#table tbody tr').length === 10")
    return opened


def test_overview_shows_the_figures_of_the_file(file_view: Any) -> None:
    tiles = dict(zip(file_view.texts("#tiles dt"), file_view.texts("#tiles dd"), strict=True))
    assert tiles == {
        "rollouts": "10",
        "groups": "2",
        "tool turns": "51",
        "right": "5",
        "wrong": "5",
        "without reward": "0",
        "secured": "9",
        "post-secured turns": "26",
    }
    assert "at least −0.3 nats: this project's reading" in file_view.text("#overview .note")
    assert "right when its reward is at least 0.5" in file_view.text("#overview .note")
    assert file_view.texts("#settings dd") == ["tiny@0123", "3"]
    assert file_view.text("#post-secured-total").endswith(
        "26 of 51 turns (51.0 %) came after the answer was secured; their δ adds up to −14.240."
    )


def test_credit_by_tool_adds_up(file_view: Any, a5_deltas: dict[str, list[float]]) -> None:
    rows = [file_view.texts(f"#tools tbody tr:nth-child({i}) > *") for i in (1, 2, 3)]
    shown = {row[0]: (int(row[1]), number(row[2]), number(row[4])) for row in rows}
    for i, tool in enumerate(("search", "open", "find")):
        credits = [d for deltas in a5_deltas.values() for d in deltas[:-1][i::3]]
        total = sum(credits)
        assert shown[tool] == (
            len(credits),
            pytest.approx(total / len(credits), abs=5e-4),
            pytest.approx(total, abs=5e-4),
        )


def test_first_secured_histogram_has_the_bars(file_view: Any) -> None:
    trace = file_view.js("const t = document.getElementById('first-secured').data[0]; return [t.customdata, t.y]")
    shown = {name: n for name, n in zip(*trace, strict=True) if n}
    assert shown == {
        "after turn 0": 5,
        "after turn 1": 1,
        "after turn 2": 1,
        "after turn 3": 1,
        "after turn 5": 1,
        "never": 1,
    }


def test_lists_name_the_odd_rollouts(file_view: Any) -> None:
    assert file_view.texts("#secured-wrong a") == ["N1", "N2", "N3", "N5"]
    assert file_view.text("#right-unsecured") == "0 rollouts"
    file_view.find("#secured-wrong a").click()
    file_view.until("document.getElementById('rollout-title')")
    assert file_view.text("#rollout-title bdi") == "N1"


def test_sorting_by_mouse_and_keyboard(file_view: Any, a5_deltas: dict[str, list[float]]) -> None:
    headings = file_view.texts("#table thead th")
    totals = {name: sum(deltas[:-1]) for name, deltas in a5_deltas.items()}
    button = f"#table thead th:nth-child({headings.index('Σ δ tools') + 1}) button"
    sort = f"document.querySelector('{button}').parentNode.ariaSort"
    assert file_view.js(f"return {sort}") == "none"
    file_view.find(button).click()
    assert file_view.js(f"return {sort}") == "descending"
    assert column(file_view, "Id") == sorted(totals, key=lambda name: -totals[name])
    file_view.js("document.querySelector(arguments[0]).focus()", button)
    file_view.press(ENTER)
    assert file_view.js(f"return {sort}") == "ascending"
    assert file_view.js("return document.querySelectorAll('#table [aria-sort=none]').length") == len(headings) - 1
    assert column(file_view, "Id") == sorted(totals, key=totals.__getitem__)
    harmful = f"#table thead th:nth-child({headings.index('Most harmful') + 1}) button"
    file_view.find(harmful).click()
    assert column(file_view, "Id") == ["N1", "N2", "N3", "N5", "N4", "P2", "P5", "P1", "P3", "P4"]
    file_view.find(harmful).click()
    assert column(file_view, "Id") == ["P5", "P2", "N4", "N5", "N3", "N2", "N1", "P1", "P3", "P4"]


@pytest.mark.parametrize(
    ("field", "choice", "rows"),
    [
        ("group", "negative", ["N1", "N2", "N3", "N4", "N5"]),
        ("outcome", "right", ["P1", "P2", "P3", "P4", "P5"]),
        ("outcome", "unknown", []),
        ("secured", "never", ["N4"]),
        ("secured", "secured", ["P1", "P2", "P3", "P4", "P5", "N1", "N2", "N3", "N5"]),
        ("answer", "air g", ["P1"]),
        ("id", "5", ["P5", "N5"]),
    ],
)
def test_filters(file_view: Any, field: str, choice: str, rows: list[str]) -> None:
    from selenium.webdriver.support.ui import Select

    control = file_view.find(f"#filters [name={field}]")
    if control.tag_name == "select":
        Select(control).select_by_visible_text(choice)
    else:
        control.send_keys(choice)
    assert column(file_view, "Id") == rows
    assert file_view.text("#shown") == f"{len(rows)} of 10 rollouts"
    file_view.find("#filters [type=reset]").click()
    file_view.until("document.querySelectorAll('#table tbody tr').length === 10")


VERDICTS = [
    "Decisive: turn 0search (δ +6.390). No turn made it less predictable.",
    "Decisive: turn 3search (δ +6.050). Most harmful: turn 2find (δ −1.040).",
    "Decisive: turn 1open (δ +5.860). No turn made it less predictable.",
    "Decisive: turn 0search (δ +5.480). No turn made it less predictable.",
    "Decisive: turn 5find (δ +5.440). Most harmful: turn 2find (δ −0.190).",
    "Decisive: turn 2find (δ +1.490). Most harmful: turn 4open (δ −4.830).",
    "Decisive: turn 0search (δ +2.310). Most harmful: turn 6search (δ −4.050).",
    "Decisive: turn 0search (δ +2.190). Most harmful: turn 6search (δ −3.630).",
    "Decisive: turn 0search (δ +1.420). Most harmful: turn 4open (δ −3.410).",
    "Decisive: turn 0search (δ +2.000). Most harmful: turn 6search (δ −3.480).",
]


def shown_number(value: float) -> str:
    text = f"{value:+.3f}".replace("-", "−")
    return text if float(text[1:]) else text[1:]


@pytest.mark.parametrize("place", range(10))
def test_a_rollout_shows_its_records_numbers(opened: Any, a5_entries: list[ReportEntry], place: int) -> None:
    page, record = opened, a5_entries[place].record
    turns = record["n_turns"]
    page.go(place + 1)
    body = [page.texts(f"#turns tbody tr:nth-child({k + 2}) > *") for k in range(turns)]
    answer = page.texts("#turns tfoot tr > *")
    assert len(page.texts("#turns tbody tr")) == turns + 1
    for k, row in enumerate([*body, answer]):
        assert row[0] == (str(k) if k < turns else "answer")
        assert number(row[2]) == pytest.approx(record["mean_logprobs"][k + 1], abs=5.1e-5)
        assert number(row[3]) == pytest.approx(record["values"][k + 1], abs=5.1e-5)
        assert number(row[4]) == pytest.approx(record["deltas"][k], abs=5.1e-5)
        if k < turns:
            assert number(row[5]) == pytest.approx(record["turn_rewards"][k], abs=5.1e-5)
            badges = page.texts(f"#turn-{k} .badge")
            assert badges[0] == f"δ {shown_number(record['deltas'][k])}"
            assert badges[1] == f"reward {shown_number(record['turn_rewards'][k])}"
    assert answer[5] == "–"
    assert page.texts("#answer .badge")[0] == f"δ {shown_number(record['deltas'][turns])}"
    drawn = page.js("return document.getElementById('rollout-plot').data.map((t) => [...t.y])")
    assert drawn == [record["values"], record["mean_logprobs"], record["deltas"], record["turn_rewards"]]
    lines = page.js("return document.getElementById('rollout-plot').layout.shapes")
    assert [line["y0"] for line in lines if line.get("yref") == "y2"] == [-0.3]
    verdict, _ = page.text("#verdict").split(" Answer generation, apart: δ ")
    assert verdict == VERDICTS[place]
    marked = page.texts(".turn:has(.badge.mark) h4")
    assert {re.findall(r"\d+", text)[0] for text in marked} == set(re.findall(r"turn (\d)", verdict))


def test_clicking_a_bar_lands_on_its_turn(opened: Any) -> None:
    from selenium.webdriver import ActionChains

    page = opened
    page.go(8)
    bars = page.driver.find_elements("css selector", "#rollout-plot .barlayer .trace:first-child .point path")
    assert len(bars) == 9
    for k, place in ((6, "turn-6"), (0, "turn-0"), (8, "answer")):
        page.js("scrollTo(0, 0)")
        ActionChains(page.driver).move_to_element(bars[k]).click().perform()
        page.until(f"{FOCUSED} === '{place}'")
        assert page.js("return location.hash") == f"#rollout-8/{place}"
        box = page.js(f"const b = document.getElementById('{place}').getBoundingClientRect(); return [b.top, b.bottom]")
        assert box[0] >= 0
        assert box[0] < page.js("return innerHeight")


def test_deep_links_open_and_focus(page: Any, a5_page: Path) -> None:
    page.open(a5_page, "#rollout-10/turn-3")
    assert page.text("#rollout-title bdi") == "N5"
    assert page.js(f"return {FOCUSED}") == "turn-3"
    page.open(a5_page, "#rollout-11")
    assert page.js("return document.getElementById('file-view').hidden") is False
    page.js("location.hash = '#groups'")
    page.until("scrollY > 0")


def test_keyboard_alone(page: Any, a5_page: Path) -> None:
    page.media()
    page.open(a5_page)
    page.press(TAB)
    assert page.js("return document.activeElement.className") == "skip"
    assert page.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press(ENTER)
    assert page.js(f"return {FOCUSED}") == "main"
    page.js("document.querySelector('#table tbody a').focus()")
    page.press(ENTER)
    page.until(f"{FOCUSED} === 'rollout-title'")
    page.press(ARROW_RIGHT)
    page.until("document.querySelector('#rollout-title bdi').textContent === 'P2'")
    page.press(ARROW_LEFT)
    page.until("document.querySelector('#rollout-title bdi').textContent === 'P1'")
    page.press(ARROW_LEFT)  # there is none before the first
    page.js("document.querySelector('#turns tbody tr:nth-child(3) a').focus()")
    page.press(ENTER)
    page.until(f"{FOCUSED} === 'turn-1'")
    assert page.text("#rollout-title bdi") == "P1"
    page.press(ESCAPE)
    page.until("!document.getElementById('file-view').hidden")
    assert page.js("return document.activeElement.textContent") == "P1"


def test_previous_and_next_follow_the_table(file_view: Any) -> None:
    from selenium.webdriver.support.ui import Select

    Select(file_view.find("#filters [name=group]")).select_by_visible_text("negative")
    file_view.find("#table thead th:nth-child(1) button").click()  # descending
    assert column(file_view, "Id") == ["N5", "N4", "N3", "N2", "N1"]
    file_view.find("#table tbody tr:nth-child(2) a").click()
    for key, name in ((ARROW_RIGHT, "N3"), (ARROW_LEFT, "N4"), (ARROW_LEFT, "N5")):
        file_view.press(key)
        file_view.until(f"document.querySelector('#rollout-title bdi')?.textContent === '{name}'")
    assert file_view.js("return document.getElementById('previous').tagName") == "SPAN"


def test_heat_map_of_a_group(file_view: Any, a5_deltas: dict[str, list[float]]) -> None:
    from selenium.webdriver.support.ui import Select

    Select(file_view.find("#heat-group")).select_by_visible_text("negative")
    assert file_view.texts("#heat tbody th") == ["N1", "N2", "N3", "N4", "N5"]
    for row, name in enumerate(("N1", "N2", "N3", "N4", "N5"), start=1):
        cells = file_view.texts(f"#heat tbody tr:nth-child({row}) td.cell")
        assert [number(text) for text in cells] == a5_deltas[name]
    signs = file_view.js(
        "return [...document.querySelectorAll('#heat tbody tr:first-child td.cell')].map((c) => c.classList[2])"
    )
    assert signs == ["gain", "gain", "gain", "even", "loss", "apart"]
    file_view.js("document.querySelector('#heat td[tabindex=\"0\"]').focus()")
    file_view.press(ARROW_DOWN, ARROW_RIGHT, ARROW_RIGHT)
    assert file_view.js("return document.activeElement.textContent") == "−1.32"
    assert file_view.js("return document.querySelectorAll('#heat td[tabindex=\"0\"]').length") == 1
    file_view.press(ENTER)
    file_view.until(f"{FOCUSED} === 'turn-2'")
    assert file_view.text("#rollout-title bdi") == "N2"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_in_both_themes(opened: Any, scheme: str) -> None:
    page = opened
    page.media(scheme=scheme)
    page.go(2)
    background = luminance(page, "body", "backgroundColor")
    assert (background > 0.8) if scheme == "light" else (background < 0.05)
    for selector, behind in [
        ("body", "body"),
        (".kicker", "body"),
        ("#back", "body"),
        ("#turn-3 .text", "#turn-3"),  # the strongest tint
        ("#turn-3 .role", "#turn-3"),
        ("#turn-2 .text", "#turn-2"),
        ("#turn-2 .badge.loss", "#turn-2 .badge.loss"),
        ("#turn-3 .badge.gain", "#turn-3 .badge.gain"),
        ("#turns .cell.number", "#verdict"),
    ]:
        assert contrast(page, selector, behind) >= 4.5, (selector, behind)
    fills = page.js("return getComputedStyle(document.querySelector('#rollout-plot .xtick text')).fill")
    assert fills == page.js("return getComputedStyle(document.body).color")
    tints = {luminance(page, f"#turn-{k}", "backgroundColor") for k in range(4)}
    assert len(tints) >= 3  # credits differ, so do the tints


def test_printing_is_light_whole_and_without_controls(opened: Any) -> None:
    page = opened
    page.go(2)
    page.media(scheme="dark", kind="print")
    assert luminance(page, "body", "backgroundColor") == pytest.approx(1)
    for selector in (".skip", ".top nav", ".stepper", "footer"):
        assert page.js("return getComputedStyle(document.querySelector(arguments[0])).display", selector) == "none"
    assert page.js("return getComputedStyle(document.querySelector('.columns')).display") == "block"
    assert page.js("return getComputedStyle(document.querySelector('#turn-3')).printColorAdjust") == "exact"
    assert page.js("return getComputedStyle(document.querySelector('.numbers')).maxHeight") == "none"
    page.media(scheme="dark")
    printed = page.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    pdf = base64.b64decode(printed["data"])
    assert pdf.startswith(b"%PDF-")
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.S)
    assert sum(len(zlib.decompress(s)) for s in streams if s[:1] == b"\x78") > 10_000


def test_charts_fit_the_paper(opened: Any) -> None:
    page = opened
    page.go(2)
    before = page.js("return document.querySelector('#rollout-plot .main-svg').getBoundingClientRect().width")
    page.driver.set_window_size(1900, 900)
    try:
        page.until(f"document.querySelector('#rollout-plot .main-svg').getBoundingClientRect().width > {before} + 20")
        page.media(kind="print")
        page.until("document.querySelector('#rollout-plot .main-svg').getBoundingClientRect().width <= 680")
        page.media()
        page.until(f"document.querySelector('#rollout-plot .main-svg').getBoundingClientRect().width > {before} + 20")
    finally:
        page.driver.set_window_size(1400, 1000)


def test_narrow_window_does_not_scroll_sideways(page: Any, a5_page: Path) -> None:
    metrics = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.media()
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.open(a5_page)
        assert page.js("return document.documentElement.scrollWidth") == 390
        page.go(7)
        assert page.js("return document.documentElement.scrollWidth") == 390
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_odd_rollouts_are_shown(
    page: Any, tmp_path: Path, make_record: Callable[..., dict[str, Any]], make_transcript: Callable[..., Any]
) -> None:
    path = tmp_path / "odd.html"
    long = "start " + "middle " * 2000 + "end"
    entries = [
        ReportEntry(make_record("no turns", [0.5])),
        ReportEntry(
            make_record("cut off", [0.5, -0.25], finished=False, answer=None), make_transcript(["a", None], long)
        ),
        ReportEntry(make_record("only a prompt", [], finished=False)),
        ReportEntry(make_record("sixty-one turns", [0.01 * k for k in range(62)])),
    ]
    write_report(path, entries, title="Odd")
    page.media()
    page.open(path, "#rollout-1")
    assert page.text("#verdict") == "No tool turns. Answer generation, apart: δ +0.500."
    assert "comes from the rollouts file" in page.text(".transcript .note")
    page.go(2)
    assert page.text("#verdict").endswith("Most harmful: turn 1 (δ −0.250).")
    assert page.js("return document.querySelector('#turns tfoot')") is None
    assert page.text("#answer h4") == "After the last turn (cut off before an answer)"
    assert page.text("[data-fact='Gold answer'] dd") == "given as token ids"
    observation = "#turn-0 .segment:last-child .text"
    assert len(page.text(observation)) < 2200
    page.find(f"{observation} .fold").click()
    assert page.text(observation) == f"{long} (turn 0)"
    page.go(3)
    assert page.text("#verdict") == "No tool turns."
    page.go(4, "/turn-60")
    assert page.js(f"return {FOCUSED}") == "turn-60"
    assert page.console() == []
