"""A checkpoint's policy as a folder that transformers, vLLM and SGLang load."""

from __future__ import annotations

import os
import secrets
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from trace_fast.atomic_write import sync_folder
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

    The folder appears whole or not at all.

    Raises:
        InputError: the checkpoint is damaged, or one of another policy than ``policy.path``.
        OutputError: ``out`` exists and ``overwrite`` is not given, or it cannot be written.
    """
    if out.exists() and not overwrite:
        raise OutputError(f"{out} exists; replace it with --overwrite, or give another name")
    if out.exists() and not (out / "config.json").is_file():
        raise OutputError(f"{out}: expected a folder with a model to replace, got something else")
    read_progress(checkpoint)
    module, tokenizer = load_module(config.policy.path), load_tokenizer(config.policy.path)
    parameters = dict(module.named_parameters())
    masters = {name: torch.empty_like(parameter, dtype=torch.float32) for name, parameter in parameters.items()}
    state: dict[str, Any] = {"policy": masters}
    try:
        with warnings.catch_warnings():  # torch says that it loads in one process, which is what is asked for
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(state, checkpoint_id=checkpoint, no_dist=True)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        raise InputError(
            f"{checkpoint}: expected a checkpoint of {config.policy.path!r}: {reason(error)}"
        ) from error
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(masters[name])
    hidden = out.with_name(f".{out.name}.{secrets.token_hex(6)}.new")
    try:
        module.save_pretrained(hidden)
        tokenizer.save_pretrained(hidden)
        for file in hidden.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        sync_folder(hidden)
        if out.exists():
            shutil.rmtree(out)
        hidden.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
