"""Adam: equal to torch's own bit for bit, on the host or not; warm-up, clipping, state of every parameter."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import nn

from trace_fast.trainer.optimizer import Adam, AdamConfig


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (7, 5), "norm": (5,), "other": (3, 4), "scalar": ()}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def give_gradients(params: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in params.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def after(config: AdamConfig, steps: int) -> dict[str, nn.Parameter]:
    params = parameters()
    optimizer = Adam(params, config)
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step(optimizer.grad_norm())
    return params


@pytest.mark.parametrize("bucket", [1 << 24, 20, 1])
def test_on_the_host_it_is_the_same_bit_for_bit(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trace_fast.trainer.optimizer.BUCKET_ELEMENTS", bucket)
    settings = {"lr": 1e-2, "max_grad_norm": 1.5, "weight_decay": 0.1, "warmup_steps": 2}
    plain = after(AdamConfig(**settings), 5)
    offloaded = after(AdamConfig(**settings, offload=True), 5)
    for name, value in plain.items():
        assert torch.equal(offloaded[name], value), name


def test_it_is_torchs_own_adamw_with_decay_on_matrices_only() -> None:
    mine = after(AdamConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=None), 4)
    theirs = parameters()
    torch_adam = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in theirs.values() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.98),
        fused=True,
    )
    for step in range(4):
        give_gradients(theirs, step)
        torch_adam.step()
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name


def test_first_step_by_hand() -> None:
    """m = 0.1 g, v = 0.02 g^2; corrected g and g^2: a step of lr * sign(g), whatever clipping makes of g."""
    params = {"w": nn.Parameter(torch.tensor([[1.0, -2.0]]))}
    params["w"].grad = torch.tensor([[3.0, -4.0]])
    optimizer = Adam(params, AdamConfig(lr=0.5, weight_decay=0.1, max_grad_norm=1.0))
    assert optimizer.grad_norm() == 5.0
    optimizer.step(5.0)
    expected = torch.tensor([[1.0 * (1 - 0.05) - 0.5, -2.0 * (1 - 0.05) + 0.5]])
    assert torch.allclose(params["w"], expected, rtol=0, atol=1e-6)
    moments = optimizer.state()
    assert torch.allclose(moments["w.exp_avg"], torch.tensor([[0.06, -0.08]]))
    assert torch.allclose(moments["w.exp_avg_sq"], torch.tensor([[0.02 * 0.36, 0.02 * 0.64]]))
    assert params["w"].grad is None


def test_the_learning_rate_rises_over_the_warm_up() -> None:
    config = AdamConfig(lr=8.0, warmup_steps=3)
    assert [config.lr_at(step) for step in range(5)] == [2.0, 4.0, 6.0, 8.0, 8.0]


@pytest.mark.parametrize("offload", [False, True])
def test_a_parameter_without_gradient_has_state_and_only_decays_prime_rl_2800(offload: bool) -> None:
    """A checkpoint holds the same names whether or not every parameter has had a gradient."""
    params = parameters()
    optimizer = Adam(params, AdamConfig(lr=0.1, weight_decay=0.5, offload=offload))
    before = params["matrix"].detach().clone()
    params["norm"].grad = torch.ones(5)
    optimizer.step(1.0)
    assert sorted(optimizer.state()) == sorted(f"{n}.{k}" for n in params for k in ("exp_avg", "exp_avg_sq"))
    assert float(optimizer.state()["matrix.exp_avg"].abs().max()) == 0.0
    assert torch.allclose(params["matrix"], before * (1 - 0.1 * 0.5))


def test_state_shares_memory_and_restoring_continues_bit_for_bit() -> None:
    config = AdamConfig(lr=1e-2, offload=True)
    params, others = parameters(), parameters(seed=1)
    optimizer, other = Adam(params, config), Adam(others, config)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step(optimizer.grad_norm())
    for name, value in optimizer.state().items():
        other.state()[name].copy_(value)
    for name in params:
        others[name].data.copy_(params[name].data)
    other.restored(3)
    for step in (3, 4):
        for p, o in ((params, optimizer), (others, other)):
            give_gradients(p, step)
            o.step(o.grad_norm())
    for name, value in params.items():
        assert torch.equal(others[name], value), name


def test_on_the_host_its_state_is_its_own_memory_whatever_the_parameters_device() -> None:
    """A DTensor on the parameter's mesh would be a copy on the device: a checkpoint would be loaded into that copy."""
    run_ranks(1, "rank_jobs:state_on_the_host")
