"""What the package imports is what it declares."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def _imported() -> set[str]:
    names: set[str] = set()
    for folder in ("trace_fast", "kernels"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names.update(alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"trace_fast"}


def test_every_library_that_is_imported_is_declared() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    names = {re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower() for requirement in declared}
    providers = importlib.metadata.packages_distributions()
    imported = _imported()
    assert imported >= {"torch", "packaging", "safetensors", "plotly"}  # else this looks at nothing
    undeclared = {module for module in imported if not names & {d.lower() for d in providers.get(module, [module])}}
    assert undeclared == set()
