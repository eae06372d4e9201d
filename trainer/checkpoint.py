"""Checkpoints of a run: policy, optimiser and step, written in the background, whole or not at all.

``checkpoints/step-000020/`` holds the shards of torch's distributed checkpoint and ``trainer.json``. All is written
into a folder with a hidden name, flushed, and renamed when every rank has finished: one with the right name is whole.
A checkpoint fits any mesh. It is read with torch's own reader, which unpickles its index: resume only from checkpoints
that you wrote.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from trace_fast.atomic_write import sync_folder, write_atomically
from trace_fast.errors import InputError
from trace_fast.trainer.optimizer import Adam
from trace_fast.trainer.parallel import TrainMesh
from trace_fast.trainer.policy import Policy

DESCRIPTION = "trainer.json"
NAME = "step-{:06d}"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands; what ``trainer.json`` holds.

    Args:
        step: training steps done. optimizer_steps: of Adam.
        reference: hash of the frozen model. settings: those that decide numbers (``TrainConfig.deciding``).
    """

    step: int
    optimizer_steps: int
    reference: str
    settings: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run's folder. All processes of the mesh make it and call its methods together."""

    def __init__(self, folder: Path, mesh: TrainMesh, *, keep: int) -> None:
        self._folder = folder
        self._mesh = mesh
        self._keep = keep
        self._group = dist.new_group(backend="gloo")  # its own: the background thread communicates
        self._saving: tuple[int, Future[Any]] | None = None
        if mesh.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(".step-*"):  # of a run that was killed
                shutil.rmtree(left)

    def save(self, progress: Progress, policy: Policy, optimizer: Adam) -> None:
        """Takes a copy of the state and writes it in the background; waits for the save before this one first."""
        self.wait()
        hidden = self._hidden(progress.step)
        if self._mesh.is_first:
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(parents=True)
            write_atomically(hidden / DESCRIPTION, json.dumps(_to_json(progress), indent=2) + "\n")
        self._mesh.gather_objects(None)  # the folder is there
        future = async_save(
            _state(policy, optimizer),
            storage_writer=FileSystemWriter(hidden, sync_files=True),
            process_group=self._group,
        )
        assert isinstance(future, Future)
        self._saving = (progress.step, future)

    def wait(self) -> None:
        """Until the running save is finished and has its name. Raises what went wrong in it."""
        if self._saving is None:
            return
        step, future = self._saving
        self._saving = None
        future.result()
        self._mesh.gather_objects(None)
        if self._mesh.is_first:
            self._publish(step)
        self._mesh.gather_objects(None)

    def poll(self) -> None:
        """Gives a save that has finished its name; does not wait for one that runs."""
        if self._saving is not None and not self._mesh.any_rank(not self._saving[1].done()):
            self.wait()

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        return latest_checkpoint(self._folder)

    def load(self, path: Path, policy: Policy, optimizer: Adam) -> Progress:
        """Fills policy and optimiser.

        Raises:
            InputError: the folder is no checkpoint of this policy; it names the folder.
        """
        progress = read_progress(path)
        try:
            load(_state(policy, optimizer), checkpoint_id=path, process_group=self._group)
        except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
            raise InputError(f"{path}: expected a checkpoint of this policy: {error}") from error
        optimizer.restored(progress.optimizer_steps)
        return progress

    def _hidden(self, step: int) -> Path:
        return self._folder / f".{NAME.format(step)}"

    def _publish(self, step: int) -> None:
        final = self._folder / NAME.format(step)
        if final.exists():  # a run that was resumed from an older checkpoint saves this step again
            self._remove(final)
        self._hidden(step).rename(final)
        sync_folder(self._folder)
        for old in sorted(self._folder.glob("step-*"))[: -self._keep]:
            self._remove(old)

    def _remove(self, path: Path) -> None:
        """Under a hidden name first: half a checkpoint never has a right one."""
        gone = path.with_name(f".{path.name}.removed")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder of checkpoints."""
    return max(folder.glob("step-*"), default=None)


def read_progress(path: Path) -> Progress:
    """What the checkpoint's ``trainer.json`` says.

    Raises:
        InputError: it is missing, or none; it names the file.
    """
    file = path / DESCRIPTION
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return Progress(**{name: record[name] for name in Progress.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: expected the description of a checkpoint: {error!r}") from error


def _state(policy: Policy, optimizer: Adam) -> dict[str, Any]:
    """Tensors that share memory with the policy's and the optimiser's own."""
    parameters = {name: parameter.detach() for name, parameter in policy.parameters.items()}
    return {"policy": parameters, "adam": optimizer.state()}


def _to_json(progress: Progress) -> dict[str, Any]:
    return {name: getattr(progress, name) for name in Progress.__dataclass_fields__} | {"torch": torch.__version__}
