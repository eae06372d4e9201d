"""Options and help of ``trace-fast train | rollout | eval | export``; what they do stands in ``cli_train``."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from trace_fast.cli_options import Changes, Overwrite, TrainingConfig
from trace_fast.errors import ConfigError

# tensorboard is in it too, and is asked for where a config wants it.
TRAIN_EXTRA = ("faiss", "sentence_transformers", "bm25s", "datasets", "urllib3")


def check_train_extra() -> None:
    """That the packages are there without which nothing of ``trace_fast.trainer`` can be imported or run.

    Raises:
        ConfigError: names those that are not, and the remedy.
    """
    missing = [name for name in TRAIN_EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"training and sampling need packages of the extra train, and these are not installed: "
            f"{', '.join(missing)}; pip install 'trace-fast[train]'"
        )


def add_training(app: typer.Typer) -> None:
    @app.command(short_help="Train a tool-using policy.")
    def train(
        config: TrainingConfig,
        set: Changes = None,
        resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Print memory, tokens and arithmetic only.")] = False,
    ) -> None:
        """Train a policy with GRPO, GSPO, GiGPO or TRACE; on several devices under torchrun.

        Exit codes: 0 all steps done, 2 nothing could be done or training failed, 3 stopped by a signal after saving.
        """
        from trace_fast.cli_terminal import command_errors

        with command_errors():
            check_train_extra()
            from trace_fast.cli_train import run_train

            code = run_train(config, set or [], resume=resume, dry_run=dry_run)
        raise typer.Exit(code)

    @app.command(short_help="Sample rollouts of questions.")
    def rollout(
        config: TrainingConfig,
        questions: Annotated[str, typer.Option(metavar="FILE.jsonl", help="Questions with their answers.")],
        out: Annotated[str, typer.Option("--out", "-o", metavar="OUT.jsonl", help="Rollouts, in tokens form.")],
        samples: Annotated[int, typer.Option(min=1, help="Rollouts of each question.")] = 1,
        set: Changes = None,
        overwrite: Overwrite = False,
    ) -> None:
        """Sample rollouts with a config's policy, engine and search. Exit codes as for score."""
        from trace_fast.cli_terminal import command_errors

        with command_errors():
            check_train_extra()
            from trace_fast.cli_train import run_rollout

            code = run_rollout(config, set or [], questions=questions, out=out, samples=samples, overwrite=overwrite)
        raise typer.Exit(code)

    @app.command(name="eval", short_help="Evaluate a policy on questions.")
    def evaluate(
        config: TrainingConfig,
        questions: Annotated[str | None, typer.Option(metavar="FILE.jsonl", help="Default: data.validation.")] = None,
        out: Annotated[str | None, typer.Option("--out", "-o", metavar="OUT.jsonl", help="Also write them.")] = None,
        set: Changes = None,
        overwrite: Overwrite = False,
    ) -> None:
        """Print a policy's metrics on questions as JSON. Exit codes as for score."""
        from trace_fast.cli_terminal import command_errors

        with command_errors():
            check_train_extra()
            from trace_fast.cli_train import run_eval

            code = run_eval(config, set or [], questions=questions, out=out, overwrite=overwrite)
        raise typer.Exit(code)

    @app.command(short_help="Write a checkpoint's policy as a model folder.")
    def export(
        config: TrainingConfig,
        out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="The model folder to write.")],
        step: Annotated[int | None, typer.Option(min=0, help="Steps done; default: the newest checkpoint.")] = None,
        set: Changes = None,
        overwrite: Overwrite = False,
    ) -> None:
        """Write the policy of a run's checkpoint with its tokenizer, as transformers and rollout servers load it."""
        from trace_fast.cli_terminal import command_errors

        with command_errors():
            check_train_extra()
            from trace_fast.cli_train import run_export

            code = run_export(config, set or [], step=step, out=out, overwrite=overwrite)
        raise typer.Exit(code)
