"""What the processes of the distributed tests run (see ``ranks``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from training_rollouts import build_random_rollouts, build_random_scores
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trace_fast.trainer.algorithms import TraceConfig, prepare
from trace_fast.trainer.batch import TrainingBatch, training_batch
from trace_fast.trainer.microbatches import microbatches
from trace_fast.trainer.optimizer import Adam, AdamConfig
from trace_fast.trainer.parallel import ParallelConfig, TrainMesh
from trace_fast.trainer.policy import Policy, PolicyConfig
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


def gradients_and_weights(
    out: str, parallel: dict[str, Any], architecture: str = "qwen3", tied: bool = True, budget: int = 80
) -> None:
    """Loss and gradients of one batch, then the weights after three steps over it; the first process writes them."""
    policy = tiny_policy(parallel, architecture, tied=tied)
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
    found |= {f"weight.{name}": weight.clone() for name, weight in policy.weights()}
    if dist.get_rank() == 0:
        save_file({k: v.contiguous() for k, v in found.items()}, Path(out))
