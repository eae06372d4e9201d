"""Where packages are found once installed, what an installation contains, and that ``kernels`` hides nobody."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
OP_FOLDERS = sorted(path.parent.name for path in REPOSITORY.glob("kernels/*/__init__.py"))


def run_python(code: str, *, cwd: Path, path: tuple[Path, ...] = ()) -> str:
    """Runs ``code`` in a new interpreter (the current folder comes first on its path) and returns its output."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    if path:
        env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    result = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# --- the folder kernels/ ------------------------------------------------------------------------------------


def test_kernels_folder_is_no_regular_package() -> None:
    assert OP_FOLDERS, "no op folder found, so this file tests nothing"
    assert not (REPOSITORY / "kernels" / "__init__.py").exists()


def test_import_kernels_from_the_repository_root_gives_no_package_of_ours() -> None:
    # Without a distribution "kernels", Python still makes an importable namespace of any folder of that name in the
    # current directory. That is harmless as long as it has no file and exports nothing: whoever asks for the real
    # package (transformers does) then sees that it is absent.
    code = """
import json
try:
    import kernels
except ModuleNotFoundError:
    print(json.dumps({"kind": "absent"}))
else:
    public = [name for name in vars(kernels) if not name.startswith("_")]
    kind = "namespace" if kernels.__file__ is None else "regular"
    print(json.dumps({"kind": kind, "file": kernels.__file__, "public": public}))
"""
    found = json.loads(run_python(code, cwd=REPOSITORY))
    if found["kind"] == "regular":
        assert importlib.metadata.version("kernels")  # a real distribution is installed, and it won
        assert not Path(found["file"]).is_relative_to(REPOSITORY / "kernels")
    elif found["kind"] == "namespace":
        assert found["public"] == []


def test_installed_regular_kernels_package_wins_over_the_folder(tmp_path: Path) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("ORIGIN = 'the installed distribution'\n")
    # PYTHONPATH comes after the current folder, as site-packages does.
    code = f"""
import sys
assert sys.path[0] == "" and {str(tmp_path)!r} in sys.path[1:]
import kernels
print(kernels.ORIGIN, kernels.__file__)
import trace_fast.kernels
print(trace_fast.kernels.__file__)
"""
    lines = run_python(code, cwd=REPOSITORY, path=(tmp_path,)).splitlines()
    assert lines[0] == f"the installed distribution {package / '__init__.py'}"
    assert Path(lines[1]) == REPOSITORY / "trace_fast" / "kernels" / "__init__.py"


def test_transformers_does_not_take_the_folder_for_the_kernels_distribution() -> None:
    installed = any(d.metadata["Name"] == "kernels" for d in importlib.metadata.distributions())
    if installed:
        pytest.skip("the distribution 'kernels' is installed here, so transformers rightly finds it")
    code = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    assert run_python(code, cwd=REPOSITORY) == "False"


@pytest.mark.parametrize("op", OP_FOLDERS)
def test_op_folder_is_installed_below_trace_fast_kernels(op: str, tmp_path: Path) -> None:
    code = f"import importlib.util as u; print(u.find_spec('trace_fast.kernels.{op}').origin)"
    for cwd in (REPOSITORY, tmp_path):
        found = Path(run_python(code, cwd=cwd))
        assert found.parts[-3:] == ("kernels", op, "__init__.py")
        assert found.read_bytes() == (REPOSITORY / "kernels" / op / "__init__.py").read_bytes()


# --- the package --------------------------------------------------------------------------------------------


def test_version_is_that_of_the_project() -> None:
    import trace_fast

    assert trace_fast.__version__ == PYPROJECT["project"]["version"] == importlib.metadata.version("trace-fast")
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(trace_fast.__version__)}\] - ", changelog, re.MULTILINE)


def test_import_loads_no_heavy_module(tmp_path: Path) -> None:
    code = """
import sys, trace_fast
print(*sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'transformers', 'pyarrow', 'triton', 'plotly'}))
"""
    assert run_python(code, cwd=tmp_path) == ""


def normalised(requirement: str) -> str:
    """Distribution name of a requirement, spelled as package indexes compare it."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def test_constraints_pin_one_version_of_everything_the_makefile_installs() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins), pins
    names = [normalised(pin) for pin in pins]
    assert len(set(names)) == len(names)

    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *PYPROJECT["build-system"]["requires"]]
    for extra in ("report", "dev", "demo"):
        wanted += project["optional-dependencies"][extra]
    for variable in ("DEMO_DATA", "TEST_DATA"):
        match = re.search(rf"^{variable} := (.*)$", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert match
        wanted += match.group(1).split()
    assert {normalised(r) for r in wanted} - set(names) == set()


# --- building -----------------------------------------------------------------------------------------------


@pytest.fixture
def source_tree(tmp_path: Path) -> Path:
    """A copy of what the build reads, so that building leaves the checkout alone."""
    tree = tmp_path / "source"
    unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd", "_native_build.json")
    for folder in ("trace_fast", "kernels", "trainer", "csrc"):
        if (REPOSITORY / folder).is_dir():
            shutil.copytree(REPOSITORY / folder, tree / folder, ignore=unwanted)
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md"):
        if (REPOSITORY / name).exists():
            shutil.copy(REPOSITORY / name, tree / name)
    return tree


def run_setup(tree: Path, *command: str, native: str | None = None, path: str | None = None) -> tuple[int, str]:
    """Runs ``setup.py COMMAND`` in ``tree``; returns exit status and everything printed."""
    env = {k: v for k, v in os.environ.items() if k != "TRACE_FAST_NATIVE"}
    if native is not None:
        env["TRACE_FAST_NATIVE"] = native
    if path is not None:
        env["PATH"] = path
    result = subprocess.run(
        [sys.executable, "setup.py", *command], cwd=tree, env=env, capture_output=True, text=True, check=False
    )
    return result.returncode, result.stdout + result.stderr


def build_record(folder: Path) -> dict[str, object]:
    record: dict[str, object] = json.loads((folder / "trace_fast" / "_native_build.json").read_text(encoding="utf-8"))
    return record


def test_pure_wheel_holds_every_op_where_it_belongs(source_tree: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    env = os.environ | {"TRACE_FAST_NATIVE": "0"}
    subprocess.run([*command, str(tmp_path / "wheels"), "."], cwd=source_tree, env=env, check=True)
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name == f"trace_fast-{PYPROJECT['project']['version']}-py3-none-any.whl"

    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(installed)
    for source in REPOSITORY.glob("kernels/*/*.py"):
        assert f"trace_fast/{source.relative_to(REPOSITORY).as_posix()}" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"trace_fast", f"trace_fast-{PYPROJECT['project']['version']}.dist-info"}
    assert not [name for name in names if name.endswith((".so", ".pyd"))]

    code = "from trace_fast import native; print(native.__file__); print(native.status())"
    lines = run_python(code, cwd=tmp_path, path=(installed,)).splitlines()
    assert lines == [
        str(installed / "trace_fast" / "native.py"),
        "NativeStatus(available=False, reason='not built: switched off by TRACE_FAST_NATIVE=0 at build time')",
    ]


def test_data_files_of_the_package_are_installed(source_tree: Path, tmp_path: Path) -> None:
    suffixes = {".jinja", ".j2", ".html", ".css", ".js", ".json", ".jsonl", ".md"}
    status, output = run_setup(source_tree, "-q", "build_py", "--build-lib", str(tmp_path / "built"), native="0")
    assert status == 0, output
    data = [p for p in (source_tree / "trace_fast").rglob("*") if p.suffix in suffixes or p.name == "py.typed"]
    assert data
    for file in data:
        assert (tmp_path / "built" / file.relative_to(source_tree)).read_bytes() == file.read_bytes()


def test_missing_cmake_gives_a_pure_build_that_says_so(source_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    built = tmp_path / "built"
    status, output = run_setup(source_tree, "-q", "build", "--build-lib", str(built), path=str(tmp_path / "empty"))
    assert status == 0, output
    assert build_record(built) == {"built": False, "reason": "cmake not found"}
    assert not [p for p in built.rglob("_native.*") if p.suffix in (".so", ".pyd")]


def test_missing_compiler_gives_a_pure_build_that_says_so(source_tree: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "cmake").write_text("#!/bin/sh\nexit 1\n")
    (tools / "cmake").chmod(0o755)
    status, output = run_setup(source_tree, "-q", "build", "--build-lib", str(tmp_path / "built"), path=str(tools))
    assert status == 0, output
    reason = build_record(tmp_path / "built")["reason"]
    assert isinstance(reason, str)
    assert reason.startswith("no C++ compiler found (looked for ")


def test_native_asked_for_but_impossible_fails(source_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    status, output = run_setup(source_tree, "-q", "build", native="1", path=str(tmp_path / "empty"))
    assert status != 0
    assert "TRACE_FAST_NATIVE=1 asks for the native module, but cmake not found" in output


def test_unknown_native_choice_fails(source_tree: Path) -> None:
    status, output = run_setup(source_tree, "-q", "build", native="yes")
    assert status != 0
    assert "TRACE_FAST_NATIVE: expected 0, 1 or nothing, got 'yes'" in output


def test_broken_compilation_fails_with_the_compilers_words(source_tree: Path) -> None:
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("needs cmake and a C++ compiler (c++) on the PATH")
    bindings = source_tree / "csrc" / "bindings.cpp"
    bindings.write_text(bindings.read_text(encoding="utf-8") + "\nint broken = no_such_name_anywhere;\n")
    status, output = run_setup(source_tree, "-q", "build")
    assert status != 0
    assert "no_such_name_anywhere" in output
    assert "To install without the native module, set TRACE_FAST_NATIVE=0" in output
    assert not [p for p in source_tree.rglob("_native.*") if p.suffix in (".so", ".pyd")]
