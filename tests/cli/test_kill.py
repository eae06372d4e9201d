"""``kill -9`` at random moments, resumed until done: byte for byte what an undisturbed run writes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress

import pytest


@pytest.fixture(scope="module")
def served(fake_command):
    """``served(*arguments)`` starts a run in a process of its own and gives (pid, function that waits for its code)."""
    server = subprocess.Popen(fake_command("--serve"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with server:

        def start(*arguments):
            server.stdin.write(json.dumps([str(a) for a in arguments]) + "\n")
            server.stdin.flush()
            pid = int(server.stdout.readline())
            return pid, lambda: int(server.stdout.readline())

        yield start
        server.stdin.close()


@pytest.mark.parametrize("seed", range(2))
def test_killed_and_resumed_equals_undisturbed(invoke, served, record, write_jsonl, tmp_path, seed):
    """Errors of reading (broken lines) and of scoring (NaN) are mixed in, so that both files grow."""
    rng = random.Random(seed)
    path = write_jsonl([record(n) if n % 7 else "{broken" for n in range(300)])
    failing = ",".join(f"r{n}" for n in range(300) if n % 11 == 3)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    assert invoke("score", path, "--model", f"fake:pack=3:fail={failing}", "--out", whole).exit_code == 1

    kills, grown = 0, 0
    while True:
        before = out.stat().st_size if out.exists() else 0
        model = f"fake:pack={rng.randint(1, 5)}:sleep=0.003:fail={failing}"
        pid, wait = served("score", path, "--model", model, "--out", out, "--resume")
        if kills < 14:
            if kills % 3:  # any moment while it writes; else any moment from the start on
                deadline = time.monotonic() + 30
                while (out.stat().st_size if out.exists() else 0) == before and time.monotonic() < deadline:
                    time.sleep(0.0005)
            time.sleep(rng.random() * 0.05)
            with suppress(ProcessLookupError):  # it was done before
                os.kill(pid, signal.SIGKILL)
        code = wait()
        if code != -signal.SIGKILL:
            break
        kills += 1
        grown += (out.stat().st_size if out.exists() else 0) > before
    assert code == 1
    assert kills >= 6  # else the test has not tried what it says
    assert grown >= 3
    assert out.read_bytes() == whole.read_bytes()
    assert out.with_suffix(".errors.jsonl").read_bytes() == whole.with_suffix(".errors.jsonl").read_bytes()
    names = ["killed.errors.jsonl", "killed.jsonl", "killed.run.json"]
    assert sorted(f.name for f in tmp_path.iterdir() if "killed" in f.name) == names


@pytest.mark.parametrize("tear", ["scores", "errors", "both"])
def test_every_torn_state_a_kill_can_leave_between_the_two_files(invoke, record, write_jsonl, tmp_path, tear):
    """The errors file is written first: it may be ahead of the scores, by whole records or with a torn line."""
    lines = [record(n) if n % 3 else "{broken" for n in range(12)]
    path = write_jsonl(lines)
    whole = tmp_path / "whole.jsonl"
    assert invoke("score", path, "--model", "fake:pack=2", "--out", whole).exit_code == 1
    names = {"scores": whole, "errors": whole.with_suffix(".errors.jsonl")}
    contents = {name: file.read_bytes() for name, file in names.items()}
    for step in range(0, 100, 7):
        for name, file in names.items():
            share = step if tear in (name, "both") else 100
            file.write_bytes(contents[name][: len(contents[name]) * share // 100])
        assert invoke("score", path, "--model", "fake:pack=5", "--out", whole, "--resume").exit_code == 1
        assert {name: file.read_bytes() for name, file in names.items()} == contents, step
