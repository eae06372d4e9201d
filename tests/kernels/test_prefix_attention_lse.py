"""The log-sum-exp that prefix_attention returns on request: the same numbers from every implementation.

The truth is written down from the definition, in float64. Triton's kernels run in its interpreter, which has to be
chosen before Triton is imported: a process of its own runs this file's cases of ``triton``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from span_trees import tree, visible_pairs

from trace_fast.errors import ConfigError
from trace_fast.kernels.prefix_attention import IMPLEMENTATIONS, plan_attention, prefix_attention, why_not
from trace_fast.layout import SpanRanges

pytestmark = pytest.mark.usefixtures("poisoned_memory")
CPU = torch.device("cpu")
ENGINES = [
    (name, dtype)
    for name in IMPLEMENTATIONS
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if why_not(name, device=CPU, dtype=dtype, head_dim=32) is None
]
engines = pytest.mark.parametrize(("engine", "dtype"), ENGINES, ids=lambda x: str(x).removeprefix("torch."))
FLOAT32 = [name for name, dtype in ENGINES if dtype == torch.float32]
float32_engines = pytest.mark.parametrize("engine", FLOAT32)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "everything": {"window": 25, "softcap": 3.0, "sinks": True},
}
features_of = pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
SCALE, HEADS, KEY_HEADS, DIM = 0.3, 4, 2, 32
# Units of float32 that a log-sum-exp may be off: 32 products and additions of a score, the maximum of which is below
# 32 here, the sum, and the kernels' own power of 2 and logarithm (relative error up to 2.9e-6, which is 24 units).
SLACK = (32 + 24) * torch.finfo(torch.float32).eps


def inputs(rows: int, dtype: torch.dtype, sinks: bool) -> list[torch.Tensor]:
    made = [torch.randn(rows, h, DIM, dtype=torch.float64).to(dtype) for h in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [*made, torch.linspace(-2, 3, HEADS, dtype=torch.float64).to(dtype)] if sinks else made


def call(engine: str, tensors: list[torch.Tensor], spans: SpanRanges, **features: Any) -> Any:
    sinks_H = tensors[3] if features.pop("sinks", False) else None
    plan = plan_attention(spans, engine)
    return prefix_attention(*tensors[:3], plan, scale=SCALE, sinks_H=sinks_H, **features)


def exact(
    tensors: list[torch.Tensor],
    spans: SpanRanges,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> torch.Tensor:
    """``(N, H)`` from the definition; -inf for rows that see nothing."""
    query, key = (t.double()[: spans.n_rows] for t in tensors[:2])
    scores_HNM = torch.einsum("nhd,mhd->hnm", query, key.repeat_interleave(HEADS // KEY_HEADS, 1)) * SCALE
    if softcap is not None:
        scores_HNM = softcap * torch.tanh(scores_HNM / softcap)
    seen = torch.as_tensor(visible_pairs(spans, window)).bool()
    scores_HNM = scores_HNM.masked_fill(~seen, float("-inf"))
    if sinks:
        sink = tensors[3].double()[:, None, None].expand(-1, spans.n_rows, 1)
        scores_HNM = torch.cat([scores_HNM, sink.masked_fill(~seen.any(1)[:, None], float("-inf"))], -1)
    return torch.logsumexp(scores_HNM, -1).T


@features_of
@engines
def test_every_implementation_gives_the_definitions_numbers(
    engine: str, dtype: torch.dtype, features: dict[str, Any]
) -> None:
    for seed in (1, 2):
        spans = tree(seed)
        tensors = inputs(spans.n_rows + 3, dtype, features.get("sinks", False))
        out, lse = call(engine, tensors, spans, **features, return_lse=True)
        truth = exact(tensors, spans, **features)
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert lse.shape == (spans.n_rows + 3, HEADS)
        covered = torch.as_tensor(visible_pairs(spans, None)).any(1)
        assert 0 < covered.sum() < spans.n_rows, "some rows are in no span"
        error = (lse[: spans.n_rows].double() - truth)[covered].abs().max()
        assert error <= (1e-13 if dtype == torch.float64 else SLACK), float(error)
        alone = torch.cat([lse[: spans.n_rows][~covered], lse[spans.n_rows :]])
        assert (alone == float("-inf")).all(), "rows of no span and padding have none, whatever the sink"
        assert torch.equal(out, call(engine, tensors, spans, **features)), "asking for it changes nothing else"


@float32_engines
def test_parts_of_a_path_merge_into_the_whole(engine: str) -> None:
    """What it is for: attention over the first keys and over the rest, weighted by exp(lse), is attention over all."""
    both = SpanRanges.single(40)
    query, key, value = inputs(40, torch.float32, sinks=False)
    last = slice(39, 40)
    whole, whole_lse = call(engine, [query, key, value], both, return_lse=True)
    parts = []
    for keys in (slice(0, 25), slice(25, 40)):
        rows = keys.stop - keys.start
        spread = [query[last].expand(rows, -1, -1), key[keys], value[keys]]
        out, lse = call(engine, spread, SpanRanges.single(rows), return_lse=True)
        parts.append((out[-1], lse[-1]))
    total = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * (lse - total).exp()[:, None] for out, lse in parts)
    torch.testing.assert_close(total, whole_lse[-1], rtol=0, atol=2 * SLACK)
    torch.testing.assert_close(merged, whole[-1], rtol=0, atol=4 * SLACK * float(value.abs().max()))


@features_of
@pytest.mark.parametrize("engine", [name for name in FLOAT32 if name != "torch"])
def test_a_gradient_flows_through_it(engine: str, features: dict[str, Any]) -> None:
    spans, weight = tree(3), torch.randn(tree(3).n_rows, HEADS)
    covered = torch.as_tensor(visible_pairs(spans, None)).any(1)
    tensors = inputs(spans.n_rows, torch.float32, features.get("sinks", False))

    def gradients(leaves: list[torch.Tensor], lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = [leaves[0], leaves[1], *leaves[3:]]
        return torch.autograd.grad((lse * weight.to(lse.dtype))[covered].sum(), kept)

    leaves = [t.clone().requires_grad_() for t in tensors]
    found = gradients(leaves, call(engine, leaves, spans, **features, return_lse=True)[1])
    exact_leaves = [t.double().requires_grad_() for t in tensors]
    truth = gradients(exact_leaves, exact(exact_leaves, spans, **features))
    for ours, wanted in zip(found, truth, strict=True):
        # a gradient adds up to as many terms as there are rows, each off by the score's error and a few roundings
        slack = spans.n_rows * SLACK * float(wanted.abs().max())
        assert (ours.double() - wanted).abs().max() <= slack


def test_torchs_tiles_have_no_gradient_and_say_so() -> None:
    tensors = [t.requires_grad_() for t in inputs(5, torch.float32, sinks=False)]
    with pytest.raises(ConfigError, match="backend 'torch' has no gradient; use native, triton or reference"):
        call("torch", tensors, SpanRanges.single(5), return_lse=True)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)")
def test_the_same_in_the_interpreter() -> None:
    options = [option for plugin in ("cacheprovider", "xdist", "benchmark") for option in ("-p", f"no:{plugin}")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *options, "-k", "triton", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]
