"""Rollout text that attacks the page is shown as text and runs nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trace_fast.report import ReportEntry, write_report
from trace_fast.rollout import Segment

pytest.importorskip("selenium", reason="selenium (extra dev) drives the browser")

ATTACKS = {
    "script": "<script>window.pwned=1;alert(1)</script>",
    "closing": "</script></style></title><script>window.pwned=2</script><!--",
    "image": "<img src=x onerror=\"window.pwned=3\"><svg onload='window.pwned=4'>",
    "link": '<a href="javascript:window.pwned=5">click</a> [x](javascript:window.pwned=6)',
    "template": "{{7*7}} {% include '/etc/passwd' %} ${7*7} %{y} <%= 7*7 %>",
    "remote": '<img src="https://example.org/leak"><link rel=stylesheet href=https://example.org/s.css>',
    "json": '"]}];window.pwned=7;[{"\\"<!--<script>',
    "hidden": "bidi \u202egnp\u2066 zero\u200bwidth\ufeff nul\x00 bell\x07 esc\x1b[31m lone\ud800 line\u2028end",
    "prototype": "__proto__",
}
SHOWN_HIDDEN = (
    "bidi ⟦U+202E⟧gnp⟦U+2066⟧ zero⟦U+200B⟧width⟦U+FEFF⟧ nul⟦U+0000⟧ bell⟦U+0007⟧ esc⟦U+001B⟧[31m lone⟦U+D800⟧ "
    "line⟦U+2028⟧end"
)


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory, make_record: Callable[..., dict[str, Any]]) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "hostile.html"
    entries = []
    for text in ATTACKS.values():
        record = make_record(text, [2.0, -1.0, 0.5], reward=1.0, extra={text: text, "nested": [{text: text}]})
        record |= {"group": text, "answer": text, "source": text, "model": text}
        transcript = [Segment("user", text, -1)]
        for k in (0, 1):
            transcript += [Segment("assistant", text, k, text), Segment("tool", text, k, text)]
        entries.append(ReportEntry(record, (*transcript, Segment("assistant", text, 2))))
    write_report(path, entries, title="".join(ATTACKS.values()), settings={text: text for text in ATTACKS.values()})
    return path


@pytest.fixture(scope="module")
def opened(page: Any, hostile_page: Path) -> Any:
    """The page, opened once: what all rollouts of this file do to it must show in its console and requests."""
    page.media()
    page.open(hostile_page)
    return page


@pytest.mark.parametrize("place", range(len(ATTACKS)), ids=list(ATTACKS))
def test_planted_text_is_shown_and_runs_nothing(opened: Any, place: int) -> None:
    page, text = opened, list(ATTACKS.values())[place]
    shown = SHOWN_HIDDEN if text == ATTACKS["hidden"] else text
    page.js("location.hash = '#rollouts'")
    page.until("!document.getElementById('file-view').hidden")
    assert page.texts("#table tbody th")[place] == shown
    assert page.texts("#table tbody td:nth-child(3)")[place] == shown
    assert page.texts("#table tbody td:nth-child(4)")[place] == shown
    assert page.texts("#filters [name=group] option")[place + 1] == shown
    assert page.texts("#settings dt")[place + 1] == shown
    assert shown in page.texts("#tools tbody th")
    page.js(
        "const s = document.getElementById('heat-group'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))",
        str(place),
    )
    assert page.texts("#heat tbody th") == [shown]
    page.go(place + 1)
    assert page.text("#rollout-title bdi") == shown
    for fact in ("Group", "Gold answer", "Source", "Reference"):
        assert page.text(f"[data-fact='{fact}'] dd") == shown
    assert page.texts(".segment .text") == [shown] * 6
    assert page.texts("h4 .tool") == [shown] * 2
    assert page.text(".extra dt") == shown
    assert page.text(".extra dd") == shown
    assert page.text("#turns tbody tr:nth-child(2) td") == shown
    page.js("document.querySelectorAll('.barlayer path').forEach((p) => p.dispatchEvent(new MouseEvent('mouseover')))")
    assert page.js("return window.pwned") is None
    tags = "main script, main img, main iframe, main link, main object, main a:not([href^='#'])"
    assert page.js("return document.querySelectorAll(arguments[0]).length", tags) == 0
    assert page.js("return ({}).pwned === undefined && document.scripts.length") == 2 + 1 + len(ATTACKS)
    assert page.console() == []


def test_only_the_page_itself_was_asked_for(opened: Any, hostile_page: Path) -> None:
    assert opened.requests() == {hostile_page.as_uri(): None}


def test_the_title_is_text_too(opened: Any) -> None:
    assert opened.text("h1").startswith(ATTACKS["script"] + ATTACKS["closing"])
    assert opened.driver.title.startswith("<script>window.pwned=1;alert(1)</script></script>")


def test_the_policy_stops_what_would_get_in_all_the_same(page: Any, hostile_page: Path) -> None:
    page.open(hostile_page)
    page.js(
        """const script = document.createElement("script");
        script.textContent = "window.pwned = 1";
        const link = document.createElement("a");
        link.href = "javascript:window.pwned = 3";
        document.body.append(script, link);
        document.body.insertAdjacentHTML("beforeend", "<img src='data:,x' onerror='window.pwned = 2'>");
        link.click();
        new Image().src = "https://example.org/leak";
        fetch("https://example.org/leak").catch(() => { window.refused = true; })"""
    )
    page.until("window.refused")
    assert page.js("return window.pwned") is None
    blocked = [message for message in page.console() if "Content Security Policy" in message]
    assert len(blocked) >= 5
    assert {reason for url, reason in page.requests().items() if url != hostile_page.as_uri()} == {"csp"}
