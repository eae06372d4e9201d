"""``trace-fast score`` as a process: terminals, pipes, signals and disks that refuse."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest


def _records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_on_a_terminal_there_is_a_bar_and_the_data_stays_text(fake_command, record, write_jsonl, tmp_path):
    hostile = "\x1b]0;owned\x07[red]x[/red]"
    path = write_jsonl([record(n, id=f"{hostile}{n}") for n in range(20)])
    model = f"fake:pack=1:sleep=0.02:fail={hostile}7"
    ours, theirs = pty.openpty()
    line = fake_command("score", path, "--model", model, "--out", tmp_path / "s.jsonl")
    with subprocess.Popen(line, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}):
        os.close(theirs)
        shown = b""
        while chunk := _read_terminal(ours):
            shown += chunk
    os.close(ours)
    text = shown.decode()
    assert "/20" in text  # the bar's count
    assert "\x1b]0;owned" not in text
    assert "\\x1b]0;owned\\x07[red]x[/red]7" in text
    assert "19 records scored, 1 failed" in text


def _read_terminal(handle):
    try:
        return os.read(handle, 1 << 16)
    except OSError:  # Linux ends a terminal without writers with EIO
        return b""


def test_a_closed_pipe_and_a_full_device_are_one_clear_line(fake_command, record, write_jsonl):
    path = write_jsonl([record(n) for n in range(2000)])
    line = fake_command("score", path, "--model", "fake:pack=100", "--out", "-")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        first = json.loads(process.stdout.readline())
        process.stdout.close()
        stderr = process.stderr.read().decode()
    assert first["id"] == "r0"
    assert process.returncode == 1
    assert stderr.splitlines()[0] == "error: standard output: cannot be written: Broken pipe"
    assert "Traceback" not in stderr
    with open("/dev/full", "wb") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: standard output: cannot be written: No space left on device\n"


def test_a_full_disk_midway_keeps_whole_records_and_resumes(fake_cli, invoke, record, write_jsonl, tmp_path):
    """The run's files may not grow past a limit, as on a full disk; then the limit is gone and the run goes on."""
    path = write_jsonl([record(n) for n in range(60)])
    whole, out = tmp_path / "whole.jsonl", tmp_path / "s.jsonl"
    assert invoke("score", path, "--model", "fake", "--out", whole).exit_code == 0
    done = _run_with_file_limit(9000, fake_cli, "score", path, "--model", "fake", "--out", out)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == f"error: {out}: cannot be written: File too large"
    assert "--resume" in done.stderr.splitlines()[1]
    kept = out.read_bytes()
    assert kept.endswith(b"\n")
    assert 0 < len(kept) <= 9000
    assert whole.read_bytes().startswith(kept)
    assert invoke("score", path, "--model", "fake", "--out", out, "--resume").exit_code == 0
    assert out.read_bytes() == whole.read_bytes()


def test_a_report_that_does_not_fit_on_the_disk_leaves_complete_scores(fake_cli, record, write_jsonl, tmp_path):
    pytest.importorskip("plotly", reason="the report needs plotly (extra report)")
    path, out, report = write_jsonl([record(n) for n in range(4)]), tmp_path / "s.jsonl", tmp_path / "r.html"
    arguments = ["score", path, "--model", "fake", "--out", out, "--report", report]
    done = _run_with_file_limit(100_000, fake_cli, *arguments)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "the scores are complete; trace-fast report writes the report from them"
    assert len(_records(out)) == 4
    assert not report.exists()


def _run_with_file_limit(size, fake_cli, *arguments):
    """The fake command line where no file may grow past ``size`` bytes: writes stop halfway, as on a full disk."""
    code = (
        "import resource, runpy, sys\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, resource.RLIM_INFINITY))\n"
        f"sys.argv = {['trace-fast', *map(str, arguments)]!r}\n"
        f"runpy.run_path({fake_cli.__file__!r}, run_name='__main__')\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_folder_that_cannot_be_written_is_one_clear_line(invoke, record, write_jsonl):
    path = write_jsonl([record(0)])
    result = invoke("score", path, "--model", "fake", "--out", "/proc/s.jsonl")  # not even root writes there
    assert result.exit_code == 2
    assert result.stderr == "error: /proc/s.jsonl: cannot be written: No such file or directory\n"


@pytest.mark.parametrize(("which", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_stop_between_records_and_say_how_to_go_on(fake_command, record, write_jsonl, tmp_path, which, code):
    path = write_jsonl([record(n) for n in range(300)])
    out = tmp_path / "s.jsonl"
    arguments = ["score", path, "--model", "fake:pack=1:sleep=0.05", "--out", out]
    process = subprocess.Popen(fake_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (out.exists() and out.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, which)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    done = _records(out)
    assert 0 < len(done) < 300
    assert stderr.splitlines()[-2] == (
        f"{len(done)} whole record{'' if len(done) == 1 else 's'} in {out}; the same command with --resume (and "
        "without --overwrite) continues"
    )
    assert "Traceback" not in stderr
