"""The Triton kernels in Triton's interpreter, a process an op and one for the scorer on all of them: the interpreter
must be chosen before Triton is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(file.name for file in HERE.glob("interpreted_*.py"))


def test_every_op_with_triton_kernels_is_here_and_the_scorer() -> None:
    kernels = HERE.parents[1] / "kernels"
    ops = {file.parent.name for file in kernels.glob("*/triton_impl.py")}
    assert {file.removeprefix("interpreted_").removesuffix(".py") for file in FILES} == ops | {"scorer"}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)")
@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(file: str) -> None:
    without = [f"no:{plugin}" for plugin in ("cacheprovider", "xdist", "benchmark")]
    options = [option for plugin in without for option in ("-p", plugin)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *options, str(HERE / file)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1], "nothing may be left out unnoticed"
