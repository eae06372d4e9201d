"""The check that compiles GPU kernels without a GPU: what it reads, and what it calls a failure."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trace_fast.kernels.common import compile_check
from trace_fast.kernels.common.compile_check import Compiled, main, ops_with_triton, read_ptxas

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z6simplePf' for 'sm_90'
ptxas info    : Function properties for _Z6simplePf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
ptxas info    : Compiling entry function '_Z5spillIdEvPT_' for 'sm_90'
ptxas info    : Function properties for _Z5spillIdEvPT_
    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 4096 bytes smem
"""


def compiled(**changes: object) -> Compiled:
    costs: dict = {"registers": 128, "spill_stores": 0, "spill_loads": 0, "shared": 1024, "products": "wgmma"}
    return Compiled(**{"name": "kernel", "arch": 90, "wants_wgmma": True, **costs, **changes})


def test_the_assemblers_report_is_read() -> None:
    simple, spill = read_ptxas(REPORT, "file.cu", 90)
    assert (simple.registers, simple.spill_stores, simple.spill_loads, simple.shared) == (12, 0, 0, 0)
    assert (spill.registers, spill.spill_stores, spill.spill_loads, spill.shared) == (255, 16, 20, 4096)
    assert simple.name.startswith("file.cu ")
    assert "simple" in simple.name
    assert simple.complaints() == []
    assert spill.complaints() == ["spills registers"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"spill_stores": 1}, "spills registers"),
        ({"spill_loads": 1}, "spills registers"),
        ({"products": "mma"}, "expected wgmma, got mma"),
        ({"products": ""}, "expected wgmma, got no matrix instruction"),
        ({"shared": 232449}, "needs 232449 bytes of shared memory, sm_90 has 232448"),
        ({"arch": 80, "products": "mma", "shared": 166913}, "needs 166913 bytes of shared memory, sm_80 has 166912"),
    ],
)
def test_what_fails_on_an_architecture(changes: dict, complaint: str) -> None:
    assert compiled(**changes).complaints() == [complaint]


@pytest.mark.parametrize(
    "changes",
    [{}, {"arch": 80, "products": "mma", "spill_stores": 9}, {"arch": 100, "products": "tcgen05", "spill_loads": 9}],
)
def test_what_does_not(changes: dict) -> None:
    assert compiled(**changes).complaints() == []


def test_every_op_folder_with_triton_kernels_is_found() -> None:
    folders = {path.parent.name for path in Path(compile_check.OPS).glob("*/triton_impl.py")}
    assert "prefix_attention" in folders
    assert set(ops_with_triton()) == folders


def test_an_unknown_op_or_architecture_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in ((["--op", "nothing"], "invalid choice: 'nothing'"), (["--arch", "70"], "70")):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


@pytest.fixture
def nothing_to_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with one CUDA file; no Triton cases, no programs."""
    (tmp_path / "one.cu").write_text("")
    monkeypatch.setattr(compile_check, "CUDA_SOURCES", tmp_path)
    monkeypatch.setattr(compile_check, "_cases", lambda op: [])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    return tmp_path


@pytest.mark.parametrize("required", [False, True])
def test_missing_nvcc_is_said_at_the_end(
    nothing_to_compile: Path, required: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--op", "prefix_attention", *(["--require-nvcc"] if required else [])])
    printed = capsys.readouterr()
    last = printed.out.splitlines()[-1]
    assert last.endswith("NOT CHECKED: nvcc not found, so one.cu was not compiled")
    assert ("CUDA: nvcc not found, so one.cu was not compiled" in printed.err) == required
    assert ("1 failures" in last) == required


def test_missing_cuda_files_are_said_and_can_be_left_out(
    nothing_to_compile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (nothing_to_compile / "one.cu").unlink()
    assert main(["--op", "prefix_attention", "--require-nvcc"]) == 1
    assert "NOT CHECKED: no CUDA files at" in capsys.readouterr().out
    main(["--op", "prefix_attention", "--no-cuda"])
    assert "NOT CHECKED" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--no-cuda", "--require-nvcc"])
