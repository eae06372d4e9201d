"""Settings of a training run, from a TOML file: hyperparameters under their usual names, the paper's as defaults.

Unknown keys are refused, with the nearest known one. ``--set a.b=c`` changes one value; ``c`` is read as TOML, or as a
string where it is none. TOML has no null: ``"none"`` stands for it where a setting may be ``None``.
"""

from __future__ import annotations

import difflib
import tomllib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trace_fast.config import Alias
from trace_fast.errors import ConfigError
from trace_fast.trainer.algorithms import AlgorithmConfig, TraceConfig
from trace_fast.trainer.harness.config import HarnessConfig
from trace_fast.trainer.optimizer import AdamConfig
from trace_fast.trainer.parallel import ParallelConfig
from trace_fast.trainer.policy import PolicyConfig

Name = Annotated[str, Field(min_length=1)]  # of a file, folder or model: an empty one would be the current folder


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ReferenceConfig(_Section):
    """The frozen model that scores states; the policy as it was loaded, unless ``path`` names another.

    ``placement``: ``device`` keeps it beside the policy, ``offload`` on the host between the scoring phases,
    ``remote`` in the ``trace-fast serve`` process at ``url``, which must score in this ``dtype`` and by this ``alias``.
    ``kl``: also score the tokens that the policy wrote, for the metric of its divergence. ``timeout_s``: of one request
    to the server; ``deadline_s``: of a request with all its attempts.
    """

    path: Name | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    backend: Literal["auto", "triton", "native", "reference"] = "auto"
    placement: Literal["device", "offload", "remote"] = "device"
    url: Name | None = None
    timeout_s: float = Field(600.0, gt=0)
    deadline_s: float = Field(1800.0, gt=0)
    alias: Alias = "max"
    max_tokens_per_pack: int | None = Field(None, ge=1)
    kl: bool = True

    @model_validator(mode="after")
    def _remote(self) -> ReferenceConfig:
        if (self.placement == "remote") != (self.url is not None):
            raise ValueError("expected a url where placement is 'remote', and nowhere else")
        if self.url is not None and self.path is not None:
            raise ValueError("expected no path where placement is 'remote': the server has its own")
        return self


class DataConfig(_Section):
    """Files of questions, JSONL: ``id`` (default: the line), ``question``, ``answers``; other keys are carried along.

    ``validation``: for evaluations.
    """

    train: Name
    validation: Name | None = None


class EncoderConfig(_Section):
    """What embeds texts for a vector index: a folder or hub id of sentence-transformers or transformers."""

    path: Name
    kind: Literal["sentence_transformers", "transformers"] = "sentence_transformers"


class SearchConfig(_Section):
    """What the browser searches. ``index``: a folder; where it holds no index yet, one is built from ``corpus``."""

    index: Name
    corpus: Name | None = None
    kind: Literal["bm25", "vectors"] = "bm25"
    encoder: EncoderConfig | None = None

    @model_validator(mode="after")
    def _vectors_have_an_encoder(self) -> SearchConfig:
        if (self.kind == "vectors") != (self.encoder is not None):
            raise ValueError(f"encoder: expected one with kind 'vectors' and none otherwise, got {self.encoder}")
        return self


class EngineConfig(_Section):
    """What samples. ``hf`` runs in the training processes; ``vllm`` and ``sglang`` are servers at ``url``.

    ``slots``: sequences that ``hf`` decodes at once. ``concurrency``: requests that a server gets at once.
    ``timeout_s``: of one attempt, ``deadline_s``: of a request with all its attempts. A server gets new weights through
    the folder ``weights``, which it must see under the same name, or through its own NCCL group, whose first rank is
    ``weights_address`` (host:port) in the trainer. ``processed_logprobs``: vLLM was started with
    ``--logprobs-mode processed_logprobs``.
    """

    kind: Literal["hf", "vllm", "sglang"] = "hf"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    slots: int = Field(64, ge=1)
    url: str | None = None
    concurrency: int = Field(64, ge=1)
    timeout_s: float = Field(120.0, gt=0)
    deadline_s: float = Field(240.0, gt=0)
    weights: Name | None = None
    weights_address: str | None = Field(None, pattern=r"^[^:\s]+:\d{1,5}$")
    processed_logprobs: bool = False

    @model_validator(mode="after")
    def _a_server_can_be_reached(self) -> EngineConfig:
        if (self.kind == "hf") != (self.url is None):
            raise ValueError(f"url: expected one for a server and none with hf, got {self.url!r}")
        ways = sum(way is not None for way in (self.weights, self.weights_address))
        if ways != (self.kind != "hf"):
            raise ValueError("weights, weights_address: expected one of the two for a server, and none with hf")
        return self


class TrainingConfig(_Section):
    """Sizes of a step.

    ``prompts``: questions of a step; ``samples``: rollouts of each. ``global_batch``: rollouts of an optimiser step.
    ``microbatch_tokens``: tokens of a forward pass of one data rank. ``attempts``: how often a rollout that its engine
    failed is sampled in all; ``incomplete_groups``: what becomes of a group that still lacks some.
    """

    steps: int = Field(200, ge=1)
    prompts: int = Field(64, ge=1)
    samples: int = Field(8, ge=1)
    global_batch: int = Field(128, ge=1)
    microbatch_tokens: int = Field(65_536, ge=1)
    seed: int = Field(0, ge=0)
    attempts: int = Field(2, ge=1)
    incomplete_groups: Literal["keep", "drop"] = "keep"


class CheckpointConfig(_Section):
    """``every``: steps between checkpoints, the last step has one always. ``keep``: how many stay."""

    every: int = Field(20, ge=1)
    keep: int = Field(2, ge=1)


class EvaluationConfig(_Section):
    """``every``: steps between evaluations on the validation questions (0: never); before the first step and after the
    last one too. ``by``: a key of the questions; success is also logged for each of its values. ``harness``: the
    paper's evaluation limits, changed by what is given."""

    every: int = Field(20, ge=0)
    questions: int | None = Field(None, ge=1)
    samples: int = Field(1, ge=1)
    by: Name | None = None
    harness: HarnessConfig = Field(default_factory=HarnessConfig.evaluation)

    @model_validator(mode="before")
    @classmethod
    def _on_top_of_the_papers(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("harness"), dict):
            base = HarnessConfig.evaluation().model_dump()
            return given | {"harness": base | given["harness"]}
        return given


class LoggingConfig(_Section):
    """``tensorboard``: write its event files. ``wandb``: also log to this project of Weights & Biases. ``rollouts``:
    dump the rollouts and scores of every n-th step (0: never). ``peak_tflops``: of one device, for the share of it
    that is used (MFU)."""

    tensorboard: bool = False
    wandb: Name | None = None
    rollouts: int = Field(1, ge=0)
    peak_tflops: float | None = Field(None, gt=0)


class TrainConfig(_Section):
    """All settings of a run. ``out`` is its folder."""

    out: Name
    policy: PolicyConfig
    data: DataConfig
    search: SearchConfig
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    harness: HarnessConfig = Field(default_factory=HarnessConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    algorithm: AlgorithmConfig = Field(default_factory=TraceConfig)
    optimizer: AdamConfig = Field(default_factory=AdamConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    @model_validator(mode="after")
    def _a_rollout_fits_a_microbatch(self) -> TrainConfig:
        if self.harness.max_tokens > self.training.microbatch_tokens:
            raise ValueError(
                "training.microbatch_tokens: expected at least harness.max_tokens = "
                f"{self.harness.max_tokens}, since a rollout is not divided; got {self.training.microbatch_tokens}"
            )
        return self

    def deciding(self) -> dict[str, Any]:
        """The settings that a resumed run must share to continue as it would have gone on: those of numbers, not of
        places, times and memory."""
        return self.model_dump(
            mode="json",
            exclude={
                **dict.fromkeys(("out", "checkpoint", "evaluation", "logging", "parallel"), True),
                "training": {"steps"},
                "data": {"validation"},
                "search": {"index", "corpus"},
                "reference": {"placement", "max_tokens_per_pack", "url", "timeout_s", "deadline_s"},
                "engine": {"url", "concurrency", "timeout_s", "deadline_s", "weights", "weights_address"},
            },
        )


def read_config(path: str, changes: Sequence[str] = ()) -> TrainConfig:
    """The settings in a TOML file, with ``key=value`` changes on top.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown, missing or wrong; it names file and key.
    """
    try:
        given = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: expected TOML: {error}") from error
    for change in changes:
        _apply(given, change)
    try:
        return TrainConfig.model_validate(_with_nulls(given, [TrainConfig]), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in _problems(error))) from None


def _apply(given: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or not all(names):
        raise ConfigError(f"--set: expected section.key=value, got {change!r}")
    try:
        read = tomllib.loads(f"value = {text}")
        value = read["value"] if len(read) == 1 else text.strip()  # with a line break there may be more
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text.strip()
    section = given
    for name in names[:-1]:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise ConfigError(f"--set {change}: {name} is a value, not a section")
    section[names[-1]] = value


def _with_nulls(given: dict[str, Any], models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """The settings of a section, one of ``models``, with ``None`` for ``"none"`` where that is allowed."""
    made: dict[str, Any] = {}
    for key, value in given.items():
        kinds = [model.model_fields[key].annotation for model in models if key in model.model_fields]
        if isinstance(value, dict):
            made[key] = _with_nulls(value, [model for kind in kinds for model in _models(kind)])
        else:
            nullable = any(type(None) in typing.get_args(kind) for kind in kinds)
            made[key] = None if value == "none" and nullable else value
    return made


def _problems(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        place = [str(part) for part in problem["loc"]]
        shown = ".".join(part for i, part in enumerate(place) if not (i == 1 and place[0] == "algorithm"))
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(place[-1], _known_keys(place[:-1]), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield f"{shown}: unknown key{hint}"
        elif problem["type"] == "union_tag_invalid":
            names = problem["ctx"]["expected_tags"]
            yield f"{shown}.name: expected one of {names}, got {problem['input'].get('name')!r}"
        elif problem["type"] == "union_tag_not_found":
            yield f"{shown}.name: is required"
        elif problem["type"] in ("model_type", "model_attributes_type"):
            yield f"{shown}: expected a section, got {problem['input']!r}"
        elif problem["type"] == "missing":
            yield f"{shown}: is required"
        else:
            yield f"{shown + ': ' if shown else ''}{problem['msg'].removeprefix('Value error, ')}" + (
                f", got {problem['input']!r}" if not isinstance(problem["input"], dict) else ""
            )


def _known_keys(place: Sequence[str]) -> list[str]:
    """The keys of the section at ``place``; behind ``algorithm`` comes the name of the one that was chosen."""
    models: list[type[BaseModel]] = [TrainConfig]
    for part in place:
        found: list[type[BaseModel]] = []
        for model in models:
            if part in model.model_fields:
                found += _models(model.model_fields[part].annotation)
            elif "name" in model.model_fields and model.model_fields["name"].default == part:
                found.append(model)
        models = found
    return [key for model in models for key in model.model_fields]


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models(part)]
