"""The native module's status in every state of an installation, and the instruction sets it reports."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from trace_fast import native

REPOSITORY = Path(__file__).resolve().parents[1]
CPUINFO = Path("/proc/cpuinfo")
X86_NAMES = {
    *("avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
}
# our name -> the kernel's name in /proc/cpuinfo
ARM_NAMES = {
    "neon": "asimd",
    "neon_fp16": "asimdhp",
    "neon_dotprod": "asimddp",
    "neon_bf16": "bf16",
    "neon_i8mm": "i8mm",
    "sve": "sve",
    "sve2": "sve2",
}


def built_here() -> bool:
    return native.status().available


def test_this_installation_is_consistent() -> None:
    # Where the tools to build it are there, the module must be there too: "absent" would be a broken build.
    record = json.loads((Path(native.__file__).with_name("_native_build.json")).read_text(encoding="utf-8"))
    status = native.status()
    assert status.available == record["built"], status
    if status.available:
        assert native.module().abi_version() == native.EXPECTED_ABI_VERSION
    else:
        assert status.reason == f"not built: {record['reason']}"


@pytest.mark.skipif(not built_here(), reason=f"native module: {native.status().reason}")
def test_cpu_features_have_the_same_names_everywhere() -> None:
    features = native.cpu_features()
    assert set(features) == X86_NAMES | set(ARM_NAMES)
    assert {type(value) for value in features.values()} == {bool}


@pytest.mark.skipif(not built_here(), reason=f"native module: {native.status().reason}")
@pytest.mark.skipif(not CPUINFO.exists(), reason=f"no {CPUINFO} to compare with")
def test_cpu_features_are_those_the_kernel_reports() -> None:
    lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    key = {"x86_64": "flags", "aarch64": "Features"}.get(platform.machine())
    if key is None:
        pytest.skip(f"names of instruction sets are not known for {platform.machine()}")
    flags = set(next(line for line in lines if line.split(":")[0].strip() == key).split(":")[1].split())
    if key == "flags":
        expected = {name: name in flags for name in X86_NAMES} | dict.fromkeys(ARM_NAMES, False)
    else:
        expected = {name: theirs in flags for name, theirs in ARM_NAMES.items()} | dict.fromkeys(X86_NAMES, False)
    assert native.cpu_features() == expected


@pytest.fixture
def installation(tmp_path: Path) -> Path:
    """A folder with just the modules that report the native status, in which each state can be laid out."""
    package = tmp_path / "trace_fast"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("native.py", "errors.py"):
        (package / name).write_bytes((REPOSITORY / "trace_fast" / name).read_bytes())
    return package


def report(installation: Path) -> list[str]:
    """``[available, reason]`` of the status, then what ``module()`` raises."""
    code = """
from trace_fast import native
from trace_fast.errors import ConfigError
status = native.status()
print(status.available)
print(status.reason)
try:
    native.module()
except ConfigError as error:
    print(error)
"""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    # -S: an editable installation of the checkout would otherwise lend its own native module.
    command = [sys.executable, "-S", "-c", code]
    result = subprocess.run(command, cwd=installation.parent, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def write_record(installation: Path, *, built: bool, reason: str | None = None) -> None:
    (installation / "_native_build.json").write_text(json.dumps({"built": built, "reason": reason}))


def test_status_without_an_installation(installation: Path) -> None:
    available, reason, raised = report(installation)
    assert (available, reason) == ("False", "not built: this source tree was never installed (pip install -e .)")
    assert raised == f"the native module trace_fast._native is asked for, but it is {reason}"


def test_status_carries_the_recorded_reason(installation: Path) -> None:
    write_record(installation, built=False, reason="cmake not found")
    assert report(installation)[:2] == ["False", "not built: cmake not found"]


def test_status_of_a_damaged_record(installation: Path) -> None:
    (installation / "_native_build.json").write_text("{")
    available, reason, _ = report(installation)
    assert available == "False"
    assert reason.startswith(f"not built: its build record {installation / '_native_build.json'} is unreadable")


def test_status_of_a_module_that_does_not_load(installation: Path) -> None:
    write_record(installation, built=True)
    (installation / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"not a shared library")
    available, reason, _ = report(installation)
    assert available == "False"
    assert reason.startswith("built, but failed to load: ")
    assert "_native" in reason


def test_status_of_a_module_that_disappeared(installation: Path) -> None:
    write_record(installation, built=True)
    available, reason, _ = report(installation)
    assert available == "False"
    assert reason == "built, but failed to load: No module named 'trace_fast._native'"


def test_status_of_a_module_for_another_interface(installation: Path) -> None:
    write_record(installation, built=True)
    (installation / "_native.py").write_text("def abi_version():\n    return 0\n")
    available, reason, _ = report(installation)
    assert available == "False"
    assert reason == (
        f"built, but for interface version 0 where this package expects {native.EXPECTED_ABI_VERSION}; "
        "install the package again"
    )
