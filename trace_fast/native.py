"""Whether the native module ``trace_fast._native`` is there, and if not, why.

The package works without it. setup.py decides whether it is built (and leaves the reason beside this file);
this module alone imports it, so that a missing, broken or outdated build is reported in one place and wording.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from trace_fast.errors import ConfigError

EXPECTED_ABI_VERSION = 3  # csrc/abi_version.h
_MODULE = "trace_fast._native"
_BUILD_RECORD = Path(__file__).with_name("_native_build.json")  # written by setup.py


@dataclass(frozen=True, slots=True)
class NativeStatus:
    """Whether native code can be used, and the reason in words (also when it can)."""

    available: bool
    reason: str


def status() -> NativeStatus:
    """Loads the native module if it was built; never raises for a module that is absent or does not load."""
    return _load()[1]


def module() -> ModuleType:
    """The loaded native module.

    Raises:
        ConfigError: it is not available; the message is ``status().reason``.
    """
    loaded, state = _load()
    if loaded is None:
        raise ConfigError(f"the native module {_MODULE} is asked for, but it is {state.reason}")
    return loaded


def cpu_features() -> dict[str, bool]:
    """Instruction sets that processor and operating system allow now, by name (``avx2``, ``avx512_bf16``, ``neon``...).

    Every name is present on every architecture. The ``amx_*`` flags say that the tile registers can be had; on Linux
    a process must still ask the kernel for them.

    Raises:
        ConfigError: the native module is not available.
    """
    return dict(module().cpu_features())


def elementwise_kernel() -> str:
    """The fastest code path of the elementwise C++ ops (turn_credit, policy_loss) that this processor runs.

    Raises:
        ConfigError: the native module is not available.
    """
    return str(module().elementwise_kernels()[0])


@cache
def _load() -> tuple[ModuleType | None, NativeStatus]:
    not_built = _reason_not_built()
    if not_built is not None:
        return None, NativeStatus(False, f"not built: {not_built}")
    try:
        loaded = importlib.import_module(_MODULE)
    except (ImportError, OSError) as error:  # another Python's build, a missing C++ runtime, a damaged file
        return None, NativeStatus(False, f"built, but failed to load: {error}")
    version = loaded.abi_version()
    if version != EXPECTED_ABI_VERSION:
        return None, NativeStatus(
            False,
            f"built, but for interface version {version} where this package expects {EXPECTED_ABI_VERSION}; "
            "install the package again",
        )
    return loaded, NativeStatus(True, f"built and loaded from {loaded.__file__}")


def _reason_not_built() -> str | None:
    """What the installation recorded; ``None`` when it built the module."""
    try:
        record = json.loads(_BUILD_RECORD.read_text(encoding="utf-8"))
        built, reason = record["built"], record["reason"]
    except FileNotFoundError:
        return "this source tree was never installed (pip install -e .)"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its build record {_BUILD_RECORD} is unreadable ({error!r}); install the package again"
    return None if built else str(reason)
