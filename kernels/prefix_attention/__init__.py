"""prefix_attention: causal attention of packed rows over lists of ancestor key ranges.

``plan = plan_attention(spans, backend)`` once a pack, then, in every layer,
``prefix_attention(query_NHD, key_NKD, value_NKD, plan, ...) -> out_NHD``; with ``return_lse=True`` also ``lse_NH``.

Row n of span p attends to the key rows of ``spans.ancestors(p)`` and to its own span up to itself: exactly the
tokens before it in its own rollout. Rows in no span give zeros, and -inf in lse.

    scores = softcap(scale * q k^T), hidden keys removed;  p = softmax(scores, sink);  out = p v
    lse = log(sum exp(scores) + exp(sink)), in nats

Shapes: N rows, H query heads, K key/value heads (H a multiple of K; head h uses K/V head h // (H/K)), D head
dim (the value's may differ). ``window`` w lets depth d see depths d-w+1..d. ``softcap`` c applies c*tanh(s/c).
``sinks`` (H,) are extra logits with no value. Scores, softmax and sums are float32 (float64 for float64 input).
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol, overload

import torch

from trace_fast.errors import ConfigError
from trace_fast.kernels.common import checks
from trace_fast.layout import SpanRanges

__all__ = ["IMPLEMENTATIONS", "AttentionPlan", "plan_attention", "prefix_attention", "why_not"]

# name: module (imported when it is asked for: Triton may be absent) and its plan
IMPLEMENTATIONS = {
    "native": ("native_impl", "NativePlan"),
    "triton": ("triton_impl", "TritonPlan"),
    "torch": ("torch_impl", "TorchPlan"),
    "reference": ("reference", "ReferencePlan"),
}


class AttentionPlan(Protocol):
    """What an implementation worked out on the host for one pack; holds the pack's ``spans``."""

    spans: SpanRanges

    def run(
        self,
        query_NHD: torch.Tensor,
        key_NKD: torch.Tensor,
        value_NKD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_H: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output, and the log-sum-exp of each row's scores (nats), sink included; -inf in no span."""
        ...


def why_not(name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int | None = None) -> str | None:
    """Why implementation ``name`` cannot run such tensors here; ``None`` when it can. ``head_dim``: the largest."""
    if name == "triton" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    reason: Callable[..., str | None] = getattr(_module(name), "why_not", lambda *_: None)
    return reason(device, dtype, head_dim)


def plan_attention(spans: SpanRanges, backend: str) -> AttentionPlan:
    """Host-side work of one pack, done once for all its layers.

    Args:
        spans: host-side visibility (``trace_fast.layout``).
        backend: ``"native"`` (C++ on the CPU), ``"triton"`` (CUDA; differentiable), ``"torch"`` (tiles on torch's own
            kernels) or ``"reference"`` (eager, differentiable). With ``native`` and ``torch`` a row's result depends
            on its own tokens only, bit for bit.

    Raises:
        ConfigError: an unknown backend. TraceFastError: spans that are no trie (``SpanRanges.check``).
    """
    spans.check()
    plan: AttentionPlan = getattr(_module(backend), IMPLEMENTATIONS[backend][1])(spans)
    return plan


def _module(name: str) -> Any:
    if name not in IMPLEMENTATIONS:
        raise ConfigError(f"prefix_attention: expected backend in {sorted(IMPLEMENTATIONS)}, got {name!r}")
    return importlib.import_module(f"{__name__}.{IMPLEMENTATIONS[name][0]}")


@overload
def prefix_attention(
    query_NHD: torch.Tensor,
    key_NKD: torch.Tensor,
    value_NKD: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def prefix_attention(
    query_NHD: torch.Tensor,
    key_NKD: torch.Tensor,
    value_NKD: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def prefix_attention(
    query_NHD: torch.Tensor,
    key_NKD: torch.Tensor,
    value_NKD: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one layer over a pack.

    Args:
        query_NHD, key_NKD, value_NKD: float tensors of one dtype on one device, any strides; N >= the rows of the
            plan's spans (rows beyond are padding and give zeros).
        plan: from ``plan_attention``.
        scale: factor on q k^T. window, softcap, sinks_H: see the module; ``None`` is off.
        return_lse: also return lse, so that attention over further keys can be merged into the result.

    Returns:
        ``(N, H, Dv)`` in the query's dtype; with ``return_lse`` a pair of it and ``(N, H)`` float32 (float64 for
        float64 input). A gradient flows through both wherever the implementation has one.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    _check(query_NHD, key_NKD, value_NKD, plan.spans, scale, window, softcap, sinks_H)
    out, lse = plan.run(
        query_NHD, key_NKD, value_NKD, scale=scale, window=window, softcap=softcap, sinks_H=sinks_H
    )
    return (out, lse) if return_lse else out


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: SpanRanges,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    def expect(ok: bool, what: str, expected: str, got: object) -> None:
        checks.expect(ok, "prefix_attention", what, expected, got)

    named = {"query": query, "key": key, "value": value} | ({} if sinks is None else {"sinks": sinks})
    for name, tensor in named.items():
        expect(isinstance(tensor, torch.Tensor), name, "a torch.Tensor", type(tensor).__name__)
        expect(tensor.layout == torch.strided, name, "a dense tensor", tensor.layout)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        expect(tensor.ndim == 3, name, "a (rows, heads, head_dim) tensor", f"shape {tuple(tensor.shape)}")
        expect(tensor.is_floating_point(), name, "a floating-point dtype", tensor.dtype)
        expect(tensor.dtype == query.dtype, name, f"the query's dtype {query.dtype}", tensor.dtype)
        expect(tensor.device == query.device, name, f"the query's device {query.device}", tensor.device)
        expect(len(tensor) == len(query), name, f"{len(query)} rows as the query", len(tensor))
    expect(len(query) >= spans.n_rows, "query", f"at least the {spans.n_rows} rows of the spans", len(query))
    expect(key.shape[2] == query.shape[2], "key", f"head_dim {query.shape[2]} as the query", key.shape[2])
    expect(key.shape[1] == value.shape[1], "value", f"{key.shape[1]} heads as the key", value.shape[1])
    expect(
        key.shape[1] > 0 and query.shape[1] > 0 and query.shape[1] % key.shape[1] == 0,
        "query heads",
        f"a multiple of the {key.shape[1]} key heads",
        query.shape[1],
    )
    for name, size in (("query", query.shape[2]), ("value", value.shape[2])):
        expect(size > 0, name, "a head_dim of at least 1", size)
    expect(isinstance(scale, int | float) and math.isfinite(scale), "scale", "a finite number", scale)
    fits = window is None or (isinstance(window, int) and 1 <= window < 2**63)
    expect(fits, "window", "None or at least 1", window)
    checks.check_factor("prefix_attention", "softcap", softcap, optional=True)
    if sinks is not None:
        expect(sinks.is_floating_point(), "sinks", "a floating-point dtype", sinks.dtype)
        expect(sinks.device == query.device, "sinks", f"the query's device {query.device}", sinks.device)
        expect(sinks.shape == query.shape[1:2], "sinks", f"shape ({query.shape[1]},)", f"shape {tuple(sinks.shape)}")
