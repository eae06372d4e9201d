"""The file: self-contained, under its policy, whole or not there."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import resource
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trace_fast.errors import ConfigError, OutputError, RolloutError
from trace_fast.report import ReportEntry, write_report
from trace_fast.rollout import Segment

MakeRecord = Callable[..., dict[str, Any]]
MakeTranscript = Callable[..., tuple[Segment, ...]]


class Elements(HTMLParser):
    """All start tags with attributes, and the text inside script elements, as a browser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)


def embedded(path: Path, name: str) -> Any:
    page = Elements(path.read_text(encoding="utf-8"))
    return next(json.loads(text) for attributes, text in page.scripts if attributes.get("id") == name)


def test_the_file_asks_for_nothing_and_runs_only_its_own_scripts(a5_page: Path) -> None:
    page = Elements(a5_page.read_text(encoding="utf-8"))
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    code = [text for attributes, text in page.scripts if attributes.get("type") != "application/json"]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in code]
    assert len(code) == 2
    assert policy.split("; ") == [
        "default-src 'none'",
        f"script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}'",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    addresses = [a[key] for _, a in page.tags for key in ("src", "href", "action", "srcset", "data") if key in a]
    assert sorted(set(map(str, addresses))) == ["#groups", "#main", "#overview", "#rollouts", "data:,"]
    assert not [key for _, a in page.tags for key in a if key.startswith("on")]


def test_scripts_write_text_only_as_text() -> None:
    folder = Path(sys.modules["trace_fast.report"].__file__ or "").parent / "assets"
    source = "\n".join(path.read_text() for path in folder.glob("*.js"))
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", source)


def test_numbers_travel_exactly(a5_page: Path, a5_entries: list[ReportEntry]) -> None:
    data = embedded(a5_page, "report-data")
    assert len(data["rollouts"]) == 10
    for shown, entry in zip(data["rollouts"], a5_entries, strict=True):
        for key in ("id", "mean_logprobs", "values", "deltas", "boundaries", "reward", "secured_at"):
            assert shown[key] == entry.record[key]
        assert shown["rewards"] == entry.record["turn_rewards"]
        assert shown["advantage"] == entry.record["outcome_advantage"]


def test_transcripts_fill_what_the_budget_leaves(
    tmp_path: Path, make_record: MakeRecord, make_transcript: MakeTranscript
) -> None:
    text = "evidence & <more> " * 3000
    entries = [ReportEntry(make_record(f"r{i}", [0.1] * 4), make_transcript(["search"] * 3, text)) for i in range(40)]
    whole, cut, bare = (tmp_path / name for name in ("whole.html", "cut.html", "bare.html"))
    write_report(whole, entries, title="t")
    write_report(cut, entries, title="t", max_bytes=7_000_000)
    write_report(bare, entries, title="t", max_bytes=1000)
    assert 6_900_000 < cut.stat().st_size <= 7_000_000 < whole.stat().st_size
    assert embedded(whole, "texts-39")[3] == ["tool", 0, "search", f"{text} (turn 0)", "", 0]
    role, turn, tool, head, tail, omitted = embedded(cut, "texts-39")[3]
    full = f"{text} (turn 0)"
    assert (role, turn, tool) == ("tool", 0, "search")
    assert full == head + full[len(head) : len(head) + omitted] + tail
    assert omitted > 0
    assert embedded(cut, "texts-39")[2] == ["assistant", 0, "search", "Action of turn 0.", "", 0]
    assert "texts were cut in their middle" not in whole.read_text()
    assert re.search(r"120 of 360 texts were cut in their middle; \d\d?\.\d %", cut.read_text())
    assert "360 of 360 texts were cut in their middle; 0.0 %" in bare.read_text()


def test_the_page_says_where_transcripts_come_from(
    tmp_path: Path, make_record: MakeRecord, make_transcript: MakeTranscript
) -> None:
    record = make_record("r", [0.1, 0.2])
    path = tmp_path / "r.html"
    write_report(path, [ReportEntry(record)], title="t")
    assert "No of 1 rollouts" not in path.read_text()
    assert "None of the 1 rollouts has its transcript here" in path.read_text()
    write_report(path, [ReportEntry(record), ReportEntry(record, make_transcript([None]))], title="t")
    assert "1 of 2 rollouts have no transcript here" in path.read_text()
    write_report(path, [ReportEntry(record, make_transcript([None]))], title="t")
    assert "transcripts-missing" not in path.read_text()


def test_records_may_disagree_with_the_threshold(tmp_path: Path, make_record: MakeRecord) -> None:
    entries = [ReportEntry(make_record("r", [0.1, 0.2], secured_at=1)), ReportEntry(make_record("s", [0.1, 0.2]))]
    write_report(tmp_path / "r.html", entries, title="t")
    assert embedded(tmp_path / "r.html", "report-data")["disagreeing"] == 1


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "r.html"
    path.write_text("before")
    bad = make_record("r", [0.1, 0.2], values=[])
    with pytest.raises(RolloutError, match="values: expected 3 entries"):
        write_report(path, [ReportEntry(bad)], title="t")
    assert path.read_text() == "before"
    with pytest.raises(OutputError, match=r"cannot write the report .*: No such file or directory"):
        write_report(tmp_path / "absent" / "r.html", [], title="t")
    with pytest.raises(OutputError, match=r"cannot write the report .*: Not a directory"):
        write_report(path / "r.html", [], title="t")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match=r"cannot write the report .*folder: "):
        write_report(tmp_path / "folder", [], title="t")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "r.html"]


def test_a_full_disk_is_said_and_leaves_nothing_half(tmp_path: Path, a5_entries: list[ReportEntry]) -> None:
    path = tmp_path / "r.html"
    path.write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, limits[1]))  # less than the page takes
    try:
        with pytest.raises(OutputError, match=r"cannot write the report .*r.html: File too large"):
            write_report(path, a5_entries, title="t")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_without_plotly_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=r"pip install 'trace-fast\[report\]'"):
        write_report(tmp_path / "r.html", [], title="t")
    assert not (tmp_path / "r.html").exists()


def test_the_same_entries_give_the_same_file(tmp_path: Path, a5_page: Path, a5_entries: list[ReportEntry]) -> None:
    write_report(tmp_path / "again.html", iter(a5_entries), title="Ten rollouts", settings={"horizon": "3"})
    assert (tmp_path / "again.html").read_bytes() == a5_page.read_bytes()
