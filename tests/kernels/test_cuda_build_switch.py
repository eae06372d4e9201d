"""TRACE_FAST_CUDA as setup.py and CMake take it: passed on, refused, and missed where nvcc is asked for but absent."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = ("cmake", "c++", "make", "sh")
needs_tools = pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)} on the PATH")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What setup.py reads, without sources."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "trace_fast").mkdir()
    (tmp_path / "trace_fast" / "__init__.py").write_text("")
    return tmp_path


def build(tree: Path, **variables: str) -> tuple[int, str, str]:
    """Exit status and output of ``setup.py build`` with a cmake that only notes how it was called, and that note."""
    tools = tree / "tools"
    tools.mkdir()
    note = tree / "called"
    (tools / "cmake").write_text(f'#!/bin/sh\necho "$@" >> "{note}"\nexit 1\n')
    (tools / "cmake").chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRACE_FAST_")}
    environment = kept | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"} | variables
    command = [sys.executable, "setup.py", "-q", "build"]
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr, note.read_text() if note.exists() else ""


@needs_tools
@pytest.mark.parametrize(
    ("value", "option"), [("", ""), ("0", "-DTRACE_FAST_CUDA=OFF"), ("1", "-DTRACE_FAST_REQUIRE_CUDA=ON")]
)
def test_the_choice_reaches_cmake(tree: Path, value: str, option: str) -> None:
    status, output, called = build(tree, TRACE_FAST_CUDA=value)
    assert status != 0, "the cmake of this test fails"
    assert "building trace_fast._native failed" in output
    assert [word for word in called.split() if "CUDA" in word] == ([option] if option else [])


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TRACE_FAST_CUDA": "yes"}, "TRACE_FAST_CUDA: expected 0, 1 or nothing, got 'yes'"),
        ({"TRACE_FAST_CUDA": "1", "TRACE_FAST_NATIVE": "0"}, "which TRACE_FAST_NATIVE=0 leaves out"),
    ],
)
def test_what_cannot_be_is_refused(tree: Path, variables: dict[str, str], message: str) -> None:
    status, output, called = build(tree, **variables)
    assert status != 0
    assert message in output
    assert called == ""


@needs_tools
def test_cmake_misses_nvcc_where_it_is_required(tmp_path: Path) -> None:
    pybind11 = pytest.importorskip("pybind11", reason="pybind11 is not installed")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for tool in (*TOOLS, "cc", "gcc", "g++", "ld", "as", "ar", "ranlib", "uname", "gmake"):
        found = shutil.which(tool)
        if found is not None:
            (bin_folder / tool).symlink_to(os.path.realpath(found) if tool != "cmake" else found)
    hidden = ("PATH", "CUDACXX", "CUDA_PATH", "CUDA_HOME", "CUDAToolkit_ROOT")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"PATH": str(bin_folder)}
    command = ["cmake", "-S", str(REPOSITORY), "-B", str(tmp_path / "build"), "-DTRACE_FAST_REQUIRE_CUDA=ON"]
    command += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "TRACE_FAST_CUDA=1 asks for the CUDA kernels, but no nvcc is found" in " ".join(result.stderr.split())
