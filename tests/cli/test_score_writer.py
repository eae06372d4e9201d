"""The score file: refusals, recovery after any kill, one writer at a time, a disk that refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from trace_fast.errors import OutputError
from trace_fast.output import RunDescription, RunInput, encode_record
from trace_fast.score_writer import ScoreWriter


def _run(**changes):
    fields = {
        "version": "0.1.0",
        "reference": "m@1",
        "inputs": (RunInput("in.jsonl", 10, "aa"),),
        "settings": {"dtype": "float32", "credit": {"horizon": 3}},
    }
    return RunDescription(**(fields | changes))


def _line(number, status="ok"):
    return encode_record({"id": f"r{number}", "source": f"in.jsonl:{number}", "status": status})


def _write(path, scores, errors=(), *, run=None, **mode):
    with ScoreWriter(str(path), **mode) as writer:
        writer.begin(run or _run())
        writer.write([_line(n) for n in scores], [_line(n, "error") for n in errors])
        return writer


def test_three_files_with_these_names_and_contents(tmp_path):
    _write(tmp_path / "s.jsonl", [1, 3], [2])
    assert sorted(f.name for f in tmp_path.iterdir()) == ["s.errors.jsonl", "s.jsonl", "s.run.json"]
    assert (tmp_path / "s.jsonl").read_bytes() == _line(1) + _line(3)
    assert (tmp_path / "s.errors.jsonl").read_bytes() == _line(2, "error")
    assert json.loads((tmp_path / "s.run.json").read_text()) == {
        "version": "0.1.0",
        "reference": "m@1",
        "inputs": [{"path": "in.jsonl", "bytes": 10, "sha256": "aa"}],
        "settings": {"dtype": "float32", "credit": {"horizon": 3}},
    }


def test_no_errors_file_where_nothing_failed(tmp_path):
    _write(tmp_path / "s.jsonl", [1])
    assert not (tmp_path / "s.errors.jsonl").exists()


@pytest.mark.parametrize("existing", ["s.jsonl", "s.errors.jsonl"])
def test_existing_output_is_refused_and_untouched(tmp_path, existing):
    (tmp_path / existing).write_bytes(b"precious")
    with pytest.raises(OutputError, match=r"exists and is not empty; continue it with --resume"):
        ScoreWriter(str(tmp_path / "s.jsonl"))
    assert (tmp_path / existing).read_bytes() == b"precious"


def test_empty_output_is_no_output(tmp_path):
    (tmp_path / "s.jsonl").touch()
    _write(tmp_path / "s.jsonl", [1])
    assert (tmp_path / "s.jsonl").read_bytes() == _line(1)


def test_overwrite_replaces_all_three(tmp_path):
    _write(tmp_path / "s.jsonl", [1, 2], [3])
    _write(tmp_path / "s.jsonl", [4], run=_run(reference="m@2"), overwrite=True)
    assert (tmp_path / "s.jsonl").read_bytes() == _line(4)
    assert not (tmp_path / "s.errors.jsonl").exists()
    assert json.loads((tmp_path / "s.run.json").read_text())["reference"] == "m@2"


def test_resume_appends_and_knows_what_is_done(tmp_path):
    _write(tmp_path / "s.jsonl", [1, 3], [2])
    writer = _write(tmp_path / "s.jsonl", [4], resume=True)
    assert writer.done == {"in.jsonl:1", "in.jsonl:2", "in.jsonl:3"}
    assert (writer.n_scored, writer.n_failed) == (3, 1)
    assert (tmp_path / "s.jsonl").read_bytes() == _line(1) + _line(3) + _line(4)


def test_resume_into_nothing_starts(tmp_path):
    _write(tmp_path / "s.jsonl", [1], resume=True)
    assert (tmp_path / "s.jsonl").read_bytes() == _line(1)
    assert (tmp_path / "s.run.json").exists()


@pytest.mark.parametrize("name", ["s.jsonl", "s.errors.jsonl"])
def test_resume_after_a_tear_at_every_byte(tmp_path, name):
    """Whatever prefix of a batch a kill leaves: whole records stay, the torn one goes, nothing stands twice."""
    _write(tmp_path / "s.jsonl", [1, 3], [2, 5])
    path = tmp_path / name
    whole = path.read_bytes()
    first = whole.index(b"\n")
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with ScoreWriter(str(tmp_path / "s.jsonl"), resume=True) as writer:
            writer.begin(_run())
        # A record that lacks only its newline is complete.
        kept = 2 if size >= len(whole) - 1 else 1 if size >= first else 0
        assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:kept]), size
        assert len(writer.done) == 2 + kept


def test_resume_cuts_a_tail_of_zeros_that_a_power_cut_leaves(tmp_path):
    _write(tmp_path / "s.jsonl", [1])
    with (tmp_path / "s.jsonl").open("ab") as stream:
        stream.write(bytes(4096))
    _write(tmp_path / "s.jsonl", [2], resume=True)
    assert (tmp_path / "s.jsonl").read_bytes() == _line(1) + _line(2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "0.2.0"}, 'version was "0.1.0" and is "0.2.0" now'),
        ({"reference": "m@2"}, 'reference was "m@1" and is "m@2" now'),
        ({"inputs": (RunInput("other.jsonl", 10, "aa"),)}, 'inputs.0.path was "in.jsonl" and is "other.jsonl" now'),
        ({"inputs": (RunInput("in.jsonl", 10, "bb"),)}, 'inputs.0.sha256 was "aa" and is "bb" now'),
        ({"inputs": ()}, 'inputs.0.path was "in.jsonl" and is absent now'),
        ({"settings": {"dtype": "float32", "credit": {"horizon": 1}}}, "settings.credit.horizon was 3 and is 1 now"),
        ({"settings": {"dtype": "float32", "credit": {"horizon": 3}, "x": 1}}, "settings.x was absent and is 1 now"),
    ],
)
def test_resume_refuses_another_run_and_changes_nothing(tmp_path, changes, words):
    _write(tmp_path / "s.jsonl", [1])
    with (tmp_path / "s.jsonl").open("ab") as stream:
        stream.write(b'{"torn')
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    with pytest.raises(OutputError, match="refusing to resume") as caught:
        _write(tmp_path / "s.jsonl", [2], run=_run(**changes), resume=True)
    assert words in str(caught.value)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


def test_resume_needs_the_run_file(tmp_path):
    _write(tmp_path / "s.jsonl", [1])
    (tmp_path / "s.run.json").unlink()
    with pytest.raises(OutputError, match=r"cannot resume without .*s\.run\.json"):
        _write(tmp_path / "s.jsonl", [2], resume=True)
    (tmp_path / "s.run.json").write_text('{"half')
    with pytest.raises(OutputError, match=r"s\.run\.json: expected JSON"):
        _write(tmp_path / "s.jsonl", [2], resume=True)


def test_resume_refuses_damage_in_the_middle_and_doubles(tmp_path):
    _write(tmp_path / "s.jsonl", [1, 2])
    (tmp_path / "s.jsonl").write_bytes(_line(1) + b"\x00\x00\n" + _line(3))
    with pytest.raises(OutputError, match=r"s\.jsonl:2: .*damaged line"):
        _write(tmp_path / "s.jsonl", [4], resume=True)
    (tmp_path / "s.jsonl").write_bytes(_line(1) + _line(1))
    with pytest.raises(OutputError, match=r"s\.jsonl:2: in\.jsonl:1 stands in the output twice"):
        _write(tmp_path / "s.jsonl", [4], resume=True)


def test_two_writers_are_one_too_many(tmp_path):
    with ScoreWriter(str(tmp_path / "s.jsonl")) as first:
        first.begin(_run())
        with pytest.raises(OutputError, match="another process is writing into it"):
            _write(tmp_path / "s.jsonl", [1], overwrite=True)
        first.write([_line(1)], [_line(2)])
    assert (tmp_path / "s.jsonl").read_bytes() == _line(1)
    assert (tmp_path / "s.errors.jsonl").read_bytes() == _line(2)


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("s.jsonl.gz", {}, "expected a name ending in .jsonl, or '-'"),
        ("s", {}, "expected a name ending in .jsonl, or '-'"),
        ("none/s.jsonl", {}, "the folder .*none' does not exist"),
        ("folder.jsonl", {}, "expected a regular file"),
        ("s.jsonl", {"resume": True, "overwrite": True}, "expected one of --resume and --overwrite, got both"),
    ],
)
def test_names_that_cannot_be_written(tmp_path, name, mode, words):
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(OutputError, match=words):
        ScoreWriter(str(tmp_path / name), **mode)
    assert [f.name for f in tmp_path.iterdir()] == ["folder.jsonl"]


def test_standard_output_cannot_be_resumed():
    with pytest.raises(OutputError, match="need an output file, got '-'"):
        ScoreWriter("-", resume=True)


def test_a_full_disk_leaves_whole_batches(tmp_path):
    """A file size limit makes a write stop halfway, as a full disk does."""
    code = f"""
import resource
from trace_fast.errors import OutputError
from trace_fast.output import RunDescription, encode_record
from trace_fast.score_writer import ScoreWriter
line = encode_record({{"id": "r", "source": "x" * 100}})
resource.setrlimit(resource.RLIMIT_FSIZE, (5 * len(line) + 30, resource.RLIM_INFINITY))
with ScoreWriter({str(tmp_path / "s.jsonl")!r}) as writer:
    writer.begin(RunDescription("1", "m", (), {{}}))
    writer.write([line] * 2, [])
    writer.write([line] * 2, [line])
    try:
        writer.write([line] * 2, [line])
    except OutputError as error:
        print(error, writer.n_scored, writer.n_failed)
print(len(line))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message, size = done.stdout.splitlines()
    assert message == f"{tmp_path / 's.jsonl'}: cannot be written: File too large 4 2"
    assert (tmp_path / "s.jsonl").stat().st_size == 4 * int(size)
