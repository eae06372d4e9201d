"""Compiles every shipped Triton configuration and every CUDA file without a GPU, and says what they cost.

    python -m trace_fast.kernels.common.compile_check [--arch 80 90 100] [--op NAME ...] [--jobs N]
        [--no-cuda | --require-nvcc]

Triton: for each op folder that has a ``triton_impl`` its ``compile_cases()`` are compiled for the architectures that
they are launched on. Registers come from the compiled code's resource table; spills are counted as the local-memory
stores and loads in its machine code (Triton keeps no arrays there, so every one is a spill). CUDA: each
``csrc/cuda/*.cu`` of a checkout is compiled with nvcc, when there is one, and the assembler's report is read; else the
last line says which files were not compiled.

Exit 1 when something does not compile, needs more shared memory than the architecture gives to one program, spills
on sm_90, or lacks wgmma on sm_90 where its matrix products are to run on it; with ``--require-nvcc`` also when nvcc or
the CUDA files are missing. Shared memory is in bytes; spills are instructions (Triton) or bytes (CUDA), stores/loads.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trace_fast.kernels.common.compile_cases import CompileCase

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # of one program
STRICT_ARCH = 90  # where a spill or a missing wgmma is a failure
PRODUCTS = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}  # names in PTX
WIDTH = 70  # of the names in the table
OPS = Path(__file__).resolve().parents[1]
CUDA_SOURCES = OPS.parent / "csrc" / "cuda"  # in a checkout; an installed package holds none


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one kernel costs on one architecture; ``products`` names its matrix instruction, if any."""

    name: str
    arch: int
    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    products: str
    wants_wgmma: bool

    def complaints(self) -> list[str]:
        found = []
        if self.shared > SHARED_MEMORY[self.arch]:
            found.append(f"needs {self.shared} bytes of shared memory, sm_{self.arch} has {SHARED_MEMORY[self.arch]}")
        if self.arch == STRICT_ARCH and self.spill_stores + self.spill_loads:
            found.append("spills registers")
        if self.arch == STRICT_ARCH and self.wants_wgmma and self.products != "wgmma":
            found.append(f"expected wgmma, got {self.products or 'no matrix instruction'}")
        return found


def ops_with_triton() -> list[str]:
    """Names of the op folders that have Triton kernels."""
    return sorted(path.parent.name for path in OPS.glob("*/triton_impl.py"))


def compile_triton(case: CompileCase, arch: int) -> Compiled:
    """Compiles one case for one architecture; Triton's own errors pass through."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(case.signature)
    source = ASTSource(
        case.kernel,
        signature=dict(case.signature),
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, stores, loads = _read_cubin(compiled.asm["cubin"], Path(triton.__file__).parent)
    ptx = compiled.asm["ptx"]
    products = next((short for short, text in PRODUCTS.items() if text in ptx), "")
    shared = compiled.metadata.shared
    return Compiled(case.name, arch, registers, stores, loads, shared, products, case.wants_wgmma)


def _read_cubin(cubin: bytes, triton_folder: Path) -> tuple[int, int, int]:
    """Registers, local-memory stores and loads."""
    tool = triton_folder / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(tool), "-res-usage", "-sass", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers = re.search(r"\bREG:(\d+)", text)
    assert registers is not None, "cuobjdump prints the resource usage of every kernel"
    return int(registers[1]), len(re.findall(r"\bSTL\b", text)), len(re.findall(r"\bLDL\b", text))


def compile_cuda(source: Path, arch: int) -> Iterator[Compiled]:
    """Every kernel of a CUDA file, with nvcc.

    Raises:
        RuntimeError: nvcc's message.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        command = ["nvcc", "-std=c++17", "-O3", target, "-cubin", "-Xptxas", "-v", f"-I{source.parents[1]}"]
        command += [str(source), "-o", f"{folder}/{source.stem}.cubin"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or done.stdout.strip())
    yield from read_ptxas(done.stderr + done.stdout, source.name, arch)


def read_ptxas(text: str, file: str, arch: int) -> Iterator[Compiled]:
    """Kernels in the assembler's verbose report."""
    for part in text.split("Compiling entry function ")[1:]:
        name = part.split("'")[1]
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        assert spills is not None and registers is not None, f"a report of ptxas in another form: {part!r}"  # noqa: PT018
        shared = re.search(r"(\d+) bytes smem", part)
        size = int(shared[1]) if shared else 0
        yield Compiled(
            f"{file} {_readable(name)}", arch, int(registers[1]), int(spills[1]), int(spills[2]), size, "", False
        )


def _readable(symbol: str) -> str:
    """A mangled C++ name as it was written, where the demangler is installed."""
    tool = shutil.which("c++filt")
    if tool is None:
        return symbol
    text = subprocess.run([tool, symbol], check=True, capture_output=True, text=True).stdout.strip()
    return re.sub(r"\(anonymous namespace\)::", "", text).split("(")[0].removeprefix("void ")


@dataclass(frozen=True, slots=True)
class _Job:
    """One compilation: case ``case`` of an op, or a CUDA file. Small, so that it travels to another process."""

    name: str
    arch: int
    op: str = ""
    case: int = 0
    cuda: str = ""


@dataclass(frozen=True, slots=True)
class _Done:
    job: _Job
    rows: tuple[Compiled, ...]
    error: str = ""  # the compiler's message


def _cases(op: str) -> list[CompileCase]:
    cases: list[CompileCase] = importlib.import_module(f"trace_fast.kernels.{op}.triton_impl").compile_cases()
    return cases


def _run(job: _Job) -> _Done:
    from triton.compiler import CompilationError
    from triton.runtime.errors import PTXASError

    try:
        if job.cuda:
            return _Done(job, tuple(compile_cuda(Path(job.cuda), job.arch)))
        return _Done(job, (compile_triton(_cases(job.op)[job.case], job.arch),))
    except (CompilationError, PTXASError, RuntimeError) as error:  # RuntimeError: nvcc, or a pass of Triton's
        return _Done(job, (), str(error).strip() or type(error).__name__)


def _print(done: _Done) -> list[str]:
    """Rows of the table; returns what is wrong."""
    failures = []
    job = done.job
    if done.error:
        print(f"{job.name:<{WIDTH}} {f'sm_{job.arch}':>6}  FAIL: does not compile: {done.error.splitlines()[-1]}")
        failures.append(f"{job.name}, sm_{job.arch}: does not compile:\n{done.error}")
    for row in done.rows:
        complaints = row.complaints()
        spills = f"{row.spill_stores}/{row.spill_loads}"
        costs = f"{row.registers:>5} {spills:>9} {row.shared:>7} {row.products:>8}"
        verdict = f"  FAIL: {'; '.join(complaints)}" if complaints else ""
        print(f"{row.name:<{WIDTH}} {f'sm_{row.arch}':>6} {costs}{verdict}", flush=True)
        failures += [f"{row.name}, sm_{row.arch}: {complaint}" for complaint in complaints]
    return failures


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compiles all GPU kernels without a GPU.")
    parser.add_argument("--arch", type=int, nargs="+", default=sorted(SHARED_MEMORY), choices=sorted(SHARED_MEMORY))
    parser.add_argument("--op", nargs="+", default=ops_with_triton(), choices=ops_with_triton(), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    cuda = parser.add_mutually_exclusive_group()
    cuda.add_argument("--no-cuda", action="store_true", help="Triton kernels only")
    cuda.add_argument("--require-nvcc", action="store_true", help="fail where CUDA files cannot be compiled")
    options = parser.parse_args(arguments)

    jobs = [
        _Job(case.name, arch, op=op, case=number)
        for op in options.op
        for number, case in enumerate(_cases(op))
        for arch in options.arch
        if arch in case.archs
    ]
    sources = [] if options.no_cuda else sorted(CUDA_SOURCES.glob("*.cu"))
    left_out = ""
    if not sources and not options.no_cuda:
        left_out = f"no CUDA files at {CUDA_SOURCES}"
    elif sources and shutil.which("nvcc") is None:
        left_out = f"nvcc not found, so {', '.join(source.name for source in sources)} was not compiled"
        sources = []
    jobs += [_Job(source.name, arch, cuda=str(source)) for source in sources for arch in options.arch]

    print(f"{'kernel':<{WIDTH}} {'arch':>6} {'regs':>5} {'spills':>9} {'shared':>7} {'products':>8}")
    rows, failures = 0, []
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as processes:
        for done in processes.map(_run, jobs):
            rows += len(done.rows)
            failures += _print(done)
    if left_out and options.require_nvcc:
        failures.append(f"CUDA: {left_out}")
    print(f"{rows} kernels compiled, {len(failures)} failures{f'; NOT CHECKED: {left_out}' if left_out else ''}")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
