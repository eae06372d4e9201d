"""GRPO-family losses and advantages against TRL's and verl's own functions, on random batches.

TRL's loss is called as its trainer calls it, with the log-probabilities of a given batch in place of a model's. Both
peers work on padded (rollouts, tokens) tensors; ours go through micro-batches. The peers add an epsilon to the std,
which moves advantages by at most epsilon / std of themselves; losses are the same up to the order of float64 sums.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trace_fast.kernels.policy_loss import PolicyLossConfig
from trace_fast.trainer.algorithms import GigpoConfig, GrpoConfig, GspoConfig, TraceConfig, prepare
from trace_fast.trainer.batch import TrainingBatch
from trace_fast.trainer.microbatches import microbatches

RandomBatch = Callable[..., TrainingBatch]
Config = GrpoConfig | GspoConfig | GigpoConfig | TraceConfig


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def padded(values_N: Tensor, batch: TrainingBatch) -> Tensor:
    """``(R, longest)``, zeros behind each rollout."""
    spans = pairwise(batch.cu_tokens_R1.tolist())
    return torch.nn.utils.rnn.pad_sequence([values_N[a:b] for a, b in spans], batch_first=True)


def our_loss(batch: TrainingBatch, logprobs_N: Tensor, loss: PolicyLossConfig) -> tuple[float, Tensor]:
    """Loss and ``(N,)`` gradient, over micro-batches of at most 60 tokens."""
    logprobs_N = logprobs_N.clone().requires_grad_()
    total = 0.0
    cu = batch.cu_tokens_R1.tolist()
    for micro in microbatches(batch, 60):
        places_N = torch.cat([torch.arange(cu[r], cu[r + 1]) for r in micro.rollouts])
        result = micro.loss(logprobs_N[places_N[micro.rows_L + 1]], loss)
        result.loss.backward()
        total += float(result.loss.detach())
    assert logprobs_N.grad is not None
    return total, logprobs_N.grad


def trl_loss(
    batch: TrainingBatch, logprobs_N: Tensor, loss: PolicyLossConfig, loss_type: str, per_rollout: bool
) -> tuple[float, Tensor]:
    """The same from ``GRPOTrainer._compute_loss``; ``per_rollout`` gives it advantages of shape (B,)."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    logprobs_RT = padded(logprobs_N, batch).requires_grad_()
    mask_RT = padded(batch.loss_mask_N.long(), batch)
    assert batch.advantages_N is not None
    advantages_RT = padded(batch.advantages_N, batch)
    tis_RT = (padded(batch.old_logprobs_N, batch) - padded(batch.sampler_logprobs_N, batch)).exp()
    inputs: dict[str, Any] = {
        "prompt_ids": mask_RT[:, :0],
        "prompt_mask": mask_RT[:, :0],
        "completion_ids": padded(batch.input_ids_N, batch),
        "completion_mask": padded(torch.ones_like(batch.input_ids_N), batch),
        "tool_mask": mask_RT,
        "advantages": advantages_RT.sum(1) / mask_RT.sum(1) if per_rollout else advantages_RT,
        "old_per_token_logps": padded(batch.old_logprobs_N, batch),
        "importance_sampling_ratio": tis_RT.clamp(max=loss.tis_cap),
        "num_items_in_batch": mask_RT.sum(),
    }
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs_RT, torch.zeros_like(logprobs_RT), None),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=0.0,
        current_gradient_accumulation_steps=1,
        epsilon_high=loss.clip_high,
        epsilon_low=loss.clip_low,
        importance_sampling_level=loss.ratio,
        loss_type=loss_type,
        max_completion_length=loss.divisor,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
    )
    result = GRPOTrainer._compute_loss(trainer, None, inputs)
    result.backward()
    assert logprobs_RT.grad is not None
    rows = zip(logprobs_RT.grad, batch.cu_tokens_R1.diff().tolist(), strict=True)
    return float(result.detach()), torch.cat([row[:length] for row, length in rows])


def near_old(batch: TrainingBatch, spread: float, seed: int) -> Tensor:
    noise_N = torch.randn(batch.input_ids_N.numel(), generator=torch.Generator().manual_seed(seed)).double()
    return (batch.old_logprobs_N + spread * noise_N).clamp(max=0)


@needs("trl", "datasets", "accelerate")
@pytest.mark.parametrize(
    ("config", "loss_type", "per_rollout"),
    [
        (GrpoConfig(), "grpo", True),
        (GrpoConfig(variant="dapo", drop_zero_std_groups=False), "dapo", True),
        (GrpoConfig.model_validate({"variant": "dr_grpo", "loss": {"divisor": 37}}), "dr_grpo", True),
        (GspoConfig(), "grpo", True),
        (GigpoConfig(), "grpo", False),
        (TraceConfig(), "grpo", False),
    ],
    ids=["grpo", "dapo", "dr_grpo", "gspo", "gigpo", "trace"],
)
def test_losses_and_gradients_equal_trl(
    random_batch: RandomBatch, config: Config, loss_type: str, per_rollout: bool
) -> None:
    for seed in range(4):
        batch = prepare(random_batch(seed), config)
        assert (batch.trained_tokens_R > 0).all()  # TRL counts rollouts without trained tokens, this project does not
        logprobs_N = near_old(batch, 0.3 if config.loss.ratio == "token" else 1e-3, seed)
        ours, our_gradient = our_loss(batch, logprobs_N, config.loss)
        theirs, their_gradient = trl_loss(batch, logprobs_N, config.loss, loss_type, per_rollout)
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-14)
        # Under one ratio a sequence, TRL's importance weights reach the gradient by their mean, here each token's own
        # by GSPO's token form; where they are equal the gradients are too (next test).
        if config.loss.ratio == "token":
            torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-12, atol=1e-15)
        assert our_gradient.abs().max() > 1e-4


@needs("trl", "datasets", "accelerate")
def test_gspo_gradients_equal_trl_on_policy_sampling(random_batch: RandomBatch) -> None:
    config = GspoConfig()
    for seed in range(4):
        batch = random_batch(seed)
        batch = prepare(batch.with_old_logprobs(batch.sampler_logprobs_N), config)  # every importance weight is 1
        logprobs_N = near_old(batch, 1e-3, seed)
        ours, our_gradient = our_loss(batch, logprobs_N, config.loss)
        theirs, their_gradient = trl_loss(batch, logprobs_N, config.loss, "grpo", True)
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-14)
        torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-12, atol=1e-15)
        assert our_gradient.abs().max() > 1e-4


@needs("verl", "tensordict", "ray", "omegaconf")
@pytest.mark.parametrize("std", ["sample", "none"])
def test_advantages_equal_verl(random_batch: RandomBatch, std: Any) -> None:
    """verl gives a group of one its reward; here it has nothing to compare with and gets 0."""
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    for seed in range(4):
        batch = random_batch(seed, (4, 3, 5))
        mask_RT = padded(batch.loss_mask_N, batch)
        rewards_RT = torch.zeros(mask_RT.shape, dtype=torch.float64)
        rewards_RT[:, -1] = batch.rewards_R
        theirs_RT, _ = compute_grpo_outcome_advantage(
            rewards_RT,
            mask_RT,
            np.array(batch.group_ids_R.tolist()),
            epsilon=1e-6,
            norm_adv_by_std_in_grpo=std == "sample",
        )
        ours = prepare(batch, GrpoConfig(std=std)).advantages_N
        # The smallest std of unequal rewards of 0, 0.1 and 1.1 is 0.04: epsilon is below 3e-5 of it. Their statistics
        # are in float32.
        torch.testing.assert_close(padded(ours, batch), theirs_RT, rtol=3e-5, atol=1e-6)


@needs("verl", "tensordict", "ray", "omegaconf")
@pytest.mark.parametrize(
    ("config", "function", "aggregation"),
    [
        (GrpoConfig.model_validate({"loss": {"tis_cap": None}}), "vanilla", "seq-mean-token-mean"),
        (GrpoConfig.model_validate({"variant": "dapo", "loss": {"tis_cap": None}}), "vanilla", "token-mean"),
        (GspoConfig.model_validate({"loss": {"tis_cap": None}}), "gspo", "seq-mean-token-mean"),
    ],
    ids=["grpo", "dapo", "gspo"],
)
def test_losses_and_gradients_equal_verl(
    random_batch: RandomBatch, config: Config, function: str, aggregation: str
) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig

    settings = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=config.loss.clip_low,
        clip_ratio_low=config.loss.clip_low,
        clip_ratio_high=config.loss.clip_high,
        clip_ratio_c=1e6,  # their third bound, for negative advantages, has no counterpart here
    )
    for seed in range(4):
        batch = prepare(random_batch(seed), config)
        logprobs_N = near_old(batch, 0.3 if config.loss.ratio == "token" else 1e-3, seed)
        ours, our_gradient = our_loss(batch, logprobs_N, config.loss)
        logprobs_RT = padded(logprobs_N, batch).requires_grad_()
        theirs, *_ = get_policy_loss_fn(function)(
            old_log_prob=padded(batch.old_logprobs_N, batch),
            log_prob=logprobs_RT,
            advantages=padded(batch.advantages_N, batch),
            response_mask=padded(batch.loss_mask_N, batch).double(),
            loss_agg_mode=aggregation,
            config=settings,
        )
        theirs.backward()
        rows = zip(logprobs_RT.grad, batch.cu_tokens_R1.diff().tolist(), strict=True)
        their_gradient = torch.cat([row[:length] for row, length in rows])
        assert ours == pytest.approx(float(theirs.detach()), rel=1e-6, abs=1e-9)  # their means add 1e-8
        torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-6, atol=1e-12)
        assert our_gradient.abs().max() > 1e-4
