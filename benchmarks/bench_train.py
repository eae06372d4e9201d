"""The gradient of one optimiser step beside TRL's: the same small model, rollouts and micro-batches, in one run.

Groups of rollouts with a common prompt, several turns and an answer, of uneven lengths. TRL's ``GRPOTrainer`` computes
its loss with its own methods (fused head included) on right-padded micro-batches of 8 rollouts; ours takes packed
micro-batches of as many tokens. Losses and gradients must agree before a speed is printed. A row goes to
``results/train.jsonl``: seconds, rollout tokens a second, and the bytes that a step takes over what was there before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from trace_fast.bench.about import about, version
from trace_fast.bench.measure import peak_extra_bytes, seconds_of
from trace_fast.bench.rows import append_json
from trace_fast.kernels.policy_loss import PolicyLossConfig
from trace_fast.rollout import Rollout
from trace_fast.trainer.algorithms import GrpoConfig, prepare
from trace_fast.trainer.batch import TrainingBatch, training_batch
from trace_fast.trainer.microbatches import microbatches
from trace_fast.trainer.parallel import ParallelConfig, TrainMesh
from trace_fast.trainer.policy import Policy, PolicyConfig
from trace_fast.trainer.setup import processes

RESULTS = Path(__file__).parent / "results" / "train.jsonl"
VOCABULARY, ROWS = 1024, 8
LOSS = PolicyLossConfig.grpo()
AGREEMENT = 1e-4  # relative, float32: the same sums in another order


def small_model() -> Qwen3ForCausalLM:
    """The size of the docworld base policy."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=448,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
    )


def draw_rollouts(groups: int, samples: int) -> list[Rollout]:
    """Prompts of about 120 tokens, six turns of about 20 written and 110 read tokens, an answer of 8."""
    rng = np.random.default_rng(0)
    rollouts = []
    for group in range(groups):
        prompt = rng.integers(0, VOCABULARY, rng.integers(90, 150))
        for sample in range(samples):
            ids, written, boundaries = list(prompt), [False] * len(prompt), [len(prompt)]
            turns = int(rng.integers(3, 8))
            for _ in range(turns):
                for length, mine in ((int(rng.integers(10, 30)), True), (int(rng.integers(60, 160)), False)):
                    ids += rng.integers(0, VOCABULARY, length).tolist()
                    written += [mine] * length
                boundaries.append(len(ids))
            ids += rng.integers(0, VOCABULARY, 8).tolist()
            written += [True] * 8
            boundaries.append(len(ids))
            rollouts.append(
                Rollout(
                    id=f"{group}.{sample}",
                    group=str(group),
                    input_ids=np.array(ids),
                    boundaries=np.array(boundaries),
                    n_turns=turns,
                    answers=(np.array([1]),),
                    openers=(np.array([2]),) * len(boundaries),
                    loss_mask=np.array(written),
                    logprobs=np.where(written, -1.0, np.nan).astype(np.float32),
                    reward=float(rng.integers(2)),
                )
            )
    return rollouts


def ours(policy: Policy, batch: TrainingBatch, budget: int) -> Callable[[], float]:
    def step() -> float:
        total = 0.0
        for parameter in policy.parameters.values():
            parameter.grad = None
        for micro in microbatches(batch, budget):
            logprobs_L = policy.logprobs(micro)
            result = micro.loss(logprobs_L, LOSS)
            result.loss.backward()
            total += float(result.loss.detach())
        return total

    return step


def trl(module: PreTrainedModel, batch: TrainingBatch) -> Callable[[], float]:
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(module, temperature=1.0, outputs=("log_probs", "entropy"))
    spans = list(pairwise(batch.cu_tokens_R1.tolist()))

    def padded(values_N: Tensor, chosen: range) -> Tensor:
        return pad_sequence([values_N[a:b] for a, b in spans[chosen.start : chosen.stop]], batch_first=True)

    assert batch.advantages_N is not None
    parts = []
    for start in range(0, len(spans), ROWS):
        chosen = range(start, start + ROWS)
        ids_RT = padded(batch.input_ids_N, chosen)
        parts.append(
            {
                "prompt_ids": ids_RT[:, :1],
                "prompt_mask": torch.ones_like(ids_RT[:, :1]),
                "completion_ids": ids_RT[:, 1:],
                "completion_mask": padded(torch.ones_like(batch.input_ids_N), chosen)[:, 1:],
                "tool_mask": padded(batch.loss_mask_N.long(), chosen)[:, 1:],
                "advantages": padded(batch.advantages_N, chosen)[:, 1:],
                "old_per_token_logps": padded(batch.old_logprobs_N, chosen)[:, 1:],
            }
        )
    trainer = SimpleNamespace(
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(
            num_processes=1,
            is_main_process=False,  # nothing is logged
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            autocast=nullcontext,
        ),
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=0.0,
        current_gradient_accumulation_steps=len(parts),
        epsilon_high=LOSS.clip_high,
        epsilon_low=LOSS.clip_low,
        importance_sampling_level="token",
        loss_type="grpo",
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
    )
    method: Any = GRPOTrainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: method(trainer, *args, **kwargs)

    def step() -> float:
        total = 0.0
        module.zero_grad(set_to_none=True)
        for part in parts:
            loss = GRPOTrainer._compute_loss(trainer, module, part)
            loss.backward()
            total += float(loss.detach())
        return total

    return step


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    rollouts = draw_rollouts(options.groups, options.samples)
    batch = prepare(training_batch(rollouts), GrpoConfig())
    lengths = batch.cu_tokens_R1.diff().tolist()
    budget = max(sum(lengths[i : i + ROWS]) for i in range(0, len(lengths), ROWS))
    device = torch.device("cpu")
    with processes("cpu"):
        parallel = ParallelConfig()
        mesh = TrainMesh.create(parallel, "cpu")
        policy = Policy(small_model(), PolicyConfig(path="small", dtype="float32"), mesh, parallel)
        peer = small_model()
        start = batch.with_old_logprobs(policy.batch_logprobs(batch, budget))  # near the policy, as in training
        steps = {"ours": ours(policy, start, budget), "trl": trl(peer, start)}
        losses = {name: step() for name, step in steps.items()}
        theirs = {name: p.grad for name, p in peer.named_parameters()}
        off = max(
            float((p.grad.full_tensor() - theirs[name]).norm() / theirs[name].norm())  # type: ignore[union-attr]
            for name, p in policy.parameters.items()
        )
        if off > AGREEMENT or abs(losses["ours"] - losses["trl"]) > AGREEMENT:
            print(f"losses {losses}, gradients differ by {off:.2e}: no speed", file=sys.stderr)
            return 1
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.rounds):
            for name, step in steps.items():
                times[name].append(seconds_of(step, device))
        seconds = {name: statistics.median(runs) for name, runs in times.items()}
        memory = {name: peak_extra_bytes(step, device) for name, step in steps.items()}
    tokens = sum(lengths)
    trained = int(batch.loss_mask_N.sum())
    case = f"{options.groups} groups x {options.samples}, {tokens} tokens, {trained} trained, float32"
    row = {**about(device), "trl": version("trl"), "op": "train", "case": case, "rounds": options.rounds}
    row |= {"numbers": "right", "gradients_differ": off, "seconds": seconds, "peak_extra_bytes": memory}
    row |= {"tokens_per_second": {name: tokens / s for name, s in seconds.items()}}
    row |= {"speed_over_trl": seconds["trl"] / seconds["ours"]}
    append_json(RESULTS, [json.dumps(row)])
    print(f"train, {case}; gradients agree to {off:.1e}")
    for name, s in seconds.items():
        held = "?" if memory[name] is None else f"{memory[name] / 1e6:.0f} MB"  # type: ignore[operator]
        print(f"  {name:6} {s:7.2f} s  {tokens / s:8.0f} tokens/s  {held}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
