"""The Triton kernels of prefix_attention in Triton's interpreter, against the float64 oracle.

Run by ``test_triton.py`` in a process of its own with TRITON_INTERPRET=1. Blocks are 16 x 16 here, so that small packs
have full blocks, edge blocks, shared tiles and splits. Memory that torch allocates is filled with NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from derivative_refusals import expect_first_order_only, expect_no_forward_mode
from span_trees import agent_rollout, tree, visible_pairs

from trace_fast.errors import ConfigError
from trace_fast.kernels.prefix_attention import plan_attention, prefix_attention
from trace_fast.kernels.prefix_attention.reference import ReferencePlan
from trace_fast.kernels.prefix_attention.triton_config import Blocks, Tuning
from trace_fast.kernels.prefix_attention.triton_impl import INTERPRETED, TritonPlan, why_not
from trace_fast.layout import SpanRanges, rows_of

assert INTERPRETED, "this module needs TRITON_INTERPRET=1"

SMALL = Blocks(16, 16, 4, 1)
WHOLE = Tuning(SMALL, SMALL, SMALL, tma=False, fused_key_grad=True, programs=1)
SPLIT = replace(WHOLE, tma=True, fused_key_grad=False, programs=64)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window-1": {"window": 1},
    "window-7": {"window": 7},
    "window-60": {"window": 60},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "everything": {"window": 25, "softcap": 3.0, "sinks": True},
}


pytestmark = pytest.mark.usefixtures("poisoned_memory")


# --- values --------------------------------------------------------------------------------------------------------


def inputs(
    rows: int, heads: int = 4, kv_heads: int = 2, dim: int = 32, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    return [torch.randn(rows, h, dim, dtype=torch.float64).to(dtype) for h in (heads, kv_heads, kv_heads)]


def sinks_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.linspace(-2, 3, tensors[0].shape[1], dtype=tensors[0].dtype)


def settings(features: dict[str, Any]) -> dict[str, Any]:
    return {"scale": 0.3, "window": features.get("window"), "softcap": features.get("softcap")}


def eager(tensors: list[torch.Tensor], spans: SpanRanges, features: dict[str, Any]) -> torch.Tensor:
    sinks_H = tensors[3] if len(tensors) > 3 else None
    return ReferencePlan(spans).run(*tensors[:3], sinks_H=sinks_H, **settings(features))[0]


def ours(
    tensors: list[torch.Tensor], spans: SpanRanges, features: dict[str, Any], tuning: Tuning = WHOLE
) -> tuple[torch.Tensor, torch.Tensor]:
    sinks_H = tensors[3] if len(tensors) > 3 else None
    return TritonPlan(spans, tuning).run(*tensors[:3], sinks_H=sinks_H, **settings(features))


def with_sinks(tensors: list[torch.Tensor], features: dict[str, Any]) -> list[torch.Tensor]:
    return [*tensors, sinks_of(tensors)] if features.get("sinks") else tensors


def within(result: torch.Tensor, same_dtype: torch.Tensor, truth: torch.Tensor, term: float, terms: int) -> None:
    """Error no larger than eager's own in the dtype, but for the order of a float32 sum (a random walk of ``terms``
    roundings of at most ``term`` each) and the rounding of weights to the dtype before the second product (one unit
    of the dtype)."""
    order = terms**0.5 * torch.finfo(torch.float32).eps * term
    slack = order + torch.finfo(result.dtype).eps * float(truth.abs().max())
    error, allowed = (result.double() - truth).abs().max(), (same_dtype.double() - truth).abs().max()
    assert error <= 1.25 * allowed + slack, (float(error), float(allowed), slack)


def check_forward(
    tensors: list[torch.Tensor], spans: SpanRanges, features: dict[str, Any], tuning: Tuning = WHOLE
) -> torch.Tensor:
    tensors = with_sinks(tensors, features)
    out, _ = ours(tensors, spans, features, tuning)
    truth = eager([t.double() for t in tensors], spans, features)
    assert out.dtype == tensors[0].dtype
    within(out, eager(tensors, spans, features), truth, float(tensors[2].abs().max()), spans.n_rows)
    return out


@pytest.mark.parametrize("tuning", [WHOLE, SPLIT], ids=["whole", "split-tma"])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
def test_forward_of_random_trees(features: dict[str, Any], tuning: Tuning) -> None:
    for seed in (1, 2):
        spans = tree(seed)
        out = check_forward(inputs(spans.n_rows + 2), spans, features, tuning)
        in_a_span = np.zeros(len(out), dtype=bool)
        for start, end in zip(spans.starts, spans.ends, strict=True):
            in_a_span[start:end] = True
        assert (out[~torch.as_tensor(in_a_span)] == 0).all()


@pytest.mark.parametrize("features", [FEATURES["plain"], FEATURES["everything"]], ids=["plain", "everything"])
def test_forward_in_half_precision(features: dict[str, Any]) -> None:
    """float16 only: the interpreter cannot multiply bfloat16, which takes the same path with other conversions."""
    spans = tree(3)
    check_forward(inputs(spans.n_rows, dtype=torch.float16), spans, features, SPLIT)


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
@pytest.mark.parametrize("dim", [32, 64, 80])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (6, 2)])
def test_head_dims_and_groups(heads: int, kv_heads: int, dim: int, tma: bool) -> None:
    spans = tree(4, spans=5)
    check_forward(inputs(spans.n_rows, heads, kv_heads, dim), spans, {}, replace(WHOLE, tma=tma))


def test_value_heads_may_have_another_size_and_strides_do_not_matter() -> None:
    spans = tree(5, spans=5)
    rows = spans.n_rows
    query = torch.randn(1, 4, rows, 48)[0].transpose(0, 1)  # as a model hands them over: heads first
    key = torch.randn(2, rows, 48).transpose(0, 1)
    value = torch.randn(rows, 18, 2).transpose(1, 2)  # elements of a head apart, rows of 72 bytes: copied
    for tma in (False, True):
        check_forward([query, key, value], spans, {}, replace(WHOLE, tma=tma))
        check_gradients([query, key, value], spans, {}, replace(WHOLE, tma=tma))


def test_log_sum_exp() -> None:
    spans = tree(6)
    for features in (FEATURES["plain"], FEATURES["everything"]):
        tensors = with_sinks(inputs(spans.n_rows, heads=2), features)
        double = [t.double() for t in tensors]
        scores = torch.einsum("nhd,mhd->hnm", double[0], double[1]) * 0.3
        if "softcap" in features:
            scores = features["softcap"] * torch.tanh(scores / features["softcap"])
        seen = torch.as_tensor(visible_pairs(spans, features.get("window"))).bool()
        truth = scores.masked_fill(~seen, float("-inf")).logsumexp(-1)
        if features.get("sinks"):
            with_sink = torch.logaddexp(truth, double[3][:, None])
            truth = torch.where(seen.any(1), with_sink, truth)
        for tuning in (WHOLE, SPLIT):
            _, lse = ours(tensors, spans, features, tuning)
            assert lse.dtype == torch.float32
            # each of the sums has a relative error of one unit a term, and so has the logit itself
            slack = torch.finfo(torch.float32).eps * (spans.n_rows + float(scores.abs().max()) * 4)
            torch.testing.assert_close(lse.double(), truth.T, rtol=0, atol=slack)


# --- gradients -----------------------------------------------------------------------------------------------------


def gradients(out: torch.Tensor, tensors: list[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad((out * weight.to(out.dtype)).sum(), tensors))


def check_gradients(
    tensors: list[torch.Tensor], spans: SpanRanges, features: dict[str, Any], tuning: Tuning = WHOLE
) -> None:
    tensors = [t.requires_grad_() for t in with_sinks(tensors, features)]
    double = [t.detach().double().requires_grad_() for t in tensors]
    weight = torch.randn(*tensors[0].shape[:2], tensors[2].shape[2], dtype=torch.float64).to(tensors[0].dtype)
    truth = gradients(eager(double, spans, features), double, weight)
    same_dtype = gradients(eager(tensors, spans, features), tensors, weight)
    result = gradients(ours(tensors, spans, features, tuning)[0], tensors, weight)
    terms = spans.n_rows * tensors[0].shape[1] // tensors[1].shape[1]
    query, key = (t.detach().double().abs().amax() for t in tensors[:2])
    products = torch.einsum("nhd,mkd->nhmk", weight.double(), double[2].detach()).abs().amax()
    # terms of ds k, ds q, p dout and the sink's: |ds| <= 2 max |dout v|, p <= 1
    bounds = [0.6 * products * key, 0.6 * products * query, weight.abs().amax(), products]
    for got, plain, true, term in zip(result, same_dtype, truth, bounds, strict=False):
        assert got.dtype == plain.dtype
        within(got, plain, true, float(term), terms)


@pytest.mark.parametrize("tuning", [WHOLE, SPLIT], ids=["whole", "split-tma"])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
def test_gradients_of_random_trees(features: dict[str, Any], tuning: Tuning) -> None:
    spans = tree(7)
    check_gradients(inputs(spans.n_rows + 2), spans, features, tuning)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 80), (6, 2, 32), (3, 1, 64)])
def test_gradients_of_head_dims_and_groups(heads: int, kv_heads: int, dim: int) -> None:
    spans = tree(8, spans=8)
    check_gradients(inputs(spans.n_rows, heads, kv_heads, dim), spans, {})


def test_gradients_in_half_precision() -> None:
    spans = tree(9)
    check_gradients(inputs(spans.n_rows, dtype=torch.float16), spans, FEATURES["everything"])


def test_gradient_through_the_log_sum_exp() -> None:
    spans = SpanRanges.single(37)
    tensors = [t.requires_grad_() for t in inputs(37, heads=2)]
    double = [t.detach().double().requires_grad_() for t in tensors]
    weight = torch.randn(37, 2, dtype=torch.float64)
    scores = torch.einsum("nhd,mhd->nhm", double[0], double[1]) * 0.3
    hidden = torch.ones(37, 37).triu(1).bool()[:, None]
    truth = torch.autograd.grad((scores.masked_fill(hidden, float("-inf")).logsumexp(-1) * weight).sum(), double[:2])
    _, lse = ours(tensors, spans, {})
    result = torch.autograd.grad((lse * weight).sum(), tensors[:2])
    for got, true in zip(result, truth, strict=True):
        slack = float(true.abs().max()) * 37 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(got.double(), true, rtol=0, atol=slack)


# --- what may not reach a row --------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e4])
def test_a_row_reads_its_own_path_and_nothing_else(poison: float) -> None:
    """Every row outside one path is poisoned: output and gradients of the path's rows do not change by a bit."""
    spans = agent_rollout(trunk=50, turns=6, branch=7)
    tensors = inputs(spans.n_rows)
    weight = torch.randn(spans.n_rows, 4, 32)
    own = torch.arange(int(spans.starts[3]), int(spans.ends[3]))
    path = torch.cat([torch.as_tensor(rows_of(spans.ancestors(3))), own])
    others = torch.ones(spans.n_rows, dtype=torch.bool).index_fill_(0, path, False)
    results = []
    for dirty in (False, True):
        packed = [t.masked_fill(others[:, None, None] & dirty, poison).requires_grad_() for t in tensors]
        out, lse = ours(packed, spans, {})
        upstream = torch.zeros_like(weight).index_copy_(0, own, weight[own])
        if dirty:
            upstream = upstream.masked_fill(others[:, None, None], poison)
        grads = torch.autograd.grad(out, packed, upstream)
        # keys of the shared trunk collect gradients from every branch; the branch's own keys only from itself
        results.append([out[own], lse[own], *(g[own] for g in grads)])
    for clean, poisoned in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, poisoned)


@pytest.mark.parametrize("which", ["key", "value"])
def test_a_broken_row_breaks_what_sees_it(which: str) -> None:
    spans = tree(10, gap_rows=False)
    seen = torch.as_tensor(visible_pairs(spans, None)).bool()
    row = int(seen.sum(0).argmax())
    tensors = inputs(spans.n_rows)
    clean, _ = ours(tensors, spans, {})
    tensors[1 if which == "key" else 2][row, :, 3] = float("nan")
    out, _ = ours(tensors, spans, {})
    assert out[seen[:, row]].isnan().any(-1).all()
    assert torch.equal(out[~seen[:, row]], clean[~seen[:, row]])


def test_the_same_pack_gives_the_same_bits() -> None:
    spans = tree(11)
    tensors = [t.requires_grad_() for t in inputs(spans.n_rows)]
    weight = torch.randn(spans.n_rows, 4, 32)
    first, second = (ours(tensors, spans, {}, SPLIT)[0] for _ in range(2))
    assert torch.equal(first, second)
    pairs = zip(gradients(first, tensors, weight), gradients(second, tensors, weight), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# --- operators and refusals ----------------------------------------------------------------------------------------


def op_arguments(spans: SpanRanges, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """What a plan hands to the forward operator."""
    plan = TritonPlan(spans, WHOLE)
    tables, slots = plan._query_tables(SMALL, 2, 2, None, 1, torch.device("cpu"))
    grad_tables = [*tables, *plan._key_tables(SMALL, 2, None, torch.device("cpu"))]
    blocks = [16, 16, 4, 1, 0]
    return (*tensors, tables, grad_tables, slots, False, 0.3, 2.0, blocks, [*blocks, *blocks, 1])


def test_operators_pass_opcheck() -> None:
    spans = tree(12, spans=4)
    tensors = inputs(spans.n_rows, dim=32)
    arguments = op_arguments(spans, [*(t.requires_grad_() for t in tensors), sinks_of(tensors).requires_grad_()])
    attend = torch.ops.trace_fast.prefix_attention_triton
    torch.library.opcheck(attend.default, arguments, atol=1e-5, rtol=1e-5)
    plain = [t.detach() for t in tensors]
    out, lse = attend(*plain, None, *arguments[4:])
    backward = torch.ops.trace_fast.prefix_attention_triton_backward
    grads = (torch.randn_like(out), torch.randn_like(lse))
    torch.library.opcheck(backward.default, (*grads, *plain, out, lse, arguments[5], False, 0.3, 2.0, arguments[-1]))


def test_the_facade_runs_it_with_the_shipped_blocks() -> None:
    spans = agent_rollout(trunk=150, turns=3, branch=9)
    tensors = inputs(spans.n_rows)
    out = prefix_attention(*tensors, plan_attention(spans, "triton"), scale=0.3)
    truth = eager([t.double() for t in tensors], spans, {})
    within(out, eager(tensors, spans, {}), truth, float(tensors[2].abs().max()), spans.n_rows)


def test_a_compiled_function_gives_the_same_bits() -> None:
    spans = tree(13, spans=4)
    plan = TritonPlan(spans, WHOLE)
    tensors = [t.requires_grad_() for t in inputs(spans.n_rows)]

    def layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return prefix_attention(query * 2, key, value, plan, scale=0.3, window=9) + 1

    with torch.inference_mode():
        layer(*tensors)  # the forward's tables are made here, and must serve training below
    plain = layer(*tensors)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(*tensors)
    assert torch.equal(compiled, plain)
    weight = torch.randn_like(plain)
    pairs = zip(gradients(compiled, tensors, weight), gradients(plain, tensors, weight), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_tables_are_aligned() -> None:
    plan = TritonPlan(tree(14), WHOLE)
    tables = [*plan._query_tables(SMALL, 3, 2, 7, 64, torch.device("cpu"))[0]]
    tables += plan._key_tables(SMALL, 3, 7, torch.device("cpu"))
    assert all((table.data_ptr() - tables[0].data_ptr()) % 16 == 0 for table in tables[:8])
    assert all((table.data_ptr() - tables[8].data_ptr()) % 16 == 0 for table in tables[8:])


def test_empty_packs() -> None:
    none = np.empty(0, dtype=np.int64)
    spans = SpanRanges(3, none, none, none, np.empty((0, 2), dtype=np.int64), np.zeros(1, dtype=np.int64))
    tensors = [t.requires_grad_() for t in inputs(3)]
    out, lse = ours(tensors, spans, {})
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    assert all((g == 0).all() for g in gradients(out, tensors, torch.ones_like(out)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: ([x.double() for x in t], 0.3), "torch.float32, torch.bfloat16, torch.float16, got torch.float64"),
        (lambda t: ([x.repeat(1, 1, 5) for x in t], 0.3), "head dims up to 128 in torch.float32, got 160"),
        (lambda t: ([x.half().repeat(1, 1, 9) for x in t], 0.3), "head dims up to 256 in torch.float16, got 288"),
        (lambda t: ([x.bfloat16() for x in t], 0.3), "interpreter multiplies the bit patterns of torch.bfloat16"),
        (lambda t: ([t[0].repeat(1, 9, 1), *t[1:]], 0.3), "up to 16 query heads a key head here, got 18"),
        (lambda t: (t, -0.3), "a positive scale, got -0.3"),
    ],
)
def test_what_it_cannot_run_is_named(change: Any, message: str) -> None:
    tensors, scale = change(inputs(5))
    with pytest.raises(ConfigError, match=f"prefix_attention: backend 'triton' .*{message}"):
        TritonPlan(SpanRanges.single(5), WHOLE).run(*tensors, scale=scale, window=None, softcap=None, sinks_H=None)


def test_why_not() -> None:
    assert why_not(torch.device("cpu"), torch.float16) is None
    assert "got torch.float64" in str(why_not(torch.device("cpu"), torch.float64))


def test_derivatives_that_it_does_not_have_are_refused() -> None:
    plan = TritonPlan(SpanRanges.single(5), WHOLE)
    query, key, value = inputs(5)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return plan.run(x, key, value, scale=0.3, window=None, softcap=None, sinks_H=None)[0]

    expect_no_forward_mode(attend, query, "triton")
    expect_first_order_only(attend, query, "triton")
