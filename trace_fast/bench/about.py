"""What a reader needs to place a measurement: date, machine, versions, commit."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import trace_fast

ROOT = Path(__file__).resolve().parents[2]  # of a checkout; an installed package has no .git there


def about(device: torch.device) -> dict[str, str]:
    """Plain strings, the leading keys of every row."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "triton": version("triton"),
        "trace_fast": trace_fast.__version__,
        "commit": commit(),
    }


def machine(device: torch.device) -> str:
    """The processor with its threads, or the GPU with its memory."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"sm_{properties.major}{properties.minor}"
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {capability}, CUDA {torch.version.cuda}"
    return f"{_cpu_name()}, {torch.get_num_threads()} threads, {platform.machine()}"


def _cpu_name() -> str:
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.is_file() else []
    named = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown processor")


def version(distribution: str) -> str:
    """Of an installed distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


CODE = ("trace_fast", "kernels", "csrc", "trainer", "configs", "benchmarks", ":!benchmarks/results")


def commit() -> str:
    """Short hash of the checkout, ``+changes`` when code differs from it; ``"none"`` for an installed package."""
    if not (ROOT / ".git").exists():
        return "none"
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", *CODE],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):  # no git program, or a checkout that it does not trust
        return "unknown"
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
