"""``trace-fast report``: score files in, one page out; transcripts are found again, also in moved files."""

from __future__ import annotations

import json

import pytest

from trace_fast.cli_inputs import Inputs
from trace_fast.cli_report import match_transcripts, read_run, secured_threshold_of
from trace_fast.errors import InputError

pytest.importorskip("plotly", reason="the report needs plotly (extra report)")


def _segments_record(number, **changes):
    """Text without a chat template; the fake scorer never sees it: only transcripts are read from it."""
    return {
        "id": f"r{number}",
        "segments": [
            {"role": "prompt", "text": f"question {number}"},
            {"role": "assistant", "text": f"look {number}"},
            {"role": "tool", "text": f"found {number}"},
            {"role": "assistant", "text": f"say {number}"},
        ],
        "answer": "x",
    } | changes


def _fail(error):
    raise error


@pytest.fixture
def scored(invoke, record, write_jsonl, tmp_path):
    """A score file of four rollouts."""
    path = write_jsonl([record(n) for n in range(4)])
    out = tmp_path / "s.jsonl"
    assert invoke("score", path, "--model", "fake", "--out", out, "--secured-threshold", "-4").exit_code == 0
    return out


def test_page_of_scores_alone(invoke, scored, tmp_path):
    result = invoke("report", scored, "--out", tmp_path / "r.html")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == f"report of 4 rollouts: {tmp_path / 'r.html'}\n"
    page = (tmp_path / "r.html").read_text()
    assert all(f'"r{n}"' in page for n in range(4))
    assert "fake@a" in page


def test_the_runs_own_threshold_is_used_unless_another_is_given(scored):
    run = read_run(scored)
    assert secured_threshold_of(run) == -4.0
    assert secured_threshold_of(None) == -0.3
    scored.with_suffix(".run.json").unlink()
    assert read_run(scored) is None


def test_a_damaged_run_file_is_named(scored, invoke, tmp_path):
    scored.with_suffix(".run.json").write_text("[]")
    result = invoke("report", scored, "--out", tmp_path / "r.html")
    assert result.exit_code == 2
    assert "s.run.json: expected the description of a run" in result.stderr


def test_transcripts_by_source_then_id_then_line(write_jsonl):
    path = write_jsonl([_segments_record(n) for n in range(3)] + [_segments_record(3, id=None)])
    inputs = Inputs((str(path),))
    records = [
        {"id": "r0", "source": f"{path}:1"},  # in place
        {"id": "r1", "source": "/elsewhere/other.jsonl:9"},  # renamed: by id
        {"id": "/old/in.jsonl:4", "source": "/old/in.jsonl:4"},  # moved, without an id of its own: by name and line
        {"id": "unknown", "source": "nowhere.jsonl:1"},
    ]
    entries = match_transcripts(records, inputs, _fail)
    texts = [[segment.text for segment in entry.transcript] for entry in entries]
    assert texts[0] == ["question 0", "look 0", "found 0", "say 0"]
    assert texts[1][0] == "question 1"
    assert texts[2][0] == "question 3"
    assert texts[3] == []


def test_an_ambiguous_id_gives_no_transcript_and_says_so(write_jsonl, capsys):
    path = write_jsonl([_segments_record(0, id="same"), _segments_record(1, id="same")])
    entries = match_transcripts([{"id": "same", "source": "x.jsonl:1"}], Inputs((str(path),)), _fail)
    assert entries[0].transcript == ()
    assert capsys.readouterr().err == "note: no transcript in the rollouts given for 1 of 1 record\n"


def test_rollouts_need_no_tokenizer_and_show_in_the_page(invoke, record, write_jsonl, tmp_path, scored):
    texts = write_jsonl([_segments_record(n) for n in range(4)], "texts.jsonl")
    result = invoke("report", scored, "--rollouts", texts, "--out", tmp_path / "r.html")
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "r.html").read_text()
    assert "found 2" in page


def test_refusals(invoke, scored, tmp_path):
    out = tmp_path / "r.html"
    out.write_text("precious")
    for arguments, words in [
        ([tmp_path / "none.jsonl", "--out", tmp_path / "q.html"], "none.jsonl: there is no such file"),
        ([scored, "--out", out], "exists; replace it with --overwrite"),
        ([scored, "--out", tmp_path / "none" / "r.html"], "does not exist"),
        ([scored, "--out", tmp_path / "q.html", "--rollouts", tmp_path / "gone.jsonl"], "gone.jsonl: there is no such"),
    ]:
        result = invoke("report", *arguments)
        assert result.exit_code == 2
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert out.read_text() == "precious"
    assert invoke("report", scored, "--out", out, "--overwrite").exit_code == 0
    assert out.read_text().startswith("<!")


def test_the_runs_own_files_are_not_the_page(invoke, scored, record, write_jsonl, tmp_path):
    """Neither of ``report --out`` nor of ``score --report``, also before they exist, also by another spelling."""
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for name in ("s.jsonl", "s.errors.jsonl", "s.run.json"):
        for place in (tmp_path / name, tmp_path / "." / ".." / tmp_path.name / name):
            for arguments in (
                ["report", scored, "--out", place, "--overwrite"],
                ["score", tmp_path / "in.jsonl", "--model", "fake", "--out", scored, "--report", place, "--overwrite"],
            ):
                result = invoke(*arguments)
                assert result.exit_code == 2
                assert f"expected a file of its own for the report, got {name} of the run itself" in result.stderr
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_transcript_of_other_turns_is_left_out_and_said(invoke, scored, write_jsonl, tmp_path):
    """The rollouts file was written anew: one record has more turns than were scored."""
    more = [{"role": "assistant", "text": "more"}, {"role": "tool", "text": "spam"}] * 3
    segments = [_segments_record(n) for n in range(4)]
    segments[2]["segments"][3:3] = more
    texts = write_jsonl(segments, "texts.jsonl")
    result = invoke("report", scored, "--rollouts", texts, "--out", tmp_path / "r.html")
    assert result.exit_code == 0, result.stderr
    assert (
        "note: the transcript found for 1 of 4 records has other turns than the record and is left out; the rollouts "
        "given are not those that were scored\n" in result.stderr
    )
    page = (tmp_path / "r.html").read_text()
    assert "found 1" in page
    assert "found 2" not in page
    assert "1 of 4 rollouts have no transcript here" in page


def test_a_line_that_is_no_score_record_is_named(invoke, scored, tmp_path):
    lines = scored.read_text().splitlines()
    lines[1] = json.dumps({"status": "error", "id": "x"})
    scored.write_text("\n".join(lines) + "\n")
    result = invoke("report", scored, "--out", tmp_path / "r.html")
    assert result.exit_code == 2
    assert "s.jsonl:2: expected a score record" in result.stderr
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("name", ["deep.jsonl", "s.run.json"])
def test_nesting_without_end_is_a_damaged_file(invoke, scored, tmp_path, name):
    (tmp_path / name).write_text("[" * 200_000 + "\n1\n")
    result = invoke("report", tmp_path / "deep.jsonl" if name == "deep.jsonl" else scored, "-o", tmp_path / "page.html")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert name in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_a_threshold_that_is_no_number(invoke, scored, tmp_path):
    result = invoke("report", scored, "-o", tmp_path / "page.html", "--secured-threshold", "-1e400")
    assert result.exit_code == 2
    assert "secured_threshold: expected a finite number, got -inf" in result.stderr


def test_broken_rollouts_file_is_said_and_is_exit_1(invoke, scored, tmp_path):
    (tmp_path / "torn.jsonl.gz").write_bytes(b"\x1f\x8b")
    result = invoke("report", scored, "--rollouts", tmp_path / "torn.jsonl.gz", "--out", tmp_path / "r.html")
    assert result.exit_code == 1
    assert "torn.jsonl.gz: cannot be read" in result.stderr
    assert (tmp_path / "r.html").exists()


def test_unreadable_inputs_reach_the_callback(tmp_path):
    (tmp_path / "torn.jsonl.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(InputError, match="torn"):
        match_transcripts([], Inputs((str(tmp_path / "torn.jsonl.gz"),)), _fail)
