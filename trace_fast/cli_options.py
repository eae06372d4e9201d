"""Options that several commands share, with their help."""

from __future__ import annotations

from typing import Annotated

import typer

from trace_fast.config import Alias, DType

InputFiles = Annotated[
    list[str],
    typer.Argument(metavar="IN...", help="Files of rollouts (JSONL, JSON, Parquet; .gz, .zst), or - for stdin."),
]
Model = Annotated[str, typer.Option("--model", "-m", help="Reference model: a folder, a hub id or a GGUF file.")]
Format = Annotated[str, typer.Option(help="Format of the records; auto detects it.")]
Opener = Annotated[
    str, typer.Option(metavar="TEXT", help="Answer-ready text after each state; auto: the format's own.")
]
Precision = Annotated[DType, typer.Option(help="Weights and activations.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Backend = Annotated[str, typer.Option(help="Implementation; trace-fast info lists them.")]
HowAliases = Annotated[Alias, typer.Option(help="How several gold answers become one score.")]
PackTokens = Annotated[int | None, typer.Option(min=1, help="Token budget of a forward pass; default: by free memory.")]
IdKey = Annotated[str | None, typer.Option(metavar="PATH", help="Dotted path of a record's id.")]
GroupKey = Annotated[str | None, typer.Option(metavar="PATH", help="Dotted path of its group (one prompt).")]
AnswerKey = Annotated[str | None, typer.Option(metavar="PATH", help="Dotted path of the gold answer(s).")]
RewardKey = Annotated[str | None, typer.Option(metavar="PATH", help="Dotted path of the outcome reward.")]
MessagesKey = Annotated[str | None, typer.Option(metavar="PATH", help="Dotted path of the messages or text.")]
Secured = Annotated[float, typer.Option(max=0.0, help="Mean log-prob (nats) from which a state counts as secured.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing output.")]
TrainingConfig = Annotated[str, typer.Argument(metavar="CONFIG.toml", help="Settings of the run.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
