"""``trace-fast train``, ``rollout``, ``eval`` and ``export``: everything that starts from a training config."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from trace_fast.atomic_write import new_file
from trace_fast.cli_terminal import EXIT_DONE, EXIT_SOME_FAILED, plural, say
from trace_fast.errors import ConfigError, OutputError
from trace_fast.formats import write_rollouts
from trace_fast.model_context import quiet_transformers
from trace_fast.model_spec import ModelSpec
from trace_fast.rollout import Rollout
from trace_fast.trainer.config import TrainConfig, read_config
from trace_fast.trainer.data import check_key, read_tasks
from trace_fast.trainer.dry_run import plan_run
from trace_fast.trainer.metrics import rollout_metrics
from trace_fast.trainer.sampling import SampledGroups, sample_groups

STOPPED = 3  # exit code of a run that a signal stopped: it has saved, and --resume goes on


def run_train(path: str, changes: Sequence[str], *, resume: bool, dry_run: bool) -> int:
    """Trains; the exit code.

    Raises:
        TraceFastError: nothing could be trained, or training had to end; what is wrong, by name.
    """
    config = read_config(path, changes)
    if dry_run:
        for line in _plan(config):
            print(line)
        return EXIT_DONE
    from trace_fast.trainer.loop import train
    from trace_fast.trainer.setup import open_run, read_inputs

    with quiet_transformers():
        inputs = read_inputs(config, resume=resume)
        with open_run(config, inputs) as (run, begin):
            if begin:
                run.log.warn(f"continuing after step {begin}")
            if begin >= config.training.steps:
                run.log.warn(f"training.steps = {config.training.steps}: nothing is left to train")
            finished = train(run, begin=begin)
    return EXIT_DONE if finished else STOPPED


def run_rollout(path: str, changes: Sequence[str], *, questions: str, out: str, samples: int, overwrite: bool) -> int:
    """Samples rollouts of questions with the config's policy, engine and search, and writes them in tokens form.

    Raises:
        TraceFastError: nothing could be sampled, or not written.
    """
    config = read_config(path, changes)
    _check_place(out, overwrite=overwrite)
    sampled = _sampled(config, questions, samples, evaluation=False)
    _write(out, sampled.rollouts)
    say(f"{plural(len(sampled.rollouts), 'rollout')} written to {out}")
    return _reported(sampled)


def run_eval(path: str, changes: Sequence[str], *, questions: str | None, out: str | None, overwrite: bool) -> int:
    """Prints the metrics of the config's policy on questions (the validation ones by default) as JSON.

    Raises:
        TraceFastError: nothing could be evaluated.
    """
    config = read_config(path, changes)
    if out == "-":
        raise OutputError("expected the name of a file for the rollouts: the metrics go to the standard output")
    questions = config.data.validation if questions is None else questions
    if questions is None:
        raise ConfigError(f"{path}: data.validation: is required, or give --questions")
    if out is not None:
        _check_place(out, overwrite=overwrite)
    sampled = _sampled(config, questions, config.evaluation.samples, evaluation=True)
    if out is not None:
        _write(out, sampled.rollouts)
    print(json.dumps(rollout_metrics(sampled.rollouts, by=config.evaluation.by), indent=2))
    return _reported(sampled)


def run_export(path: str, changes: Sequence[str], *, step: int | None, out: str, overwrite: bool) -> int:
    """Writes the policy of a checkpoint of the config's run as a model folder.

    Raises:
        TraceFastError: there is no such checkpoint, it does not fit the policy, or the folder cannot be written.
    """
    config = read_config(path, changes)
    _check_one_process()
    from trace_fast.trainer.export import export_policy, find_checkpoint

    checkpoint = find_checkpoint(config, step)
    with quiet_transformers():
        export_policy(config, checkpoint, Path(out), overwrite=overwrite)
    say(f"the policy of {checkpoint} written to {out}")
    return EXIT_DONE


def _plan(config: TrainConfig) -> list[str]:
    policy = ModelSpec.from_pretrained(config.policy.path)
    reference = ModelSpec.from_pretrained(config.reference.path or config.policy.path)
    n_processes = int(os.environ.get("WORLD_SIZE", 0)) or _asked_for(config)
    return plan_run(config, policy, reference, n_processes).lines()


def _asked_for(config: TrainConfig) -> int:
    """Processes that the mesh asks for, where no launcher says how many there are."""
    return config.parallel.replicate * max(config.parallel.shard, 1) * config.parallel.tensor


def _check_place(out: str, *, overwrite: bool) -> None:
    """Before anything is sampled: a file can be made there, and one process does it."""
    if Path(out).exists() and not overwrite:
        raise OutputError(f"{out} exists; replace it with --overwrite, or give another name")
    _check_one_process()
    if out != "-" and (not Path(out).resolve().parent.is_dir() or Path(out).is_dir()):
        raise OutputError(f"{out}: expected the name of a file in a folder that exists")


def _check_one_process() -> None:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError(
            "expected one process, since this command does not divide its work; start it without a launcher"
        )


def _write(out: str, rollouts: Sequence[Rollout]) -> None:
    if out == "-":
        write_rollouts(out, rollouts)
        return
    try:
        with new_file(Path(out)) as file:
            write_rollouts(file, rollouts)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written: {error}") from error


def _sampled(config: TrainConfig, questions: str, samples: int, *, evaluation: bool) -> SampledGroups:
    from trace_fast.trainer.setup import open_sampler

    tasks = read_tasks(questions)
    if evaluation:
        check_key(tasks, config.evaluation.by, questions)
        tasks = tasks[: config.evaluation.questions]
    with quiet_transformers(), open_sampler(config, evaluation=evaluation) as (harness, engine):
        return sample_groups(
            tasks,
            harness,
            engine,
            seed=config.training.seed,
            samples=samples,
            attempts=config.training.attempts,
        )


def _reported(sampled: SampledGroups) -> int:
    if sampled.failures:
        say(f"{plural(len(sampled.failures), 'rollout')} failed in the engine")
    return EXIT_SOME_FAILED if sampled.failures else EXIT_DONE
