"""Checkpoints of a run: policy, optimiser and step, written in the background, whole or not at all.

``checkpoints/step-000020/`` holds the shards of torch's distributed checkpoint and ``trainer.json``. All is written
into a folder with a hidden name, flushed, and renamed when every rank has finished: one with the right name is whole.
A checkpoint fits any mesh. It is read with torch's own reader, which unpickles its index: resume only from checkpoints
that you wrote.
"""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import NonNegativeInt, TypeAdapter, ValidationError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from trace_fast.atomic_write import sync_folder, write_atomically
from trace_fast.errors import InputError, OutputError
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

    step: NonNegativeInt
    optimizer_steps: NonNegativeInt
    reference: str
    settings: dict[str, dict[str, Any]]


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
        """Takes a copy of the state and writes it in the background; waits for the save before this one first.

        Raises:
            OutputError: the folder, or the checkpoint before this one, cannot be written.
        """
        self.wait()
        self._mesh.together(lambda: self._begin(progress))
        future = async_save(
            _state(policy, optimizer),
            storage_writer=FileSystemWriter(self._hidden(progress.step), sync_files=True),
            process_group=self._group,
        )
        assert isinstance(future, Future)
        self._saving = (progress.step, future)

    def _begin(self, progress: Progress) -> None:
        hidden = self._hidden(progress.step)
        if self._mesh.is_first:
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(parents=True)
            write_atomically(hidden / DESCRIPTION, json.dumps(_to_json(progress), indent=2) + "\n")

    def wait(self) -> None:
        """Until the running save is finished and has its name.

        Raises:
            OutputError: it could not be written; what is there under a right name is whole.
        """
        if self._saving is None:
            return
        step, future = self._saving
        self._saving = None
        self._mesh.together(lambda: self._finished(step, future))
        self._mesh.together(lambda: self._publish(step) if self._mesh.is_first else None)

    def _finished(self, step: int, future: Future[Any]) -> None:
        try:
            future.result()
        except (CheckpointException, OSError, RuntimeError) as error:
            raise OutputError(f"{self._folder / NAME.format(step)}: cannot be written: {reason(error)}") from error

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
            raise InputError(f"{path}: expected a checkpoint of this policy: {reason(error)}") from error
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
        for old in _whole(self._folder)[: -self._keep]:
            self._remove(old)

    def _remove(self, path: Path) -> None:
        """Under a hidden name first: half a checkpoint never has a right one."""
        gone = path.with_name(f".{path.name}.removed")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder of checkpoints."""
    return next(reversed(_whole(folder)), None)


def read_progress(path: Path) -> Progress:
    """What the checkpoint's ``trainer.json`` says.

    Raises:
        InputError: it is missing, or none; it names the file and the key.
    """
    file = path / DESCRIPTION
    try:
        return TypeAdapter(Progress).validate_json(file.read_bytes(), strict=True)
    except OSError as error:
        raise InputError(f"{file}: expected the description of a checkpoint: {error}") from error
    except ValidationError as error:
        places = (f"{'.'.join(map(str, p['loc']))}: {p['msg']}".removeprefix(": ") for p in error.errors())
        raise InputError(f"{file}: expected the description of a checkpoint: {'; '.join(places)}") from error


def reason(error: BaseException) -> str:
    """What an error of torch's checkpoint says, without the traces that it puts into its message."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"process {rank}: {failure!r}" for rank, (failure, _) in error.failures.items())
    return repr(error)


def _whole(folder: Path) -> list[Path]:
    """The folders with a checkpoint's name, by step."""
    named = ((re.fullmatch(r"step-(\d{6,})", path.name), path) for path in folder.glob("step-*") if path.is_dir())
    return [path for _, path in sorted((int(match[1]), path) for match, path in named if match)]


def _state(policy: Policy, optimizer: Adam) -> dict[str, Any]:
    """Tensors that share memory with the policy's and the optimiser's own."""
    parameters = {name: parameter.detach() for name, parameter in policy.parameters.items()}
    return {"policy": parameters, "adam": optimizer.state()}


def _to_json(progress: Progress) -> dict[str, Any]:
    return {name: getattr(progress, name) for name in Progress.__dataclass_fields__} | {"torch": torch.__version__}
