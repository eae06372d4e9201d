"""Seconds, bytes and FLOP/s on the CPU and on CUDA."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch

GEMM_SIZES = {"cpu": (2048, 1536, 1536), "cuda": (8192, 8192, 8192)}  # large enough to reach the device's rate


def synchronize(device: torch.device) -> None:
    """Waits for the device's queue; the CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of one call, from an idle device to an idle device."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def peak_extra_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that the call takes at its peak over what was there before it; ``None`` where nothing tells.

    CUDA: torch's allocator. CPU: the resident set, on Linux.
    """
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it: what was freed leaves the resident set
    if trim is not None:
        trim(0)
    try:
        clear.write_text("5")  # resets the high-water mark
    except PermissionError:  # some containers forbid it
        return None
    resident = _status("VmRSS")
    call()
    return max(_status("VmHWM") - resident, 0)


def _status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def gemm_rate(dtype: torch.dtype, device: torch.device, seconds: float = 1.0) -> float:
    """FLOP/s of a large matrix product in this dtype, measured now: the roof of this run."""
    rows, inner, columns = GEMM_SIZES[device.type]
    a = torch.randn(rows, inner, device=device).to(dtype)
    b = torch.randn(inner, columns, device=device).to(dtype)
    torch.mm(a, b)
    together = 8 if device.type == "cuda" else 1  # a launch is short, but not nothing
    count, taken = 0, 0.0
    while taken < seconds:
        taken += seconds_of(lambda: [torch.mm(a, b) for _ in range(together)], device)
        count += together
    return count * 2.0 * rows * inner * columns / taken
