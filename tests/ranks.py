"""Runs a function in several processes that form a gloo group on loopback: what tests of distributed code need.

``run_ranks(4, "rank_jobs:gradients_and_weights", path, ...)`` starts four interpreters; each initialises the default
group and calls the function with the arguments, which travel as JSON. It waits for all of them, and raises with their
output when one fails.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent


def run_ranks(n: int, function: str, *arguments: Any, timeout: float = 240.0) -> None:
    """Runs ``module:name`` of the tests folder in ``n`` processes."""
    for process, log in (started := start_ranks(n, function, *arguments)):
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            _kill(started)
            raise AssertionError(f"{function}: no end after {timeout} s:\n{_read(log)}") from None
        if process.returncode:
            time.sleep(0.5)  # the rank that failed first may be another
            _kill(started)
            raise AssertionError(f"{function}:\n" + "\n".join(_read(log) for _, log in started))


def start_ranks(n: int, function: str, *arguments: Any) -> list[tuple[subprocess.Popen[bytes], str]]:
    """As ``run_ranks``, without waiting: the processes, and the file that each one's output goes to."""
    port = _free_port()
    started = []
    for rank in range(n):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(TESTS),
        }
        handle, log = tempfile.mkstemp(suffix=f".rank{rank}.log")
        command = [sys.executable, "-m", "ranks", function, json.dumps(arguments)]
        started.append((subprocess.Popen(command, env=environment, stdout=handle, stderr=handle, cwd=TESTS), log))
        os.close(handle)
    return started


def _kill(started: list[tuple[subprocess.Popen[bytes], str]]) -> None:
    for process, _ in started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _read(log: str) -> str:
    return Path(log).read_text(errors="replace")[-4000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    import torch.distributed as dist

    module, _, name = sys.argv[1].partition(":")
    dist.init_process_group("gloo")
    try:
        getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
