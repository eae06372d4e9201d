"""What the processes of the distributed tests run (see ``ranks``)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from training_rollouts import build_random_rollouts, build_random_scores
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trace_fast.errors import InputError, OutputError
from trace_fast.trainer.algorithms import TraceConfig, prepare
from trace_fast.trainer.batch import TrainingBatch, training_batch
from trace_fast.trainer.checkpoint import Checkpoints, Progress
from trace_fast.trainer.engines.weights import Bystander
from trace_fast.trainer.loop import sync_engine
from trace_fast.trainer.microbatches import microbatches
from trace_fast.trainer.optimizer import Adam, AdamConfig
from trace_fast.trainer.parallel import ParallelConfig, PeerError, TrainMesh
from trace_fast.trainer.policy import NonFiniteError, Policy, PolicyConfig
from trace_fast.trainer.update import update_policy

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


def tiny_module(architecture: str = "qwen3", *, tied: bool = True, seed: int = 0) -> PreTrainedModel:
    """Random weights, the same in every process."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture, **SIZES, tie_word_embeddings=tied)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tiny_batch(seed: int = 0, group_sizes: tuple[int, ...] = (4, 1, 3, 5)) -> TrainingBatch:
    rollouts = build_random_rollouts(seed, group_sizes)
    batch = training_batch(rollouts, build_random_scores(rollouts, seed), temperature=0.8)
    noise_N = 0.3 * torch.randn(batch.input_ids_N.numel(), generator=torch.Generator().manual_seed(seed))
    batch = batch.with_old_logprobs((batch.sampler_logprobs_N + noise_N).clamp(max=0))
    return prepare(batch, TraceConfig())


def tiny_policy(parallel: dict[str, Any], architecture: str = "qwen3", *, tied: bool = True) -> Policy:
    settings = ParallelConfig(**parallel)
    mesh = TrainMesh.create(settings, "cpu")
    config = PolicyConfig(path="tiny", dtype="float32")
    return Policy(tiny_module(architecture, tied=tied), config, mesh, settings)


def gradients_and_weights(folder: str, cases: list[tuple[str, dict[str, Any], str, bool]]) -> None:
    """For each case (name, mesh, architecture, tied head): ``folder/name.safetensors``."""
    for name, parallel, architecture, tied in cases:
        found = _gradients_and_weights(tiny_policy(parallel, architecture, tied=tied))
        if dist.get_rank() == 0:
            save_file({k: v.contiguous() for k, v in found.items()}, Path(folder) / f"{name}.safetensors")


def _gradients_and_weights(policy: Policy, budget: int = 80) -> dict[str, torch.Tensor]:
    """Loss and gradients of one batch, then the weights after three optimiser steps over it."""
    batch, loss = tiny_batch(), TraceConfig().loss
    found: dict[str, torch.Tensor] = {}
    total = 0.0
    for micro in microbatches(batch, budget, rank=policy.mesh.data_rank, n_ranks=policy.mesh.n_data_ranks):
        logprobs_L = policy.logprobs(micro)
        value = micro.loss(logprobs_L, loss).loss
        value.backward()
        total += float(value.detach())
    found["loss"] = torch.tensor(policy.mesh.sum_over_data([total]), dtype=torch.float64)
    for name, parameter in policy.parameters.items():
        gradient = parameter.grad
        assert gradient is not None, name
        found[f"grad.{name}"] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        parameter.grad = None
    found["logprobs"] = policy.batch_logprobs(batch, budget)
    optimizer = Adam(policy.parameters, AdamConfig(lr=1e-2, max_grad_norm=0.5))
    for _ in range(3):
        result = update_policy(policy, optimizer, batch, loss, global_batch=7, budget=budget)
    found["metrics"] = torch.tensor([v for _, v in sorted(result.metrics.items())], dtype=torch.float64)
    return found | {f"weight.{name}": weight.clone() for name, weight in policy.weights()}


def checkpoint_round_trip(folder: str, parallel_saved: dict[str, Any], parallel_loaded: dict[str, Any]) -> None:
    """Saves after two steps and trains on at once; loads into a fresh policy on another mesh; both must then agree.

    The first process writes ``saved``, ``loaded`` (weights as they were saved, and as they came back) and
    ``continued``, ``resumed`` (after two more steps from each).
    """
    batch, loss, path = tiny_batch(), TraceConfig().loss, Path(folder)
    progress = Progress(step=2, optimizer_steps=4, reference="r", settings={"a": {"b": 1}})

    def made(parallel: dict[str, Any]) -> tuple[Policy, Adam, Checkpoints]:
        policy = tiny_policy(parallel)
        checkpoints = Checkpoints(path / "checkpoints", policy.mesh, keep=2)
        return policy, Adam(policy.parameters, AdamConfig(lr=1e-2)), checkpoints

    def trained(policy: Policy, optimizer: Adam) -> None:
        for _ in range(2):
            update_policy(policy, optimizer, batch, loss, global_batch=7, budget=80)

    policy, optimizer, checkpoints = made(parallel_saved)
    trained(policy, optimizer)
    saved = {name: weight.clone() for name, weight in policy.weights()}
    checkpoints.save(progress, policy, optimizer)
    trained(policy, optimizer)  # while the save runs
    continued = {name: weight.clone() for name, weight in policy.weights()}
    checkpoints.wait()
    policy, optimizer, checkpoints = made(parallel_loaded)
    for parameter in policy.parameters.values():
        parameter.detach().fill_(float("nan"))
    latest = checkpoints.latest()
    assert latest is not None
    assert checkpoints.load(latest, policy, optimizer) == progress
    loaded = {name: weight.clone() for name, weight in policy.weights()}
    trained(policy, optimizer)
    resumed = {name: weight.clone() for name, weight in policy.weights()}
    if dist.get_rank() == 0:
        for name, weights in (("saved", saved), ("loaded", loaded), ("continued", continued), ("resumed", resumed)):
            save_file({k: v.contiguous() for k, v in weights.items()}, path / f"{name}.safetensors")


def gradients_of_splits(out: str, budgets: list[int]) -> None:
    """Loss and gradients for several micro-batch budgets, and ``plain``: every rollout by itself through the model's
    own code, the objective of Eq. 12 written out, autograd."""
    policy = tiny_policy({})
    batch, loss = tiny_batch(), TraceConfig().loss
    found: dict[str, torch.Tensor] = {"counts": torch.zeros(len(budgets))}
    for split, budget in enumerate(budgets):
        total = 0.0
        micros = microbatches(batch, budget)
        for micro in micros:
            value = micro.loss(policy.logprobs(micro), loss).loss
            value.backward()
            total += float(value.detach())
        found["counts"][split] = len(micros)
        found[f"{split}.loss"] = torch.tensor([total])
        for name, parameter in policy.parameters.items():
            assert parameter.grad is not None
            found[f"{split}.{name}"] = parameter.grad.full_tensor()
            parameter.grad = None
    module = tiny_module()
    trained = [r for r, count in enumerate(batch.trained_tokens_R.tolist()) if count]
    cu = batch.cu_tokens_R1.tolist()
    objective = torch.zeros((), dtype=torch.float64)
    for r in trained:
        own = slice(cu[r], cu[r + 1])
        logits = module(input_ids=batch.input_ids_N[None, own]).logits[0, :-1].double() / batch.temperature
        logprobs = logits.log_softmax(-1).gather(1, batch.input_ids_N[own][1:, None])[:, 0]
        mask = batch.loss_mask_N[own][1:]
        logprobs, advantages = logprobs[mask], batch.advantages_N[own][1:][mask].double()
        old = batch.old_logprobs_N[own][1:][mask].double()
        sampler = batch.sampler_logprobs_N[own][1:][mask].double()
        ratio = (logprobs - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        objective = objective - (gain * (old - sampler).exp().clamp(max=2.0)).mean() / len(trained)
    objective.backward()
    found["plain.loss"] = objective.detach()[None]
    found |= {f"plain.{name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    save_file({k: v.contiguous() for k, v in found.items()}, Path(out))


def many_saves(folder: str) -> None:
    """A folder with what a killed save left, then saves of steps 2, 7, 7 again and 10, of which two are kept."""
    path = Path(folder)
    (path / ".step-000001").mkdir()
    policy = tiny_policy({})
    optimizer = Adam(policy.parameters, AdamConfig())
    checkpoints = Checkpoints(path, policy.mesh, keep=2)
    for step in (2, 7, 7, 10):
        checkpoints.save(Progress(step, step, "r", {}), policy, optimizer)
    checkpoints.wait()


def damaged_checkpoints(folder: str) -> None:
    """Messages of loading a checkpoint with each of its files missing, empty or cut off, and one of another model."""
    messages = {}
    policy = tiny_policy({})
    optimizer = Adam(policy.parameters, AdamConfig())
    checkpoints = Checkpoints(Path(folder), policy.mesh, keep=2)
    checkpoints.save(Progress(2, 2, "r", {}), policy, optimizer)
    checkpoints.wait()
    path = checkpoints.latest()
    assert path is not None

    def tried(name: str) -> None:
        try:
            checkpoints.load(path, policy, optimizer)
        except InputError as error:
            messages[name] = str(error)

    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for damage, content in (("missing", None), ("empty", b""), ("cut off", whole[: len(whole) // 2])):
            file.unlink()
            if content is not None:
                file.write_bytes(content)
            tried(f"{'shard' if file.suffix == '.distcp' else file.name} {damage}")
            file.write_bytes(whole)
    other = AutoConfig.for_model("qwen3", **(SIZES | {"intermediate_size": 64}), tie_word_embeddings=True)
    module = AutoModelForCausalLM.from_config(other, dtype=torch.float32)
    policy = Policy(module, PolicyConfig(path="tiny", dtype="float32"), policy.mesh, ParallelConfig())
    optimizer = Adam(policy.parameters, AdamConfig())
    tried("other model")
    (Path(folder) / "messages.json").write_text(json.dumps(messages))


def a_disk_that_is_full(folder: str) -> None:
    """The second process cannot write its shard of the second checkpoint; every process writes what it raised."""
    policy = tiny_policy({"shard": 2})
    optimizer = Adam(policy.parameters, AdamConfig())
    checkpoints = Checkpoints(Path(folder) / "checkpoints", policy.mesh, keep=2)
    checkpoints.save(Progress(1, 1, "r", {}), policy, optimizer)
    checkpoints.wait()
    if dist.get_rank() == 1:

        def full(*arguments: Any, **options: Any) -> None:
            raise OSError(28, "No space left on device")

        dcp.FileSystemWriter.write_data = full  # type: ignore[method-assign]
    checkpoints.save(Progress(2, 2, "r", {}), policy, optimizer)
    message = ""
    try:
        checkpoints.wait()
    except (OutputError, PeerError) as error:
        message = str(error)
    (Path(folder) / f"rank{dist.get_rank()}.txt").write_text(message)


def state_on_the_host() -> None:
    """Parameters whose mesh is another device's (there is none here, so they have no contents), moments on the host."""
    device_mesh = DeviceMesh("cuda", torch.arange(1), mesh_dim_names=("shard",), _init_backend=False)
    empty = torch.empty((6, 4), device="meta")
    parameter = DTensor.from_local(empty, device_mesh, [Shard(0)], run_check=False)
    own = nn.Parameter(torch.zeros(6, 4))
    optimizer = Adam({"w": own}, AdamConfig(offload=True))
    optimizer._parameters["w"] = parameter  # its place; the gradient below comes from its own
    for moment in (state := optimizer.state()).values():
        assert isinstance(moment, DTensor)
        assert (moment.device_mesh.device_type, moment.shape, moment.placements) == ("cpu", (6, 4), (Shard(0),))
        moment.to_local().fill_(2.0)
    assert len(state) == 2
    optimizer._parameters["w"] = own
    optimizer.step(0.0)  # without a gradient
    assert [float(moment.mean()) for moment in optimizer.state().values()] == pytest.approx([0.9 * 2.0, 0.98 * 2.0])


def masters(folder: str, parallel: dict[str, Any]) -> None:
    """A model stored in bfloat16 and trained in it, for two steps so small that bfloat16 weights would not move.

    Writes each weight before and after, and the log-probabilities of the first pass.
    """
    settings = ParallelConfig(**parallel)
    mesh = TrainMesh.create(settings, "cpu")
    module = tiny_module().to(torch.bfloat16)
    policy = Policy(module, PolicyConfig(path="tiny", dtype="bfloat16"), mesh, settings)
    assert {parameter.dtype for parameter in policy.parameters.values()} == {torch.float32}
    batch, found = tiny_batch(), {}
    found["logprobs"] = policy.batch_logprobs(batch, 200)
    found |= {f"before.{name}": weight.clone() for name, weight in policy.weights()}
    optimizer = Adam(policy.parameters, AdamConfig(lr=1e-6, weight_decay=0.0))
    for _ in range(2):
        update_policy(policy, optimizer, batch, TraceConfig().loss, global_batch=100, budget=200)
    found |= {f"after.{name}": weight.clone() for name, weight in policy.weights()}
    if dist.get_rank() == 0:
        save_file({k: v.contiguous() for k, v in found.items()}, Path(folder) / "found.safetensors")


def one_rank_meets_nan(folder: str) -> None:
    """The second process alone gets log-probabilities that are none; every process writes what it raised."""
    policy = tiny_policy({"shard": 2})
    optimizer = Adam(policy.parameters, AdamConfig())
    before = {name: p.to_local().clone() for name, p in policy.parameters.items()}
    logprobs = policy.logprobs
    if dist.get_rank() == 1:
        policy.logprobs = lambda micro: logprobs(micro) * float("nan")  # type: ignore[method-assign]
    message = ""
    try:
        update_policy(policy, optimizer, tiny_batch(), TraceConfig().loss, global_batch=100, budget=80)
    except NonFiniteError as error:
        message = str(error)
    assert all(torch.equal(p.to_local(), before[name]) for name, p in policy.parameters.items())
    assert optimizer.steps == 0
    (Path(folder) / f"rank{dist.get_rank()}.txt").write_text(message)


def uneven_work(folder: str) -> None:
    """Gathers of uneven parts, work that fails on one process, then a batch with one trained rollout and an empty one.

    Every process writes what it got.
    """
    policy = tiny_policy({"shard": 2})
    mesh, rank = policy.mesh, dist.get_rank()
    found: dict[str, Any] = {"gathered": mesh.gather_objects(["x" * 1000] * rank), "first": mesh.from_first(rank)}

    def fails() -> None:
        if rank == 1:
            raise InputError("q.jsonl:3: is none")

    try:
        mesh.together(fails)
    except (InputError, PeerError) as error:
        found["failure"] = [type(error).__name__, str(error)]
    optimizer = Adam(policy.parameters, AdamConfig(lr=1e-2, weight_decay=0.0))
    whole = tiny_batch()
    assert whole.advantages_N is not None
    for name, kept in (("one", int(whole.trained_tokens_R.argmax())), ("none", -1)):
        batch = whole.with_advantages(whole.advantages_N, torch.arange(whole.n_rollouts) == kept)
        before = {n: p.to_local().clone() for n, p in policy.parameters.items()}
        result = update_policy(policy, optimizer, batch, TraceConfig().loss, global_batch=4, budget=80)
        moved = any(not torch.equal(p.to_local(), before[n]) for n, p in policy.parameters.items())
        trained = result.metrics.get("trained_tokens", 0)
        found[name] = [result.optimizer_steps, result.tokens, trained, moved, result.metrics["grad_norm"] > 0]
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))


class Sink:
    """An engine that takes ``most`` weights and then fails."""

    def __init__(self, most: int) -> None:
        self.taken: list[str] = []
        self._most = most

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        for name, _ in weights:
            if len(self.taken) == self._most:
                raise OutputError("the server has gone")
            self.taken.append(name)


def weights_for_one_engine(folder: str) -> None:
    """The first process's engine gets all weights, then fails after three; the other only helps to gather them."""
    policy = tiny_policy({"shard": 2})
    found: dict[str, Any] = {}
    for name, most in (("all", 100), ("three", 3)):
        engine = Sink(most) if dist.get_rank() == 0 else Bystander()
        try:
            sync_engine(SimpleNamespace(engine=engine, policy=policy, mesh=policy.mesh), 1)  # type: ignore[arg-type]
        except (OutputError, PeerError) as error:
            found[f"{name} failed"] = f"{type(error).__name__}: {error}"
        found[name] = len(engine.taken) if isinstance(engine, Sink) else None
    found["after"] = policy.mesh.gather_objects(dist.get_rank())  # nobody is left behind in another collective
    (Path(folder) / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))


def copies_after_steps(folder: str) -> None:
    """Each process writes its own copy of the parameters that the tensor ranks hold in full, after clipped steps."""
    policy = tiny_policy({"shard": 2, "tensor": 2})
    optimizer = Adam(policy.parameters, AdamConfig(lr=1e-2, max_grad_norm=1e-3))
    for seed in range(4):
        update_policy(policy, optimizer, tiny_batch(seed), TraceConfig().loss, global_batch=5, budget=80)
    norms = {n: p.detach() for n, p in policy.parameters.items() if "norm" in n}
    own = {name: p.to_local().clone().contiguous() for name, p in norms.items()}
    save_file(own, Path(folder) / f"rank{dist.get_rank()}.safetensors")
