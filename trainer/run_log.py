"""What a run writes beside its checkpoints: metrics, rollouts and scores of its steps, lines on the console.

Files of the run's folder: ``metrics.jsonl`` (a line a step, flushed to disk); ``rollouts/step-000012.jsonl``
in tokens form, with ``rollouts/step-000012.scores.jsonl`` beside it where the step was scored (``trace-fast report``
opens both); what the boards of ``boards.py`` keep there.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trace_fast.atomic_write import new_file, write_atomically
from trace_fast.cli_terminal import say
from trace_fast.credit import TurnCredit
from trace_fast.errors import InputError
from trace_fast.formats import write_rollouts
from trace_fast.output import encode_record, score_record
from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore
from trace_fast.trainer.boards import Board, TensorBoard, WeightsAndBiases
from trace_fast.trainer.config import LoggingConfig

SHOWN = ("reward", "success", "turns", "loss", "grad_norm", "kl_to_reference", "turn_credit")


class RunLog:
    """The log of one process; only the first one writes. ``seconds`` collects the phases of the running step.

    Args:
        begin: the step that the run goes on with; what an earlier run logged from there on is dropped, so that it is
            not there twice.
        settings: of the run, for boards that show them.

    Raises:
        InputError: ``metrics.jsonl`` is none; the line is named.
    """

    def __init__(
        self,
        folder: Path,
        config: LoggingConfig,
        *,
        begin: int,
        writes: bool,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._folder = folder
        self._config = config
        self._writes = writes
        self._console = writes
        self.seconds: dict[str, float] = {}
        if writes:
            self._rewind(begin)
        self._boards: list[Board] = []
        if writes and config.tensorboard:
            self._boards.append(TensorBoard(folder, begin))
        if writes and config.wandb is not None:
            self._boards.append(WeightsAndBiases(folder, config.wandb, begin, settings))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to the running step's ``seconds[name]``."""
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def _rewind(self, step: int) -> None:
        path = self._folder / "metrics.jsonl"
        if not path.exists():
            return
        *lines, _ = path.read_bytes().split(b"\n")  # behind the last one is what a kill cut off, or nothing
        kept = []
        for number, line in enumerate(lines, start=1):
            try:
                if json.loads(line)["step"] < step:
                    kept.append(line.decode("ascii") + "\n")
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{path}:{number}: expected the metrics of a step: {error!r}") from error
        write_atomically(path, "".join(kept))

    def step(self, step: int, metrics: Mapping[str, float], *, total: int) -> None:
        """Logs a step's metrics with its phases' times, and begins the next one's."""
        record = {name: value for name, value in metrics.items() if math.isfinite(value)}
        record |= {f"seconds/{name}": value for name, value in self.seconds.items()}
        record["seconds/step"] = math.fsum(self.seconds.values())
        self.seconds = {}
        self._append({"step": step, **record})
        shown = "  ".join(f"{name} {record[name]:.4g}" for name in SHOWN if name in record)
        self._say(f"step {step + 1}/{total}  {shown}  {record['seconds/step']:.1f} s")

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs an evaluation of the policy after ``step`` steps."""
        self._append({"step": step, **{f"validation/{name}": value for name, value in metrics.items()}})
        shown = "  ".join(f"{name} {metrics[name]:.4g}" for name in SHOWN if name in metrics)
        self._say(f"validation after {step} steps  {shown}")

    def dump(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        scored: Sequence[tuple[RolloutScore, TurnCredit]],
        *,
        always: bool = False,
    ) -> None:
        """Writes the rollouts of a step and their scores, where the settings or ``always`` ask for it."""
        due = self._config.rollouts and step % self._config.rollouts == 0
        if not self._writes or not (due or always):
            return
        folder = self._folder / "rollouts"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{step:06d}.jsonl"
        with new_file(path) as file:
            write_rollouts(file, rollouts)
        if scored:
            lines = b"".join(encode_record(score_record(score, credit)) for score, credit in scored)
            write_atomically(path.with_suffix(".scores.jsonl"), lines.decode("ascii"))

    def warn(self, text: str) -> None:
        """A line on the console."""
        self._say(text)

    def close(self, *, failed: bool = False) -> None:
        """``failed``: whether an error ended the run."""
        for board in self._boards:
            board.close(failed=failed)

    def _append(self, record: dict[str, Any]) -> None:
        if not self._writes:
            return
        with (self._folder / "metrics.jsonl").open("ab") as stream:
            stream.write(json.dumps(record, allow_nan=False).encode("ascii") + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        values = {name: value for name, value in record.items() if name != "step"}
        for board in self._boards:
            board.log(record["step"], values)

    def _say(self, text: str) -> None:
        """A terminal or a pipe that is gone takes nothing more, and takes no run with it: all stands in the files."""
        if not self._console:
            return
        try:
            say(text)
        except OSError:
            self._console = False
