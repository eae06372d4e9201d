"""Build of trace_fast: where its packages lie, and the optional native module ``trace_fast._native``.

Packages
    ``trace_fast/`` is a usual package. The op folders ``kernels/<op>/`` are installed as ``trace_fast.kernels.<op>``
    and ``trainer/`` as ``trace_fast.trainer``. They are discovered by their ``__init__.py``; run the install again
    after adding one. ``kernels/`` itself has no ``__init__.py``, so that it never hides another package ``kernels``.

Native module
    Environment variable ``TRACE_FAST_NATIVE``, read here only:

    - unset or empty: built when cmake, a C++ compiler, Python's headers and pybind11 are there. When one is missing,
      the install is pure Python and ``trace_fast.native.status()`` names what was missing. When all are there and the
      compilation fails, the install fails and shows the compiler's output: a broken compiler is not a choice.
    - ``0``: not built, whatever is there.
    - ``1``: built; the install fails when something is missing.

    Environment variable ``TRACE_FAST_CUDA``, read here only, says whether its CUDA kernels are built:

    - unset or empty: where CMake finds nvcc.
    - ``0``: not built, which saves the minutes that nvcc takes.
    - ``1``: built; the install fails without nvcc.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NATIVE_MODULE = "trace_fast._native"
BUILD_RECORD = Path("trace_fast") / "_native_build.json"  # read by trace_fast/native.py
CUDA_OPTIONS = {"": [], "0": ["-DTRACE_FAST_CUDA=OFF"], "1": ["-DTRACE_FAST_REQUIRE_CUDA=ON"]}  # CMakeLists.txt
MAPPED_ROOMS = {"kernels": "trace_fast.kernels", "trainer": "trace_fast.trainer"}  # folder -> installed name


def discover_packages() -> tuple[list[str], dict[str, str]]:
    """Names of all packages to install, and the folders of those that do not lie where their name says."""
    packages = find_packages(str(ROOT), include=["trace_fast", "trace_fast.*"])
    package_dir = {}
    for folder, installed in MAPPED_ROOMS.items():
        if (ROOT / folder / "__init__.py").exists():
            package_dir[installed] = folder
        for package in find_packages(str(ROOT / folder)):
            package_dir[f"{installed}.{package}"] = f"{folder}/{package.replace('.', '/')}"
    return packages + list(package_dir), package_dir


def missing_for_native() -> str | None:
    """What keeps the native module from being built here, in words; ``None`` when nothing does."""
    if shutil.which("cmake") is None:
        return "cmake not found"
    compiler = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    names = [compiler.split()[0], "c++", "g++", "clang++", "cl"]
    if not any(shutil.which(name) for name in names):
        return f"no C++ compiler found (looked for {', '.join(dict.fromkeys(names))})"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        return f"Python's headers not found (looked for {header})"
    if importlib.util.find_spec("pybind11") is None:
        return "the Python package pybind11 is not installed"
    return None


def reason_not_built() -> str | None:
    """Applies ``TRACE_FAST_NATIVE`` to ``missing_for_native``; ``None`` means: build."""
    choice, cuda = _switch("TRACE_FAST_NATIVE"), _switch("TRACE_FAST_CUDA")
    if choice == "0" and cuda == "1":
        raise SystemExit("TRACE_FAST_CUDA=1 asks for a part of the native module, which TRACE_FAST_NATIVE=0 leaves out")
    if choice == "0":
        return "switched off by TRACE_FAST_NATIVE=0 at build time"
    missing = missing_for_native()
    if missing is not None and "1" in (choice, cuda):
        name = "TRACE_FAST_NATIVE" if choice == "1" else "TRACE_FAST_CUDA"
        raise SystemExit(f"{name}=1 asks for the native module, but {missing}")
    return missing


def _switch(name: str) -> str:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"{name}: expected 0, 1 or nothing, got {value!r}")
    return value


class CMakeExtension(Extension):
    """An extension whose sources CMakeLists.txt names."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[])


class CMakeBuild(build_ext):
    """Builds ``CMakeExtension``s through CMake; a failing step shows its output and ends the install."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11  # checked for by missing_for_native

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build_dir = Path(self.build_temp).resolve() / "cmake"
        shutil.rmtree(build_dir, ignore_errors=True)  # a cache of another interpreter or compiler misleads CMake
        build_dir.mkdir(parents=True)
        configure = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(build_dir),
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DTRACE_FAST_OUTPUT_DIR={target.parent}",
            *CUDA_OPTIONS[_switch("TRACE_FAST_CUDA")],
        ]
        if shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        self._run(configure)
        jobs = str(self.parallel or os.cpu_count() or 1)
        self._run(["cmake", "--build", str(build_dir), "--config", "Release", "--parallel", jobs])
        if not target.exists():
            raise SystemExit(f"CMake finished, but did not write {target}")

    def _run(self, command: list[str]) -> None:
        """Runs one CMake step; its output goes to the installer's output as it is."""
        code = subprocess.run(command, check=False).returncode
        if code != 0:
            raise SystemExit(
                f"building {NATIVE_MODULE} failed (exit {code} of: {' '.join(command)}); the output above says why. "
                "To install without the native module, set TRACE_FAST_NATIVE=0"
            )


class BuildPy(build_py):
    """Copies the Python files, then records whether and why (not) the native module is built."""

    def run(self) -> None:
        super().run()
        editable = getattr(self, "editable_mode", False)
        base = ROOT if editable else Path(self.build_lib)
        if editable and NOT_BUILT is not None:
            # A module left from an earlier build of this checkout would be loaded in spite of the record.
            for stale in (ROOT / "trace_fast").glob("_native.*"):
                if stale.suffix in (".so", ".pyd"):
                    stale.unlink()
        record = base / BUILD_RECORD
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps({"built": NOT_BUILT is None, "reason": NOT_BUILT}) + "\n", encoding="utf-8")


NOT_BUILT = reason_not_built()
packages, package_dir = discover_packages()
setup(
    packages=packages,
    package_dir=package_dir,
    ext_modules=[CMakeExtension(NATIVE_MODULE)] if NOT_BUILT is None else [],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildPy},
)
