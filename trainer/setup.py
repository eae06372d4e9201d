"""Makes a run from its settings: what can be wrong is looked at before any process waits for another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from trace_fast.backends import dtype_of, pick_device
from trace_fast.errors import ConfigError, InputError, OutputError, RolloutError
from trace_fast.model import load_tokenizer
from trace_fast.model_spec import ModelSpec
from trace_fast.service import vocabulary_hash
from trace_fast.trainer.batch import check_sampling
from trace_fast.trainer.boards import check_boards
from trace_fast.trainer.checkpoint import Checkpoints, latest_checkpoint, read_progress
from trace_fast.trainer.config import EngineConfig, TrainConfig
from trace_fast.trainer.data import check_key, read_tasks
from trace_fast.trainer.engines.engine import Engine
from trace_fast.trainer.engines.hf import HfEngine
from trace_fast.trainer.engines.http import Dialect, HttpEngine, JsonClient
from trace_fast.trainer.engines.sglang import SglangDialect, SglangGroup, SglangWeights
from trace_fast.trainer.engines.vllm import VllmDialect, VllmGroup, VllmWeights
from trace_fast.trainer.engines.weights import (
    BroadcastGroup,
    DiskWeights,
    NcclWeights,
    TrainableEngine,
    WeightServer,
    WeightSink,
)
from trace_fast.trainer.harness import ChatFrame, Harness, Task
from trace_fast.trainer.harness.config import HarnessConfig
from trace_fast.trainer.loop import Run, sync_engine
from trace_fast.trainer.optimizer import Adam
from trace_fast.trainer.parallel import TrainMesh
from trace_fast.trainer.policy import Policy, load_module
from trace_fast.trainer.reference import FrozenReference, Reference
from trace_fast.trainer.remote_reference import RemoteReference
from trace_fast.trainer.run_index import build_index, check_search, open_config_index, shared_index
from trace_fast.trainer.run_log import RunLog
from trace_fast.trainer.stop import StopSignal


@dataclass(frozen=True)
class Inputs:
    """What a run reads, checked; made before any process group starts."""

    frame: ChatFrame
    tasks: list[Task]
    validation: list[Task]
    checkpoint: Path | None


def read_inputs(config: TrainConfig, *, resume: bool) -> Inputs:
    """Reads questions, tokenizer and model settings, and looks for a checkpoint.

    Raises:
        TraceFastError: what is wrong with the settings, a file, or the folder of the run, by name.
    """
    config.parallel.sizes(int(os.environ.get("WORLD_SIZE", 1)))
    check_sampling(config.harness.temperature, config.harness.top_p)
    check_boards(tensorboard=config.logging.tensorboard, wandb=config.logging.wandb)
    checkpoint = _checkpoint(config, resume=resume)
    _check_model(config)
    frame = _frame(config, config.harness)
    _check_reference(config, frame)
    check_search(config.search)
    tasks = _questions(config.data.train, frame)
    if config.training.prompts > len(tasks):
        raise ConfigError(
            f"training.prompts: expected at most the {len(tasks)} questions of {config.data.train}, got "
            f"{config.training.prompts}"
        )
    if config.evaluation.every and config.data.validation is None:
        raise ConfigError("data.validation: is required, since evaluation.every is not 0")
    validation = []
    if config.data.validation is not None:
        validation = _questions(config.data.validation, _frame(config, config.evaluation.harness))
        check_key(validation, config.evaluation.by, config.data.validation)
    return Inputs(frame, tasks, validation, checkpoint)


@contextmanager
def open_run(config: TrainConfig, inputs: Inputs) -> Iterator[tuple[Run, int]]:
    """The run, and the step that it begins with. Starts the process group, and ends it.

    Raises:
        TraceFastError: model, mesh, index or checkpoint do not fit; by name.
    """
    device = pick_device("auto").type
    folder = _made_folder(config)
    with processes(device), StopSignal() as stop:
        mesh = TrainMesh.create(config.parallel, device)
        index = shared_index(config.search, mesh)
        policy = Policy.load(config.policy, mesh, config.parallel)
        optimizer = Adam(policy.parameters, config.optimizer)
        reference = mesh.together(lambda: open_reference(config, mesh.device))
        checkpoints = Checkpoints(folder / "checkpoints", mesh, keep=config.checkpoint.keep)
        begin = 0
        if inputs.checkpoint is not None:
            begin = _resumed(config, inputs.checkpoint, checkpoints, policy, optimizer, reference)
        engine = mesh.together(
            lambda: open_engine(config, mesh.device, longest=_longest(config), first=mesh.is_first)
        )
        harness = Harness(inputs.frame, index, config.harness)
        examiner = Harness(_frame(config, config.evaluation.harness), index, config.evaluation.harness)
        settings = config.model_dump(mode="json")
        log = mesh.together(
            lambda: RunLog(folder, config.logging, begin=begin, writes=mesh.is_first, settings=settings)
        )
        run = Run(
            config=config,
            mesh=mesh,
            policy=policy,
            optimizer=optimizer,
            reference=reference,
            engine=engine,
            harness=harness,
            examiner=examiner,
            tasks=inputs.tasks,
            validation=inputs.validation,
            checkpoints=checkpoints,
            log=log,
            stop=stop,
        )
        try:
            sync_engine(run, begin)
            yield run, begin
        except BaseException:
            log.close(failed=True)
            raise
        log.close()


@contextmanager
def open_sampler(config: TrainConfig, *, evaluation: bool) -> Iterator[tuple[Harness, Engine]]:
    """Harness and engine of a config alone, in this process: to sample or evaluate without training."""
    device = pick_device("auto")
    settings = config.evaluation.harness if evaluation else config.harness
    frame = _frame(config, settings)
    check_search(config.search)
    build_index(config.search)
    index = open_config_index(config.search)
    yield Harness(frame, index, settings), open_engine(config, device, longest=settings.max_tokens, first=False)


@contextmanager
def processes(device: str) -> Iterator[None]:
    """The default process group: that of the launcher (torchrun), or of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def open_engine(config: TrainConfig, device: torch.device, *, longest: int, first: bool) -> TrainableEngine:
    """The engine that samples.

    Args:
        longest: tokens of a trajectory at most. first: whether this process gives a server its new weights.
    """
    settings = config.engine
    if settings.kind == "hf":
        module = load_module(config.policy.path)
        torch.nn.Module.to(module, device, dtype_of(settings.dtype))
        return HfEngine(module, n_slots=settings.slots, max_length=longest)
    assert settings.url is not None  # EngineConfig
    dialect: Dialect = SglangDialect()
    if settings.kind == "vllm":
        dialect = VllmDialect(processed_logprobs=settings.processed_logprobs)
    return HttpEngine(
        dialect,
        settings.url,
        max_length=longest,
        concurrency=settings.concurrency,
        timeout_s=settings.timeout_s,
        deadline_s=settings.deadline_s,
        weights=_weight_sink(settings, settings.url, Path(config.policy.path), device) if first else None,
    )


def open_reference(config: TrainConfig, device: torch.device) -> FrozenReference:
    """The frozen model, in this process or another.

    Raises:
        ConfigError, ModelError: it cannot be loaded. ServerError, BadAnswer: no server of it answers.
    """
    if config.reference.placement == "remote":
        vocabulary = vocabulary_hash(load_tokenizer(config.policy.path))
        return RemoteReference(config.reference, vocabulary=vocabulary)
    return Reference.load(config.reference.path or config.policy.path, config.reference, device)


def _weight_sink(settings: EngineConfig, url: str, model: Path, device: torch.device) -> WeightSink:
    client = JsonClient(url)
    server: WeightServer = VllmWeights(client) if settings.kind == "vllm" else SglangWeights(client)
    if settings.weights is not None:
        return DiskWeights(server, Path(settings.weights), model)
    assert settings.weights_address is not None  # EngineConfig
    host, _, port = settings.weights_address.rpartition(":")
    group: BroadcastGroup = VllmGroup(device) if settings.kind == "vllm" else SglangGroup(device)
    return NcclWeights(server, group, address=host, port=int(port))


def _frame(config: TrainConfig, harness: HarnessConfig) -> ChatFrame:
    return ChatFrame(load_tokenizer(config.policy.path), opener=harness.opener, instructions=harness.instructions)


def _longest(config: TrainConfig) -> int:
    return max(config.harness.max_tokens, config.evaluation.harness.max_tokens if config.evaluation.every else 0)


def _questions(path: str, frame: ChatFrame) -> list[Task]:
    """The questions of a file; every answer can be scored behind the opener."""
    tasks = read_tasks(path)
    for task in tasks:
        try:
            frame.answers(task.answers)
        except RolloutError as error:
            raise InputError(f"{path}: question {task.id!r}: {error.reason}") from error
    return tasks


def _check_model(config: TrainConfig) -> None:
    """That policy and reference run in packs, and that their positions are enough."""
    spec = ModelSpec.from_pretrained(config.policy.path)
    spec.check_supported()
    limits = {"harness": config.harness, "evaluation.harness": config.evaluation.harness}
    for name, limit in limits.items():
        used = name == "harness" or config.evaluation.every
        if used and spec.max_positions is not None and limit.max_tokens > spec.max_positions:
            raise ConfigError(
                f"{name}.max_tokens: expected at most the {spec.max_positions} positions of {config.policy.path!r}, "
                f"got {limit.max_tokens}"
            )


def _check_reference(config: TrainConfig, frame: ChatFrame) -> None:
    """That another reference reads the policy's ids as the policy does."""
    if config.reference.path is None:
        return
    ModelSpec.from_pretrained(config.reference.path).check_supported()
    theirs = load_tokenizer(config.reference.path).get_vocab()
    odd = [token for token, number in frame.tokenizer.get_vocab().items() if theirs.get(token) != number]
    if odd:
        raise ConfigError(
            f"reference.path: expected a model with the vocabulary of {config.policy.path!r}, got "
            f"{config.reference.path!r}, in which {len(odd)} tokens have no or another number, such as {odd[0]!r}"
        )


def _made_folder(config: TrainConfig) -> Path:
    folder = Path(config.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise OutputError(f"out: {config.out!r}: cannot be made: {error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"out: {config.out!r}: expected a folder that can be written into")
    return folder


def _checkpoint(config: TrainConfig, *, resume: bool) -> Path | None:
    """The checkpoint to go on from; a folder that holds a run is never written into unasked."""
    folder = Path(config.out)
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"out: expected a folder, got a file: {folder}")
    found = latest_checkpoint(folder / "checkpoints")
    if resume:
        if found is not None:
            _check_settings(config, found)
        return found
    if found is not None or (folder / "metrics.jsonl").exists():
        raise OutputError(f"out: {folder} holds a run; continue it with --resume, or give another folder")
    return None


def _resumed(
    config: TrainConfig,
    path: Path,
    checkpoints: Checkpoints,
    policy: Policy,
    optimizer: Adam,
    reference: FrozenReference,
) -> int:
    progress = read_progress(path)
    if progress.reference != reference.hash:
        raise ConfigError(
            f"{path}: expected the reference {progress.reference} that the run began with, got {reference.hash}; "
            "credit against another reference would be another reward"
        )
    return checkpoints.load(path, policy, optimizer).step


def _check_settings(config: TrainConfig, checkpoint: Path) -> None:
    """That a run which goes on from the checkpoint has the settings that it began with."""
    old, new = read_progress(checkpoint).settings, config.deciding()
    changed = [
        f"{section}.{key}"
        for section in sorted({*old, *new})
        for key in sorted({*old.get(section, {}), *new.get(section, {})})
        if old.get(section, {}).get(key) != new.get(section, {}).get(key)
    ]
    if changed:
        raise ConfigError(
            f"{checkpoint}: expected the settings that the run began with; these differ: {', '.join(changed)}"
        )
