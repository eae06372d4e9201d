"""What prefix_attention refuses, whatever implementation runs it: spans that are no trie, tensors, settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trace_fast.errors import ConfigError, TraceFastError
from trace_fast.kernels.prefix_attention import plan_attention, prefix_attention
from trace_fast.layout import SpanRanges


def inputs(rows: int) -> list[torch.Tensor]:
    return [torch.randn(rows, heads, 32) for heads in (4, 2, 2)]


def run(backend: str, tensors: list[torch.Tensor], spans: SpanRanges, **settings: Any) -> torch.Tensor:
    return prefix_attention(*tensors, plan_attention(spans, backend), scale=0.3, **settings)


def changed_spans(**changes: Any) -> SpanRanges:
    """A prompt 0..4, under it A 4..8 and B 8..10, under A after one row C 10..12."""
    good: dict[str, Any] = {
        "n_rows": 12,
        "starts": np.array([0, 4, 8, 10]),
        "ends": np.array([4, 8, 10, 12]),
        "depths": np.array([0, 4, 4, 5]),
        "ranges": np.array([[0, 4], [0, 4], [0, 5]]),
        "cu_ranges": np.array([0, 0, 1, 2, 3]),
    }
    return SpanRanges(**good | changes)


def test_a_trie_is_accepted() -> None:
    changed_spans().check()
    changed_spans(ranges=np.array([[0, 4], [0, 4], [0, 3], [3, 5]]), cu_ranges=np.array([0, 0, 1, 2, 4])).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ends": np.array([4, 8, 10, 13])}, r"span 3: expected rows within 0\.\.12, got 10\.\.13"),
        ({"starts": np.array([-1, 4, 8, 10])}, r"span 0: expected rows within 0\.\.12, got -1\.\.4"),
        ({"starts": np.array([0, 3, 8, 10])}, r"span 1: expected rows of no other span, got 3\.\.8, .* span 0"),
        ({"ranges": np.array([[0, 4], [0, 4], [-1, 4]])}, r"span 3: expected key ranges within 0\.\.12, got -1\.\.4"),
        ({"ranges": np.array([[0, 4], [0, 4], [8, 13]])}, r"span 3: expected key ranges within 0\.\.12, got 8\.\.13"),
        ({"ranges": np.array([[0, 4], [0, 4], [0, 4]])}, "span 3: expected key ranges that cover its depth 5, got 4"),
        ({"ranges": np.array([[0, 4], [0, 4], [4, 9]])}, r"span 3: expected the path of span 2 that it hangs under"),
        ({"depths": np.array([0, 4, 4, 6])}, "span 3: expected key ranges that cover its depth 6, got 5 keys"),
    ],
)
def test_spans_that_are_no_trie_are_named(changes: dict[str, Any], message: str) -> None:
    for backend in ("reference", "torch"):
        with pytest.raises(TraceFastError, match=message):
            plan_attention(changed_spans(**changes), backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: [t[0][:, :3], t[1], t[2]], "query heads: expected a multiple of the 2 key heads, got 3"),
        (lambda t: [t[0], t[1][:5], t[2]], "key: expected 20 rows as the query, got 5"),
        (lambda t: [t[0], t[1].double(), t[2]], "key: expected the query's dtype torch.float32, got torch.float64"),
        (lambda t: [t[0], t[1][..., :8], t[2]], "key: expected head_dim 32 as the query, got 8"),
        (lambda t: [t[0], t[1], t[2][:, :1]], "value: expected 2 heads as the key, got 1"),
        (
            lambda t: [t[0][None], t[1], t[2]],
            r"query: expected a \(rows, heads, head_dim\) tensor, got shape \(1, 20, 4, 32\)",
        ),
        (lambda t: [t[0].long(), t[1], t[2]], "query: expected a floating-point dtype, got torch.int64"),
        (lambda t: [x[:9] for x in t], "query: expected at least the 20 rows of the spans, got 9"),
        (lambda t: [t[0], t[1].to("meta"), t[2]], "key: expected the query's device cpu, got meta"),
        (lambda t: [t[0], t[1], t[2].to("meta")], "value: expected the query's device cpu, got meta"),
        (lambda t: [t[0].tolist(), t[1], t[2]], r"query: expected a torch\.Tensor, got list"),
        (lambda t: [t[0], t[1].numpy(), t[2]], r"key: expected a torch\.Tensor, got ndarray"),
        (lambda t: [t[0], t[1], None], r"value: expected a torch\.Tensor, got NoneType"),
    ],
)
def test_wrong_tensors_are_named(change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run("torch", change(inputs(20)), SpanRanges.single(20))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_wrong_numbers_are_named(backend: str) -> None:
    spans, tensors = SpanRanges.single(4), inputs(4)
    plan = plan_attention(spans, backend)
    with pytest.raises(ConfigError, match="query heads: expected a multiple of the 2 key heads, got 0"):
        prefix_attention(tensors[0][:, :0], *tensors[1:], plan, scale=1.0)
    with pytest.raises(ConfigError, match="query: expected a head_dim of at least 1, got 0"):
        prefix_attention(*[t[..., :0] for t in tensors], plan, scale=1.0)
    for scale in (float("nan"), float("inf"), None):
        with pytest.raises(ConfigError, match="scale: expected a finite number, got"):
            prefix_attention(*tensors, plan, scale=scale)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"window: expected None or at least 1, got 1\.5"):
        prefix_attention(*tensors, plan, scale=1.0, window=1.5)  # type: ignore[arg-type]
    for softcap in (float("inf"), float("nan"), 1e-40):  # the last is 0 in float32
        with pytest.raises(ConfigError, match=r"softcap: expected None or a number from 1e-12 to 1e\+12, got"):
            prefix_attention(*tensors, plan, scale=1.0, softcap=softcap)
    with pytest.raises(ConfigError, match="sinks: expected the query's device cpu, got meta"):
        prefix_attention(*tensors, plan, scale=1.0, sinks_H=torch.zeros(4, device="meta"))
    with pytest.raises(ConfigError, match=r"sinks: expected a torch\.Tensor, got list"):
        prefix_attention(*tensors, plan, scale=1.0, sinks_H=[0.0] * 4)  # type: ignore[arg-type]


def test_an_implementation_without_gradient_says_so() -> None:
    tensors = [t.requires_grad_() for t in inputs(4)]
    with pytest.raises(ConfigError, match="backend 'torch' has no gradient; use native, triton or reference"):
        run("torch", tensors, SpanRanges.single(4))
    with torch.no_grad():
        assert run("torch", tensors, SpanRanges.single(4)).shape == (4, 4, 32)


def test_wrong_settings_are_named() -> None:
    spans, tensors = SpanRanges.single(4), inputs(4)
    with pytest.raises(ConfigError, match="window: expected None or at least 1, got 0"):
        run("torch", tensors, spans, window=0)
    with pytest.raises(ConfigError, match=r"softcap: expected None or a number from 1e-12 to 1e\+12, got -1"):
        run("torch", tensors, spans, softcap=-1.0)
    with pytest.raises(ConfigError, match=r"expected backend in .*'reference', 'torch'.*, got 'cuda'"):
        plan_attention(spans, "cuda")
    with pytest.raises(ConfigError, match=r"sinks: expected shape \(4,\), got shape \(3,\)"):
        prefix_attention(*tensors, plan_attention(spans, "torch"), scale=1.0, sinks_H=torch.zeros(3))
