"""What a run would take, before it takes it: processes, memory a rank, tokens and arithmetic a step.

Numbers are computed from the model's sizes and the settings; activations are those of one micro-batch at its budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from trace_fast.backends import dtype_of
from trace_fast.model_spec import ModelSpec
from trace_fast.trainer.algorithms import algorithm
from trace_fast.trainer.config import TrainConfig
from trace_fast.trainer.throughput import forward_flops, parameters

GIB = 1 << 30
OFFLOADED_BYTES = 16  # a parameter on the host: both moments, weight and gradient
ACTIVATIONS_PER_LAYER = 34  # numbers of hidden size a token that a layer keeps for its backward pass, about


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """The plan of a run; bytes are of one rank.

    Args:
        sizes: replicate, shard, tensor. parameters: of the policy.
        device_bytes, host_bytes: by what they are for. scoring_bytes: of a reference that comes to the device to
            score, when gradients and activations are not there. tokens: at most, of one step's rollouts.
        rollouts, optimizer_steps: of one step. rollout_flops, score_flops, update_flops: at most, of one step, over
            all ranks.
    """

    sizes: tuple[int, int, int]
    parameters: int
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    scoring_bytes: int
    rollouts: int
    tokens: int
    optimizer_steps: int
    rollout_flops: float
    score_flops: float
    update_flops: float

    @property
    def flops(self) -> float:
        """Of one step."""
        return self.rollout_flops + self.score_flops + self.update_flops

    def lines(self) -> list[str]:
        """For people."""
        replicate, shard, tensor = self.sizes
        processes = replicate * shard * tensor
        rows = [
            f"processes            {processes} = replicate {replicate} x shard {shard} x tensor {tensor}",
            f"policy               {self.parameters / 1e9:.3f} B parameters",
        ]
        for place, parts in (("device", self.device_bytes), ("host", self.host_bytes)):
            rows.append(f"{place} memory a rank".ljust(21) + f"{sum(parts.values()) / GIB:.2f} GiB")
            rows += [f"  {name}".ljust(21) + f"{size / GIB:.2f} GiB" for name, size in parts.items() if size]
        if self.scoring_bytes:
            rows.append(f"  while it scores    {self.scoring_bytes / GIB:.2f} GiB more on the device, of the reference")
        rows += [
            f"rollouts a step      {self.rollouts}",
            f"tokens a step        at most {self.tokens:,}",
            f"optimiser steps      {self.optimizer_steps} a step",
            f"arithmetic a step    at most {self.flops / 1e12:.3g} TFLOP: rollout {self.rollout_flops / 1e12:.3g}, "
            f"scoring {self.score_flops / 1e12:.3g}, update {self.update_flops / 1e12:.3g}",
        ]
        return rows


def plan_run(config: TrainConfig, policy: ModelSpec, reference: ModelSpec, n_processes: int) -> TrainPlan:
    """The plan for that many processes.

    Raises:
        ConfigError: a mesh that does not fit the number of processes.
    """
    sizes = config.parallel.sizes(n_processes)
    _, shard, tensor = sizes
    weights, training, harness = parameters(policy), config.training, config.harness
    compute = dtype_of(config.policy.dtype).itemsize
    own = weights // (shard * tensor)
    layer = weights // policy.n_layers // tensor
    tokens = training.microbatch_tokens
    a_token = policy.hidden_size * compute
    kept = 1 if config.parallel.activation_checkpointing else ACTIVATIONS_PER_LAYER
    working = ACTIVATIONS_PER_LAYER * a_token * tokens // tensor  # of the one layer that runs
    device = {
        "master weights": 4 * own,
        "gradients": 4 * own,
        "optimiser": 0 if config.optimizer.offload else 8 * own,
        "gathered layers": 2 * compute * layer,
        "activations": policy.n_layers * kept * a_token * tokens // tensor + working,
    }
    host = {"optimiser": OFFLOADED_BYTES * own if config.optimizer.offload else 0}
    scored = algorithm(config.algorithm.name).needs_scores
    here = scored and config.reference.placement != "remote"
    reference_bytes = parameters(reference) * dtype_of(config.reference.dtype).itemsize if here else 0
    (device if config.reference.placement == "device" else host)["reference"] = reference_bytes
    if config.engine.kind == "hf":
        item = dtype_of(config.engine.dtype).itemsize
        cache = 2 * policy.n_layers * policy.n_kv_heads * policy.head_dim * item
        device["engine weights"] = weights * item
        device["engine cache"] = cache * config.engine.slots * harness.max_tokens
    rollouts = training.prompts * training.samples
    most = rollouts * harness.max_tokens
    forward = forward_flops(policy, most, depth=harness.max_tokens / 2, head_tokens=most)
    steps = -(-rollouts // training.global_batch)
    written = min(harness.max_tokens, (harness.max_turns + 1) * harness.max_response_tokens) * rollouts
    head_tokens = written if config.reference.kl else 0
    score = forward_flops(reference, most, depth=harness.max_tokens / 2, head_tokens=head_tokens)
    return TrainPlan(
        sizes=sizes,
        parameters=weights,
        device_bytes=device,
        host_bytes=host,
        scoring_bytes=host.get("reference", 0),
        rollouts=rollouts,
        tokens=most,
        optimizer_steps=steps,
        rollout_flops=forward if config.engine.kind == "hf" else 0.0,
        score_flops=score if scored else 0.0,
        update_flops=(4 if steps > 1 else 3) * forward + (forward if config.parallel.activation_checkpointing else 0.0),
    )
