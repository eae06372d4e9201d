"""A checkpoint's policy as a folder that transformers, vLLM and SGLang load."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from trace_fast.atomic_write import new_folder
from trace_fast.errors import InputError, OutputError
from trace_fast.model import load_tokenizer
from trace_fast.trainer.checkpoint import NAME, latest_checkpoint, read_progress, reason
from trace_fast.trainer.config import TrainConfig
from trace_fast.trainer.policy import load_module


def find_checkpoint(config: TrainConfig, step: int | None) -> Path:
    """The checkpoint after a step of the config's run; the newest where no step is given.

    Raises:
        InputError: there is none; it names the folder.
    """
    folder = Path(config.out) / "checkpoints"
    found = latest_checkpoint(folder) if step is None else folder / NAME.format(step)
    if found is None or not found.is_dir():
        there = ", ".join(sorted(path.name for path in folder.glob("step-*"))) or "none"
        raise InputError(f"{folder if step is None else found}: expected a checkpoint of the run; there is: {there}")
    return found


def export_policy(config: TrainConfig, checkpoint: Path, out: Path, *, overwrite: bool = False) -> None:
    """Writes weights (safetensors, in the dtype that ``policy.path`` stores them in), settings and tokenizer.

    The folder appears whole or not at all; one that is replaced is there until the new one is.

    Raises:
        InputError: the checkpoint is damaged, or one of another policy than ``policy.path``.
        OutputError: ``out`` exists and ``overwrite`` is not given, it is a model that the run reads, or it cannot be
            written.
    """
    out = out.resolve()
    _check_place(config, out, overwrite=overwrite)
    read_progress(checkpoint)
    module, tokenizer = load_module(config.policy.path), load_tokenizer(config.policy.path)
    parameters = dict(module.named_parameters())
    masters = {name: torch.empty_like(parameter, dtype=torch.float32) for name, parameter in parameters.items()}
    try:
        _check_fits(checkpoint, config.policy.path, masters)
        with warnings.catch_warnings():  # torch says that it loads in one process, which is what is asked for
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load({"policy": masters}, checkpoint_id=checkpoint, no_dist=True)
    except (CheckpointException, OSError, RuntimeError, KeyError) as error:
        raise InputError(f"{checkpoint}: expected a checkpoint of {config.policy.path!r}: {reason(error)}") from error
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(masters[name])
    try:
        with new_folder(out) as folder:
            module.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{out}: cannot be written: {error}") from error


def _check_place(config: TrainConfig, out: Path, *, overwrite: bool) -> None:
    for key, path in (("policy.path", config.policy.path), ("reference.path", config.reference.path)):
        if path is not None and Path(path).exists() and Path(path).resolve() == out:
            raise OutputError(f"{out} is {key}, which the run still needs; give another name")
    if out.exists() and not overwrite:
        raise OutputError(f"{out} exists; replace it with --overwrite, or give another name")
    if out.exists() and not (out / "config.json").is_file():
        raise OutputError(f"{out}: expected a folder with a model to replace, got something else")


def _check_fits(checkpoint: Path, model: str, masters: dict[str, torch.Tensor]) -> None:
    """That the checkpoint holds these parameters and no others: torch's loader passes over what it is not asked for."""
    stored: dict[str, Any] = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    have = {key.removeprefix("policy."): tuple(m.size) for key, m in stored.items() if key.startswith("policy.")}
    want = {name: tuple(master.shape) for name, master in masters.items()}
    if have != want:
        odd = min(name for name, _ in have.items() ^ want.items())
        raise InputError(
            f"{checkpoint}: expected a checkpoint of {model!r}, got another's: {odd}: expected shape {want.get(odd)}, "
            f"got {have.get(odd)}"
        )
