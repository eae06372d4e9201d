"""What a compiled implementation must say to forward mode and to second derivatives, as one check for the op tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from trace_fast.errors import ConfigError

Function = Callable[[Tensor], Tensor]


def dual_tangent(function: Function, x: Tensor) -> Tensor | None:
    """By a dual number."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def transformed_tangent(function: Function, x: Tensor) -> Tensor | None:
    """By the function transform."""
    return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]


def expect_no_forward_mode(function: Function, x: Tensor, backend: str) -> None:
    message = rf"expected a tensor without a forward-mode tangent, for backend '{backend}' .*, got one with a tangent"
    for tangent in (dual_tangent, transformed_tangent):
        with pytest.raises(ConfigError, match=message):
            tangent(function, x)


def expect_first_order_only(function: Function, x: Tensor, backend: str) -> None:
    """Whether the upstream gradient is constant or not, and also where another term has a second derivative."""
    x = x.detach().requires_grad_()
    (plain,) = torch.autograd.grad(function(x).sum(), x)
    for square in (False, True):
        out = function(x)
        (gradient,) = torch.autograd.grad((out.square() if square else out).sum(), x, create_graph=True)
        if not square:
            assert torch.equal(gradient, plain)
        with pytest.raises(ConfigError, match=f"expected first derivatives only, for backend '{backend}'"):
            torch.autograd.grad(gradient.square().sum() + x.square().sum(), x)
