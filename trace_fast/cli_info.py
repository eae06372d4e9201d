"""``trace-fast info``: versions, devices, native code, chosen implementations and what is missing, with reasons."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
from importlib import metadata
from typing import Any

import typer
from packaging.requirements import Requirement

from trace_fast import __version__, native
from trace_fast.cli_terminal import printable

DISTRIBUTION = "trace-fast"


def collect_info() -> dict[str, Any]:
    """Everything that ``info`` shows, as plain JSON types."""
    import torch

    status = native.status()
    return {
        "versions": {
            "trace_fast": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": _version("transformers"),
            "numpy": _version("numpy"),
            "triton": _triton(),
        },
        "devices": _devices(torch),
        "native": {"available": status.available, "reason": status.reason},
        "cpu": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "features": _cpu_features(torch, status.available),
        },
        "backends": _backends(),
        "extras": missing_extras(),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return "not installed (extra gpu: pip install 'trace-fast[gpu]')"
    try:
        return str(importlib.import_module("triton").__version__)
    except (ImportError, OSError, RuntimeError) as error:  # what its native part raises where it cannot load
        return f"installed, but cannot be imported: {error}"


def _devices(torch: Any) -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = [{"device": "cpu", "name": platform.processor() or platform.machine()}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "bytes": properties.total_memory,
                "capability": capability,
            }
        )
    if len(devices) == 1:
        reason = "torch is a CPU build" if torch.version.cuda is None else "torch finds no CUDA device"
        devices.append({"device": "cuda", "absent": reason})
    return devices


def _cpu_features(torch: Any, native_available: bool) -> dict[str, bool] | str:
    """By name from the native module; without it the level that torch reports."""
    if native_available:
        return native.cpu_features()
    return str(torch.backends.cpu.get_cpu_capability())


def _backends() -> list[dict[str, Any]]:
    from trace_fast.backends import probe

    return [
        {"op": s.op, "name": s.name, "available": s.available, "chosen": s.chosen, "reason": s.reason} for s in probe()
    ]


def missing_extras() -> dict[str, list[str]]:
    """For each extra of the package, its requirements that are not installed here (none: an empty list)."""
    distribution = metadata.distribution(DISTRIBUTION)
    missing: dict[str, list[str]] = {name: [] for name in distribution.metadata.get_all("Provides-Extra") or ()}
    for line in distribution.requires or ():
        requirement = Requirement(line)
        for extra, absent in missing.items():
            marker = requirement.marker
            wanted_by_extra = (
                marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})
            )
            if wanted_by_extra and _version(requirement.name) == "not installed":
                absent.append(requirement.name)
    return missing


def run_info(*, as_json: bool) -> None:
    """Prints ``collect_info`` on standard output."""
    info = collect_info()
    if as_json:
        typer.echo(json.dumps(info, allow_nan=False))
        return
    for line in _lines(info):
        typer.echo(printable(line))


def _lines(info: dict[str, Any]) -> list[str]:
    lines = ["versions"]
    lines += [f"  {name:<14}{version}" for name, version in info["versions"].items()]
    lines.append("devices")
    for device in info["devices"]:
        lines.append(f"  {device['device']:<14}{_device_words(device)}")
    state = "available" if info["native"]["available"] else "absent"
    lines += ["native module", f"  {state}: {info['native']['reason']}", "cpu"]
    cpu = info["cpu"]
    features = cpu["features"]
    shown = features if isinstance(features, str) else " ".join(n for n, on in features.items() if on)
    lines.append(f"  {cpu['machine']}, {cpu['cores']} cores, {cpu['threads']} threads: {shown}")
    lines.append("backends")
    for backend in info["backends"]:
        state = "chosen" if backend["chosen"] else "available" if backend["available"] else "absent"
        lines.append(f"  {backend['op']:<18}{backend['name']:<12}{state:<11}{backend['reason']}")
    lines.append("extras")
    for extra, absent in info["extras"].items():
        lines.append(f"  {extra:<14}" + (f"missing: {', '.join(absent)}" if absent else "complete"))
    return lines


def _device_words(device: dict[str, Any]) -> str:
    if "absent" in device:
        return f"none: {device['absent']}"
    if "bytes" in device:
        return f"{device['name']}, {device['bytes'] / 2**30:.1f} GiB, compute capability {device['capability']}"
    return str(device["name"])
