"""Derivatives that compiled implementations do not have: refused by name, never zeros and never a part of the terms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from derivative_refusals import (
    Function,
    dual_tangent,
    expect_first_order_only,
    expect_no_forward_mode,
    transformed_tangent,
)
from torch import Tensor

from trace_fast import native
from trace_fast.config import CreditConfig
from trace_fast.errors import ConfigError
from trace_fast.kernels.policy_loss import PolicyLossConfig, policy_loss
from trace_fast.kernels.prefix_attention import plan_attention, prefix_attention
from trace_fast.kernels.token_logprob import segment_mean_logprob, token_logprob, token_logprob_parts
from trace_fast.kernels.turn_credit import turn_credit_flat
from trace_fast.layout import SpanRanges

needs_native = pytest.mark.skipif(not native.status().available, reason=f"native module: {native.status().reason}")


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


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("make", "backend"), COMPILED)
def test_forward_mode_is_refused(make: Any, backend: str, requires_grad: bool) -> None:
    function, x = make(backend)
    expect_no_forward_mode(function, x.requires_grad_(requires_grad), backend)


@pytest.mark.parametrize(("make", "backend"), COMPILED)
def test_second_derivatives_are_refused(make: Any, backend: str) -> None:
    expect_first_order_only(*make(backend), backend)


@pytest.mark.parametrize(("make", "backend"), EAGER)
def test_forward_mode_of_the_reference(make: Any, backend: str) -> None:
    """What the message sends a user to does it: the tangent is that of a difference."""
    function, x = make(backend)
    step = 1e-3
    tangent = dual_tangent(function, x)
    assert tangent is not None
    # float32 results up to 10, an error of their last digit on each side; the difference's own is step^2 relative
    noise = 10 * torch.finfo(torch.float32).eps / step
    difference = (function(x + step).double() - function(x - step).double()) / (2 * step)
    torch.testing.assert_close(tangent.double(), difference, rtol=1e-4, atol=noise)


def test_second_derivatives_of_the_reference() -> None:
    double = {"dtype": torch.float64}
    others = (torch.ones(5, dtype=torch.bool), torch.tensor([0, 2, 5]), PolicyLossConfig(tis_cap=None))
    old, advantages = torch.full((5,), -0.5, **double), torch.linspace(-1, 1, 5, **double)
    logprobs = torch.linspace(-0.6, -0.45, 5, **double).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: policy_loss(x, old, advantages, *others).loss, (logprobs,))


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
