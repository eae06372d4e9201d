"""Everything that needs a GPU, in one command of less than 10 minutes: `make bench-gpu`.

First the numbers of all Triton and CUDA kernels against float64 (before any timed section, also with ``--only``), then
speeds of those that are right, then compute-sanitizer where it is installed. Rows, each with machine, versions and
commit, are added to benchmarks/results/gpu.jsonl. Exit code: 0; 1 when numbers differ or a section fails; 2 when there
is no CUDA device.
A target that is missed is printed as missed; it is a measurement, no failure.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from gpu_common import GpuRun, kernel_failures
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
MINUTES = 9.5
# Section and the seconds that must be left for it to start.
SECTIONS = {"checks": 0, "attention": 90, "token_logprob": 60, "scoring": 180, "flat": 30, "sanitizer": 60}
TIMED = SECTIONS.keys() - {"checks", "sanitizer"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=SECTIONS, help="these sections (repeatable)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu.jsonl", help="file that rows are added to")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no section starts that would not fit into them")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        kind = "is a CPU build" if torch.version.cuda is None else f"(CUDA {torch.version.cuda}) finds none"
        print(f"error: bench-gpu needs a CUDA device, and torch {torch.__version__} {kind}", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    run = GpuRun(device, options.out, time.monotonic() + options.minutes * 60)
    for name in sections(options.only):
        needed = SECTIONS[name]
        if name in TIMED and run.unchecked:
            run.refuse(name, "whole section", "-", "absent", "the small cases could not be checked")
            continue
        if run.left() < needed:
            run.refuse(name, "whole section", "-", "absent", f"{run.left():.0f} s left of {options.minutes} minutes")
            continue
        started = time.monotonic()
        run_section(name, run)
        torch.cuda.empty_cache()
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    show(run)
    return int(bool(run.failed))


def sections(only: Sequence[str] | None) -> list[str]:
    """Those that run, in order: what is timed is checked before."""
    chosen = set(only or SECTIONS)
    return [name for name in SECTIONS if name in chosen or (name == "checks" and chosen & TIMED)]


def run_section(name: str, run: GpuRun) -> None:
    """Runs one; what it cannot do becomes a row, and the others still run."""
    try:
        _section(name)(run)
    except (ImportError, OSError, *kernel_failures()) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        run.refuse(name, "whole section", "-", "failed", reason)
        run.unchecked |= name == "checks"


def _section(name: str) -> Callable[[GpuRun], None]:
    """Imported when it runs: transformers and torch's compiler take a while."""
    if name in ("checks", "sanitizer"):
        return {"checks": checks, "sanitizer": sanitizer}[name]
    section: Callable[[GpuRun], None] = importlib.import_module(f"gpu_{name}").run
    return section


def checks(run: GpuRun) -> None:
    """All small cases; an implementation with a wrong one gets no speed later."""
    from gpu_checks import run_checks
    from gpu_graphs import graph_checks

    found = run_checks(run.device)
    for check in graph_checks(run.device):  # of how an op may be used: it says nothing against its numbers
        if check.wrong:
            reason = check.failure or f"error {check.error:.3e}, expected the same bits"
            run.refuse(check.op, check.case, check.implementation, "failed", reason)
    absent = {(check.op, check.implementation): check.absent for check in found if check.absent}
    for check in found:
        if check.wrong:
            run.wrong.add((check.op, check.implementation))
            numbers = "failed" if check.failure else "differ"
            reason = check.failure or f"error {check.error:.3e}, allowed {check.allowed:.3e}"
            run.refuse(check.op, check.case, check.implementation, numbers, reason)
    for (op, implementation), reason in absent.items():
        run.refuse(op, "small cases", implementation, "absent", reason)
    right = sum(not (check.wrong or check.absent) for check in found)
    print(f"{right} of {len(found)} small cases are right", file=sys.stderr)


def sanitizer(run: GpuRun) -> None:
    """The small cases again under compute-sanitizer's memcheck."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        run.refuse("sanitizer", "memcheck", "-", "absent", "compute-sanitizer is not on the PATH")
        return
    command = [program, "--tool", "memcheck", "--error-exitcode", "3", sys.executable, str(HERE / "gpu_checks.py")]
    # torch's caching allocator would hide reads beyond a tensor inside its own blocks
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=max(run.left(), 1))
    except subprocess.TimeoutExpired:
        run.refuse("sanitizer", "memcheck", "-", "absent", "not done when the time was over")
        return
    if result.returncode:
        lines = (result.stdout + result.stderr).strip().splitlines()[-5:]
        run.refuse("sanitizer", "memcheck", "-", "failed", f"exit {result.returncode}: {' | '.join(lines)[:600]}")
    else:
        run.target("sanitizer", "memcheck", "runs without an error", 1.0, 1.0)


def show(run: GpuRun) -> None:
    """The table, the targets, and what failed."""
    table = Table("op", "case", "implementation", "ms", "TFLOP/s", "of GEMM roof", "extra MB", pad_edge=False)
    for row in run.rows:
        head = (row["op"], row["case"], row["implementation"])
        if "seconds" in row:
            extra = row.get("peak_extra_bytes")
            figures = [row.get("tflops"), row.get("fraction_of_gemm_roofline"), None if extra is None else extra / 1e6]
            table.add_row(*head, f"{row['seconds'] * 1e3:.3f}", *("" if x is None else f"{x:.4g}" for x in figures))
        elif "reason" in row:
            table.add_row(*head, row["numbers"], row["reason"][:60])
    console = Console(width=170, highlight=False)
    console.print(table)
    for row in run.rows:
        if "target" in row:
            told = f"{row['op']}, {row['case']}: {row['figure']}: {row['value']:.3g} (target {row['target']})"
            console.print(f"{'met   ' if row['met'] else 'MISSED'} {told}")
    for line in run.failed:
        print(f"error: {line}", file=sys.stderr)
    print(f"rows: {run.path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
