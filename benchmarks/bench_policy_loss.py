"""policy_loss with its gradient against the eager form (the op's reference, autograd): 64 rollouts of 8,000 tokens.

    python -m pytest -s benchmarks/bench_policy_loss.py

Numbers first: loss and gradient against the reference in float64, within the rounding of the dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trace_fast.kernels.policy_loss import PolicyLossConfig, policy_loss, why_not

ROLLOUTS, TOKENS = 64, 8_000
CONFIGS = {
    "paper": PolicyLossConfig(),
    "dapo": PolicyLossConfig.dapo(tis_cap=2.0),
    "gspo": PolicyLossConfig(ratio="sequence", clip_low=3e-4, clip_high=4e-4),
}


def problem(dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Log-probabilities that drifted a little from the old and the sampler's; half of the tokens are trained."""
    generator = torch.Generator().manual_seed(0)
    n = ROLLOUTS * TOKENS
    old = -torch.rand(n, generator=generator) * 4
    tensors = {
        "logprobs_N": old + 0.2 * torch.randn(n, generator=generator),
        "old_logprobs_N": old,
        "sampler_logprobs_N": old + 0.05 * torch.randn(n, generator=generator),
        "advantages_N": torch.randn(n, generator=generator),
    }
    tensors = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    tensors["mask_N"] = (torch.rand(n, generator=generator) < 0.5).to(device)
    tensors["cu_tokens_R1"] = torch.arange(0, n + 1, TOKENS, dtype=torch.int32, device=device)
    return tensors


def loss_and_gradient(
    tensors: dict[str, torch.Tensor], config: PolicyLossConfig, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of a trainer: loss, metrics and the gradient of the log-probabilities."""
    logprobs = tensors["logprobs_N"].detach().requires_grad_()
    loss = policy_loss(**{**tensors, "logprobs_N": logprobs}, config=config, backend=name).loss
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", ["native", "triton"])
def test_policy_loss(
    race: Callable[..., dict[str, float]], device: torch.device, name: str, config: PolicyLossConfig, dtype: torch.dtype
) -> None:
    reason = why_not(name, device=device, dtype=dtype)
    if reason is not None:
        pytest.skip(reason)
    tensors = problem(dtype, device)
    doubles = {key: t.double() if t.dtype == dtype else t for key, t in tensors.items()}
    loss, gradient = loss_and_gradient(tensors, config, name)
    true_loss, true_gradient = loss_and_gradient(doubles, config, "reference")
    eager_loss, eager_gradient = loss_and_gradient(tensors, config, "reference")
    eps = torch.finfo(dtype).eps
    slack = 16 * eps * float(true_gradient.abs().max())  # an exponential of a difference, and two products
    # at the clip's edge the gradient jumps: a token whose ratio rounds to the other side counts in neither form
    off = ((gradient.double() - true_gradient).abs() > slack).double().mean()
    eager_off = ((eager_gradient.double() - true_gradient).abs() > slack).double().mean()
    assert off <= eager_off + 1e-4, f"{off:.1e} of the gradients are off, eager {eager_off:.1e}"
    eager_error = (eager_loss.double() - true_loss).abs()
    assert (loss.double() - true_loss).abs() <= eager_error + 64 * eps * true_loss.abs() + eps

    def ours() -> object:
        return loss_and_gradient(tensors, config, name)

    others = {"eager": lambda: loss_and_gradient(tensors, config, "reference")}
    label = next(key for key, value in CONFIGS.items() if value == config)
    race("policy_loss", f"{label}, {ROLLOUTS * TOKENS} tokens, {dtype}", (name, ours), others, rounds=7)
