"""``trace-fast info``: what it says is what is there."""

from __future__ import annotations

import importlib.util
import json
from importlib import metadata

import pytest
import torch
from packaging.requirements import Requirement

from trace_fast import native
from trace_fast.backends import probe
from trace_fast.cli_info import missing_extras


@pytest.fixture
def info(invoke):
    result = invoke("info", "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_versions_are_those_installed(info):
    versions = info["versions"]
    assert versions["trace_fast"] == metadata.version("trace-fast")
    assert versions["torch"] == torch.__version__
    assert versions["transformers"] == metadata.version("transformers")
    if importlib.util.find_spec("triton") is None:
        assert versions["triton"].startswith("not installed")


def test_native_module_and_processor(info):
    status = native.status()
    assert info["native"] == {"available": status.available, "reason": status.reason}
    if status.available:
        assert info["cpu"]["features"] == native.cpu_features()


def test_devices_say_why_there_is_no_gpu(info):
    assert info["devices"][0]["device"] == "cpu"
    if not torch.cuda.is_available():
        reason = "torch is a CPU build" if torch.version.cuda is None else "torch finds no CUDA device"
        assert info["devices"][1:] == [{"device": "cuda", "absent": reason}]
    else:
        assert [d["device"] for d in info["devices"][1:]] == [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def test_every_backend_comes_with_its_reason(info):
    expected = [[s.op, s.name, s.available, s.chosen, s.reason] for s in probe()]
    assert [list(backend.values()) for backend in info["backends"]] == expected
    assert all(backend["reason"] for backend in info["backends"])


def test_extras_name_exactly_what_is_not_installed():
    extras = missing_extras()
    assert {"gpu", "rollout", "train", "report", "dev", "demo"} <= set(extras)
    assert "pytest" not in extras["dev"]  # it runs this test
    installed = {name.lower().replace("_", "-") for name in metadata.packages_distributions()}
    distributions = {d.metadata["Name"].lower().replace("_", "-") for d in metadata.distributions()} | installed
    for names in extras.values():
        assert not {name.lower().replace("_", "-") for name in names} & distributions
    all_names = {Requirement(r).name for r in metadata.requires("trace-fast") or () if "extra ==" in r}
    for name in all_names:
        absent = name.lower().replace("_", "-") not in distributions
        assert absent == any(name in names for names in extras.values()), name


def test_plain_text_says_the_same(invoke, info):
    text = invoke("info").stdout
    for section in ("versions", "devices", "native module", "cpu", "backends", "extras"):
        assert f"\n{section}\n" in "\n" + text
    assert info["native"]["reason"] in text
    for backend in info["backends"]:
        [line] = [x for x in text.splitlines() if x.split()[:2] == [backend["op"], backend["name"]]]
        assert backend["reason"] in line
        assert ("chosen " in line.split(backend["reason"])[0]) == backend["chosen"]


def test_version_option(invoke):
    assert invoke("--version").stdout == f"trace-fast {metadata.version('trace-fast')}\n"
