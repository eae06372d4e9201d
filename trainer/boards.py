"""Where a run's metrics are also shown: TensorBoard and Weights & Biases, both optional packages."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from trace_fast.atomic_write import write_atomically
from trace_fast.errors import ConfigError

STEP = "training_step"
RUN_ID = "wandb.id"  # in the run's folder: a resumed run goes on under the same id


class Board(Protocol):
    """What metrics are sent to."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Shows values of a step, by name."""

    def close(self, *, failed: bool) -> None:
        """Writes what is not written yet, and how the run ended."""


def check_boards(*, tensorboard: bool, wandb: str | None) -> None:
    """That the packages asked for are there.

    Raises:
        ConfigError: one is not; it names the key and the remedy.
    """
    if tensorboard and not _installed("tensorboard"):
        raise ConfigError("logging.tensorboard: needs the package tensorboard: pip install 'trace-fast[train]'")
    if wandb is not None and not _installed("wandb"):
        raise ConfigError("logging.wandb: needs the package wandb: pip install wandb")


def _installed(package: str) -> bool:
    """A folder of that name in the current one, such as the ``wandb/`` of earlier runs, is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


class TensorBoard:
    """Event files in ``tensorboard/`` of the run's folder.

    Args:
        begin: the step that the run goes on with; events of an earlier run from there on are hidden.
    """

    def __init__(self, folder: Path, begin: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=begin)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of a project, named like the run's folder; mode, server and account as the package's own variables say.

    Args:
        begin: 0 starts a new run there, any other step goes on with the folder's. settings: shown beside it.

    Raises:
        ConfigError: the package cannot start a run; with its reason.
    """

    def __init__(self, folder: Path, project: str, begin: int, settings: Mapping[str, Any]) -> None:
        import wandb

        path = folder / RUN_ID
        if begin == 0 or not path.exists():
            write_atomically(path, secrets.token_hex(8) + "\n")
        try:
            self._run: Any = wandb.init(
                project=project,
                name=folder.name,
                id=path.read_text(encoding="ascii").strip(),
                resume="allow",
                dir=str(folder),
                config=dict(settings),
            )
        except wandb.Error as error:
            raise ConfigError(f"logging.wandb: cannot start a run of the project {project!r}: {error}") from error
        # Its own count of steps only grows, and a resumed run repeats some: they are drawn against ours.
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **values})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
