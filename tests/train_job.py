"""A training run in a process of its own that ends itself without warning in the middle of a phase.

``python -m train_job CONFIG PHASE CALL``: PHASE is ``none``, ``rollout``, ``scoring``, ``update`` or ``save``; the run
ends within the CALL-th call that belongs to it. It continues where a checkpoint is.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed.checkpoint as dcp

from trace_fast.trainer.config import read_config
from trace_fast.trainer.loop import Run, train
from trace_fast.trainer.setup import open_run, read_inputs


def deadly(call: Callable[..., Any], at: int) -> Callable[..., Any]:
    """``call``, which does its work and then ends the process, the ``at``-th time."""
    count = 0

    def wrapped(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        result = call(*arguments, **options)
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped


def arm(run: Run, phase: str, at: int) -> None:
    """``rollout``: after the at-th generation, ``scoring``: after that many scorings, ``update``: optimiser steps,
    ``save``: when that many saves have written their shards and not yet their index."""
    targets: dict[str, tuple[Any, str]] = {
        "rollout": (run.engine, "generate"),
        "scoring": (run.reference, "score"),
        "update": (run.optimizer, "step"),
    }
    if phase in targets:
        owner, name = targets[phase]
        setattr(owner, name, deadly(getattr(owner, name), at))
    elif phase == "save":
        dcp.FileSystemWriter.write_data = deadly(dcp.FileSystemWriter.write_data, at)  # type: ignore[method-assign]
    else:
        assert phase == "none", phase


def main() -> None:
    path, phase, at = sys.argv[1:]
    config = read_config(path)
    with open_run(config, read_inputs(config, resume=True)) as (run, begin):
        arm(run, phase, int(at))
        train(run, begin=begin)


if __name__ == "__main__":
    main()
