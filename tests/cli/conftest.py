"""Fixtures of the command-line tests: a scorer without a model, small rollouts, runs in and out of process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from trace_fast.cli import build_app

FAKE_CLI = Path(__file__).with_name("fake_cli.py")


@pytest.fixture(scope="session")
def fake_cli() -> ModuleType:
    """``fake_cli.py`` as a module."""
    spec = importlib.util.spec_from_file_location("fake_cli", FAKE_CLI)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_cli"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def invoke(fake_cli: ModuleType) -> Callable[..., Result]:
    """Runs the application in this process with the fake scorer: ``invoke("score", path, ..., input=b"...")``."""
    app = build_app(open_scorer=fake_cli.open_fake)

    def run(*arguments: object, input: bytes | None = None) -> Result:
        return CliRunner().invoke(app, [str(a) for a in arguments], input=input, catch_exceptions=False)

    return run


@pytest.fixture(scope="session")
def fake_command() -> Callable[..., list[str]]:
    """The same application as a command line for a subprocess."""
    return lambda *arguments: [sys.executable, str(FAKE_CLI), *map(str, arguments)]


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the installed program in a subprocess."""

    def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-c", "from trace_fast.cli import app; app()", *map(str, arguments)]
        return subprocess.run(line, capture_output=True, text=True, check=False, **options)

    return run


@pytest.fixture
def record() -> Callable[..., dict[str, Any]]:
    """A tokens-form record of two turns whose tokens depend on its number."""

    def make(number: int, **changes: Any) -> dict[str, Any]:
        return {
            "id": f"r{number}",
            "group": f"g{number // 4}",
            "input_ids": [5, 6, 7, *(100 + number * 10 + i for i in range(9))],
            "boundaries": [3, 6, 9, 12],
            "answer_ids": [41, 42],
            "opener_ids": [9],
            "reward": float(number % 2),
        } | changes

    return make


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes records (or raw lines) to a file of the test's folder."""

    def write(lines: Sequence[dict[str, Any] | str], name: str = "in.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        return path

    return write
