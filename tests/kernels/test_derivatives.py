"""Derivatives that compiled implementations do not have: refused by name, never zeros and never a part of the terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from trace_fast import native
from trace_fast.config import CreditConfig
from trace_fast.errors import ConfigError
from trace_fast.kernels.policy_loss import PolicyLossConfig, policy_loss
from trace_fast.kernels.prefix_attention import plan_attention, prefix_attention
from trace_fast.kernels.token_logprob import segment_mean_logprob, token_logprob, token_logprob_parts
from trace_fast.kernels.turn_credit import turn_credit_flat
from trace_fast.layout import SpanRanges

needs_native = pytest.mark.skipif(not native.status().available, reason=f"native module: {native.status().reason}")

Function = Callable[[Tensor], Tensor]


def _attention(backend: str) -> tuple[Function, Tensor]:
    query, key, value = (torch.randn(9, heads, 8) for heads in (4, 2, 2))
    plan = plan_attention(SpanRanges.single(9), backend)
    return lambda x: prefix_attention(x, key, value, plan, scale=0.3), query


def _loss(backend: str) -> tuple[Function, Tensor]:
    logprobs, old, advantages = -torch.rand(5), -torch.rand(5), torch.randn(5)
    others = (torch.ones(5, dtype=torch.bool), torch.tensor([0, 2, 5]), PolicyLossConfig(tis_cap=None))
    return lambda x: policy_loss(x, old, advantages, *others, backend=backend).loss, logprobs


def _logprob(backend: str) -> tuple[Function, Tensor]:
    hidden, weight = torch.randn(3, 4), torch.randn(6, 4)
    return lambda x: token_logprob(x, weight, torch.tensor([0, 1, 5]), backend=backend), hidden


def _means(backend: str) -> tuple[Function, Tensor]:
    hidden, weight, cu = torch.randn(3, 4), torch.randn(6, 4), torch.tensor([0, 2, 3])
    return lambda x: segment_mean_logprob(x, weight, torch.tensor([0, 1, 5]), cu, backend=backend)[0], hidden


def _parts(backend: str) -> tuple[Function, Tensor]:
    hidden, weight = torch.randn(3, 4), torch.randn(6, 4)
    return lambda x: token_logprob_parts(x, weight, torch.tensor([0, 1, 5]), 0, backend=backend).sum_M, hidden


COMPILED = [
    pytest.param(_attention, "native", marks=needs_native),
    pytest.param(_loss, "native", marks=needs_native),
    (_logprob, "torch"),
    (_means, "torch"),
    (_parts, "torch"),
]
EAGER = [(_attention, "reference"), (_loss, "reference"), (_logprob, "reference"), (_means, "reference")]


def dual_tangent(function: Function, x: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def transformed_tangent(function: Function, x: Tensor) -> Tensor | None:
    return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]


@pytest.mark.parametrize("tangent", [dual_tangent, transformed_tangent])
@pytest.mark.parametrize(("make", "backend"), COMPILED)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_is_refused(make: Any, backend: str, tangent: Any, requires_grad: bool) -> None:
    function, x = make(backend)
    message = rf"expected a tensor without a forward-mode tangent, for backend '{backend}' .*, got one with a tangent"
    with pytest.raises(ConfigError, match=message):
        tangent(function, x.requires_grad_(requires_grad))


@pytest.mark.parametrize(("make", "backend"), EAGER)
def test_forward_mode_of_the_reference(make: Any, backend: str) -> None:
    """What the message sends a user to does it: the tangent is that of a difference in float64."""
    function, x = make(backend)
    step = 1e-3
    tangent = dual_tangent(function, x)
    assert tangent is not None
    difference = (function(x + step) - function(x - step)).double() / (2 * step)
    torch.testing.assert_close(tangent.double(), difference, rtol=1e-2, atol=1e-3)


@needs_native
def test_turn_credit_has_no_tangent() -> None:
    states = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([1, 1])

    def of_scores(x: Tensor) -> Tensor:
        return turn_credit_flat(x, *states, torch.ones(2), CreditConfig(), backend="native").rewards_T

    def of_outcomes(x: Tensor) -> Tensor:
        return turn_credit_flat(torch.full((5,), -1.0), *states, x, CreditConfig(), backend="native").rewards_T

    for function, x, name in ((of_scores, -torch.rand(5), "mean_logprobs_S"), (of_outcomes, torch.ones(2), "outcome")):
        for tangent in (dual_tangent, transformed_tangent):
            with pytest.raises(ConfigError, match=f"turn_credit: {name}.*: expected a tensor without a forward-mode"):
                tangent(function, x)


@pytest.mark.parametrize(("make", "backend"), COMPILED)
@pytest.mark.parametrize("upstream", ["constant", "of the result"])
def test_second_derivatives_are_refused(make: Any, backend: str, upstream: str) -> None:
    """Also where another term has one, so that autograd would find something to differentiate."""
    function, x = make(backend)
    x.requires_grad_()
    out = function(x)
    loss = out.sum() if upstream == "constant" else out.square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(ConfigError, match=f"expected first derivatives only, for backend '{backend}'"):
        torch.autograd.grad(gradient.square().sum() + x.square().sum(), x)


@pytest.mark.parametrize(("make", "backend"), COMPILED)
def test_a_gradient_that_may_be_differentiated_has_the_same_bits(make: Any, backend: str) -> None:
    function, x = make(backend)
    x.requires_grad_()
    (plain,) = torch.autograd.grad(function(x).sum(), x)
    (kept,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    assert kept.requires_grad
    assert torch.equal(plain, kept)


def test_second_derivatives_of_the_reference() -> None:
    assert torch.autograd.gradgradcheck(
        lambda y: policy_loss(
            y,
            torch.full((5,), -0.5, dtype=torch.float64),
            torch.linspace(-1, 1, 5, dtype=torch.float64),
            torch.ones(5, dtype=torch.bool),
            torch.tensor([0, 2, 5]),
            PolicyLossConfig(tis_cap=None),
        ).loss,
        (torch.linspace(-0.6, -0.45, 5, dtype=torch.float64).requires_grad_(),),
    )
