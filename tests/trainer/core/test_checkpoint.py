"""Checkpoints: continue bit for bit, fit another mesh, are whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file

from trace_fast.errors import InputError
from trace_fast.trainer.checkpoint import Progress, latest_checkpoint, read_progress


@pytest.mark.parametrize(
    ("n", "saved", "loaded"),
    [(1, {}, {}), (2, {"tensor": 2}, {"shard": 2})],
    ids=["one process", "from a tensor to a shard mesh"],
)
def test_what_was_saved_comes_back_and_continues(
    n: int, saved: dict[str, Any], loaded: dict[str, Any], tmp_path: Path
) -> None:
    """Training goes on while the save runs: what is saved is what was there when it was asked for."""
    run_ranks(n, "rank_jobs:checkpoint_round_trip", str(tmp_path), saved, loaded)
    found = {name: load_file(tmp_path / f"{name}.safetensors") for name in ("saved", "loaded", "continued", "resumed")}
    assert len(found["saved"]) == 24
    for name, value in found["saved"].items():
        assert torch.equal(found["loaded"][name], value), name
        assert not torch.equal(found["continued"][name], value), name
        if saved == loaded:
            assert torch.equal(found["resumed"][name], found["continued"][name]), name
        else:  # another order of summation
            assert torch.allclose(found["resumed"][name], found["continued"][name], rtol=0, atol=1e-5), name
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


def test_only_the_newest_stay_and_what_a_killed_save_left_goes(tmp_path: Path) -> None:
    run_ranks(1, "rank_jobs:many_saves", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000007", "step-000010"]
    assert read_progress(tmp_path / "step-000010").step == 10


def test_a_hidden_folder_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".step-000009").mkdir()
    assert latest_checkpoint(tmp_path) is None
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-000012").mkdir()
    (tmp_path / "step-best").mkdir()
    (tmp_path / "step-000013").write_text("a file")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000012"


def test_the_newest_is_the_one_with_the_highest_number(tmp_path: Path) -> None:
    for name in ("step-999999", "step-1000000"):
        (tmp_path / name).mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1000000"


WRONG_STEP = '{"step": "4", "optimizer_steps": 8, "reference": "m", "settings": {}}'
WRONG_SETTINGS = '{"step": 4, "optimizer_steps": 8, "reference": "m", "settings": {"training": [1]}}'


@pytest.mark.parametrize("text", ["", "[]", '{"step": 3}', None, WRONG_STEP, WRONG_SETTINGS])
def test_a_damaged_description_is_named(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "trainer.json").write_text(text)
    with pytest.raises(InputError, match=r"trainer\.json: expected the description of a checkpoint"):
        read_progress(tmp_path)


def test_a_description_comes_back(tmp_path: Path) -> None:
    progress = Progress(step=4, optimizer_steps=8, reference="m@0123", settings={"training": {"seed": 1}})
    record = {"step": 4, "optimizer_steps": 8, "reference": "m@0123", "settings": {"training": {"seed": 1}}, "more": 1}
    (tmp_path / "trainer.json").write_text(json.dumps(record))
    assert read_progress(tmp_path) == progress


def test_damage_at_any_file_and_another_model_are_refused_by_name(tmp_path: Path) -> None:
    run_ranks(1, "rank_jobs:damaged_checkpoints", str(tmp_path))
    messages = json.loads((tmp_path / "messages.json").read_text())
    files = ("shard", ".metadata", "trainer.json")
    assert set(messages) == {"other model"} | {f"{f} {d}" for f in files for d in ("missing", "empty", "cut off")}
    for name, message in messages.items():
        assert str(tmp_path / "step-000002") in message, name
        expected = "the description of a checkpoint" if name.startswith("trainer") else "a checkpoint of this policy"
        assert f": expected {expected}: " in message, name
        assert "Traceback" not in message, name


def test_a_disk_that_is_full_ends_all_ranks_and_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    run_ranks(2, "rank_jobs:a_disk_that_is_full", str(tmp_path))
    for rank in range(2):
        message = (tmp_path / f"rank{rank}.txt").read_text()
        assert f"{tmp_path / 'checkpoints' / 'step-000002'}: cannot be written: process 1: OSError(28, " in message
        assert "Traceback" not in message
    assert latest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step-000001"
