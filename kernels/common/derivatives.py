"""Derivatives that the compiled implementations do not have are refused: forward mode, and second order.

torch drops the tangent of an operator that has only a backward formula, and a gradient that was computed by such an
operator counts as a constant wherever autograd does not see through it. Both are wrong numbers without a word, so the
compiled implementations ask here before they run and before they hand a gradient back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from trace_fast.errors import ConfigError


def refuse_tangents(op: str, backend: str, **tensors: Tensor | None) -> None:
    """Raises ``ConfigError`` for a tensor that carries a forward-mode tangent (``torch.func.jvp``, dual numbers)."""
    for name, tensor in tensors.items():
        if tensor is not None and unpack_dual(tensor).tangent is not None:
            raise ConfigError(
                f"{op}: {name}: expected a tensor without a forward-mode tangent, for backend {backend!r} has no "
                "forward-mode derivative, got one with a tangent; backend 'reference' is made of torch operations"
            )


def first_order_only(
    op: str, backend: str, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients, which raise ``ConfigError`` when they are differentiated.

    Args:
        inputs: what the gradients depend on; those that ask for no gradient, and ``None``, are passed over.
        gradients: results of a backward formula; ``None`` stays ``None``. Where no second derivative can follow
            (``create_graph`` is off), they are handed back as they are.
    """
    anchors = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    if not torch.is_grad_enabled() or not anchors:
        return tuple(gradients)
    found = [gradient.detach() for gradient in gradients if gradient is not None]
    marked = iter(_FirstOrderOnly.apply((op, backend), len(found), *found, *anchors))
    return tuple(None if gradient is None else next(marked) for gradient in gradients)


class _FirstOrderOnly(torch.autograd.Function):
    """Identity on the first ``count`` tensors; depends on all of them."""

    @staticmethod
    def forward(ctx: Any, names: tuple[str, str], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.names = names
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        op, backend = ctx.names
        raise ConfigError(
            f"{op}: expected first derivatives only, for backend {backend!r} has no second ones, got a gradient of its "
            "gradient; backend 'reference' is made of torch operations"
        )


__all__ = ["first_order_only", "refuse_tangents"]
