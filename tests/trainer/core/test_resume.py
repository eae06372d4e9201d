"""A run that is killed without warning in any phase goes on bit for bit from its last whole checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_world import config

from trace_fast.errors import ConfigError
from trace_fast.trainer.checkpoint import latest_checkpoint, read_progress
from trace_fast.trainer.config import read_config
from trace_fast.trainer.setup import open_run, read_inputs

TESTS = Path(__file__).resolve().parents[2]
KILLS = {  # phase: call of this process at which it dies; the step that is lost is each time another
    "rollout": 3,
    "scoring": 2,
    "update": 3,
    "save": 2,
}


def run_job(path: Path, phase: str, at: int) -> int:
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    environment.pop("WORLD_SIZE", None)
    command = [sys.executable, "-m", "train_job", str(path), phase, str(at)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-4000:]
    return done.returncode


def logged(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    clocked = ("seconds/", "update_tokens_per_second")
    return [{k: v for k, v in line.items() if not k.startswith(clocked)} for line in lines]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds, by name."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    found = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items()}
    dcp.load(found, checkpoint_id=checkpoint, no_dist=True)
    return found


@pytest.fixture(scope="module")
def uninterrupted(small_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "config.toml").write_text(config(small_world, folder / "out"))
    assert run_job(folder / "config.toml", "none", 0) == 0
    return folder / "out"


def test_killed_in_every_phase_it_continues_bit_for_bit(small_world: Path, uninterrupted: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "config.toml", tmp_path / "out"
    path.write_text(config(small_world, out))
    steps_saved = []
    for phase, at in KILLS.items():
        assert run_job(path, phase, at) == -signal.SIGKILL, f"{phase}: the run ended before it was killed"
        whole = sorted((out / "checkpoints").glob("step-*"))
        for checkpoint in whole:  # none is half written
            assert len(tensors(checkpoint)) == 3 * 24
        steps_saved.append(len(whole) and int(whole[-1].name.removeprefix("step-")))
    assert any((out / "checkpoints").glob(".step-*"))  # the save that was cut off
    assert run_job(path, "none", 0) == 0
    assert steps_saved == sorted(steps_saved)
    assert steps_saved[-1] > 0
    assert logged(out) == logged(uninterrupted)
    names = ["step-000004", "step-000005"]
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == names  # what was half written is gone
    for name in names:
        mine, theirs = tensors(out / "checkpoints" / name), tensors(uninterrupted / "checkpoints" / name)
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(mine[key], value), (name, key)
    rollouts = sorted(p.name for p in (uninterrupted / "rollouts").iterdir())
    assert sorted(p.name for p in (out / "rollouts").iterdir() if not p.name.startswith(".")) == rollouts
    for name in rollouts:
        assert (out / "rollouts" / name).read_bytes() == (uninterrupted / "rollouts" / name).read_bytes(), name


def test_another_reference_is_refused_on_resume_nemo_rl_3722(
    small_world: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """Re-anchoring the reference to the trained policy would make every later credit another one."""
    path = latest_checkpoint(uninterrupted / "checkpoints")
    assert path is not None
    file = path / "trainer.json"
    before, reference = file.read_text(), read_progress(path).reference
    assert reference.startswith("base@")
    (tmp_path / "config.toml").write_text(config(small_world, uninterrupted))
    settings = read_config(str(tmp_path / "config.toml"))
    file.write_text(before.replace(reference, "base@0123456789abcdef"))
    try:
        with (
            pytest.raises(ConfigError, match="expected the reference base@0123456789abcdef that the run began with"),
            open_run(settings, read_inputs(settings, resume=True)),
        ):
            pass
    finally:
        file.write_text(before)
