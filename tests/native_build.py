"""pytest plugin ``-p native_build --native-build FOLDER``: tests another build of the native module.

``make sanitize`` runs the op tests on a build with the address and undefined-behaviour sanitizers.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native-build", type=Path, help="folder with a built _native module")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--native-build")
    if folder is None:
        return
    [file] = folder.glob("_native*.so")
    spec = importlib.util.spec_from_file_location("trace_fast._native", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["trace_fast._native"] = module


def pytest_report_header(config: pytest.Config) -> str:
    return f"native module: {config.getoption('--native-build') or 'as installed'}"
