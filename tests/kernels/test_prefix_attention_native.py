"""The C++ attention: its log-sum-exp, its registration with torch, and what it says to arguments that do not fit."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from span_trees import tree, visible_pairs
from tiny_models import random_rollout

from trace_fast import native
from trace_fast.errors import ConfigError
from trace_fast.kernels.prefix_attention import native_backward
from trace_fast.kernels.prefix_attention.native_impl import DTYPES, NativePlan, kernels, why_not
from trace_fast.kernels.prefix_attention.reference import ReferencePlan
from trace_fast.layout import PackedLayout, SpanRanges, pack_layout, rows_of
from trace_fast.rollout import Rollout

pytestmark = pytest.mark.skipif(not native.status().available, reason=f"native module: {native.status().reason}")

SETTINGS: dict[str, Any] = {"scale": 0.3, "window": None, "softcap": None, "sinks_H": None}


def spans() -> SpanRanges:
    return pack_layout([random_rollout(np.random.default_rng(0), turns=3, tokens=200, answers=(1, 9), opener=2)]).spans


def tensors(rows: int, dtype: torch.dtype = torch.float32, heads: int = 4, dim: int = 32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, h, dim).to(dtype) for h in (heads, 2, 2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_row_of_a_span_is_written_and_no_other(dtype: torch.dtype) -> None:
    pack = tree(3, longest=90)
    query, key, value = tensors(pack.n_rows + 2, dtype)
    sinks = torch.linspace(-2, 3, 4)
    covered = torch.zeros(pack.n_rows + 2, dtype=torch.bool)
    for start, end in zip(pack.starts, pack.ends, strict=True):
        covered[start:end] = True
    for kernel in kernels(dtype):
        plan = NativePlan(pack, kernel)
        usual = plan.run(query, key, value, **SETTINGS | {"sinks_H": sinks})
        out, lse = torch.full_like(query, math.nan), torch.full(query.shape[:2], math.nan)
        native.module().prefix_attention(
            query, key, value, out, lse, *plan._tables, 0.3, 0, 0.0, sinks, 2, kernel
        )
        for found, wanted in zip((out, lse), usual, strict=True):
            assert found[covered].isfinite().all()
            assert torch.equal(found[covered], wanted[covered])
            assert found[~covered].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sink", [None, -3.0, 40.0], ids=str)
@pytest.mark.parametrize("window", [None, 5], ids=str)
def test_log_sum_exp(dtype: torch.dtype, sink: float | None, window: int | None) -> None:
    pack = spans()
    query, key, value = tensors(pack.n_rows + 2, dtype)
    sinks = None if sink is None else torch.full((4,), sink)
    settings = SETTINGS | {"window": window, "sinks_H": sinks}
    for name in kernels(dtype):
        _, lse = NativePlan(pack, name).run(query, key, value, **settings)
        assert (lse[pack.n_rows :] == -math.inf).all(), "rows in no span see nothing"
        for p in range(len(pack)):
            before = rows_of(pack.ancestors(p)).tolist()
            own = list(range(int(pack.starts[p]), int(pack.ends[p])))
            for i in (0, len(own) - 1):
                path = [*before, *own[: i + 1]][-(window or 10**6) :]
                query_KGD = query[own[i]].double().view(2, 2, 32)
                scores = torch.einsum("kgd,skd->kgs", query_KGD, key[path].double()).reshape(4, -1) * 0.3
                if sinks is not None:
                    scores = torch.cat([scores, sinks.double()[:, None]], 1)
                # a product of 32 terms and a sum of 200 in float32: a few units of the largest score
                torch.testing.assert_close(lse[own[i]].double(), scores.logsumexp(1), rtol=0, atol=2e-5)


def test_it_is_a_torch_operator() -> None:
    pack = spans()
    plan = NativePlan(pack)
    query, key, value = tensors(pack.n_rows)
    with_gradient = [t.clone().requires_grad_() for t in (query, key, value)]
    arguments = (*with_gradient, *plan._tables, 0.3, 0, 0.0, torch.zeros(4, requires_grad=True), "")
    torch.library.opcheck(torch.ops.trace_fast.prefix_attention_native.default, arguments)

    def layer(query: torch.Tensor) -> torch.Tensor:
        return plan.run(query * 2, key, value, **SETTINGS)[0] + 1

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(query), layer(query))


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks_H": torch.linspace(-2, 3, 4)},
    "everything": {"window": 60, "softcap": 3.0, "sinks_H": torch.linspace(-2, 3, 4)},
}


def gradients(
    plan: Any, leaves: list[torch.Tensor], weight: torch.Tensor, precision: torch.dtype, **features: Any
) -> list[torch.Tensor]:
    """Of query, key, value and, where there are some, sinks; ``weight`` is the upstream gradient."""
    inputs = [t.detach().to(precision).requires_grad_() for t in leaves]
    sinks = features.get("sinks_H")
    extra = [] if sinks is None else [sinks.detach().to(precision).requires_grad_()]
    settings = SETTINGS | features | ({"sinks_H": extra[0]} if extra else {})
    out, _ = plan.run(*inputs, **settings)
    return torch.autograd.grad((out.double() * weight).sum(), [*inputs, *extra])


def check_gradients(
    pack: SpanRanges, leaves: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, **features: Any
) -> None:
    """Against the oracle's in float64; the oracle's own in this dtype says what its rounding costs."""
    dtype = leaves[0].dtype
    weight = torch.randn(leaves[0].shape, dtype=torch.float64)
    truth = gradients(ReferencePlan(pack), leaves, weight, torch.float64, **features)
    eager = gradients(ReferencePlan(pack), leaves, weight, dtype, **features)
    ours = gradients(NativePlan(pack), leaves, weight, dtype, **features)
    monkeypatch.setattr(native_backward, "SCORES", 700)  # a few rows at a time
    in_pieces = gradients(NativePlan(pack), leaves, weight, dtype, **features)
    for name, t, e, o, p in zip(("query", "key", "value", "sinks"), truth, eager, ours, in_pieces, strict=False):
        assert o.dtype == e.dtype
        allowed = (e.double() - t).abs()
        # exp(s - lse) carries the float32 roundings of both, where a softmax only has those of differences; and the
        # output that delta is made of was rounded to the dtype
        largest = 8.0  # of scores and their log-sum-exp here
        unit = (torch.finfo(dtype).eps + largest * torch.finfo(torch.float32).eps) * t.abs().max()
        # dout v and delta are sums of `dim` terms around 1; eager subtracts equal numbers where a row sees one key
        factor = {"query": leaves[1], "key": leaves[0]}.get(name, torch.zeros(1)).double().abs().max()
        sums = leaves[2].shape[2] * torch.finfo(torch.float32).eps * (SETTINGS | features)["scale"] * factor
        for found in (o, p):
            error = (found.double() - t).abs()
            assert error.mean() <= 1.5 * allowed.mean() + unit / 16, name
            assert error.max() <= 2 * allowed.max() + unit + sums, name


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(features: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = spans()
    check_gradients(pack, tensors(pack.n_rows + 2, dtype), monkeypatch, **features)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_gradients_of_head_dims_and_groups(
    dim: int, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = spans()
    leaves = tensors(pack.n_rows + 2, dtype, heads=2 * group, dim=dim)
    check_gradients(pack, leaves, monkeypatch, scale=0.3 * (32 / dim) ** 0.5)  # scores of one size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", [FEATURES["plain"], FEATURES["everything"]], ids=["plain", "everything"])
def test_gradients_are_bit_equal_in_any_pack_with_any_threads_and_again(
    features: dict[str, Any], dtype: torch.dtype
) -> None:
    """Rollouts that share rows, before, between and behind others that share none with them."""
    rng = np.random.default_rng(5)

    def group(first_token: int) -> list[Rollout]:
        prompt = np.concatenate([[first_token], rng.integers(3, 99, 80)])
        return [random_rollout(rng, prompt=prompt, turns=3, tokens=n, answers=(1, 9), opener=2) for n in (50, 210)]

    ours, others = group(1), group(2)
    alone = pack_layout(ours)
    together = pack_layout([others[0], ours[0], others[1], ours[1]])
    rows = {path: row for row, path in enumerate(paths(together))}
    place = torch.tensor([rows[path] for path in paths(alone)])
    leaves, weight = tensors(len(together), dtype), torch.randn(len(together), 4, 32)
    picked = [t[place] for t in leaves]
    wanted = gradients(NativePlan(alone.spans), picked, weight[place], dtype, **features)[:3]
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            again = gradients(NativePlan(alone.spans), picked, weight[place], dtype, **features)[:3]
            packed = gradients(NativePlan(together.spans), leaves, weight, dtype, **features)[:3]
            for name, w, a, p in zip(("query", "key", "value"), wanted, again, packed, strict=True):
                assert torch.equal(a, w), (name, number)
                assert torch.equal(p[place], w), (name, number)
    finally:
        torch.set_num_threads(threads)


def paths(layout: PackedLayout) -> list[tuple[int, ...]]:
    """Of each row, the tokens up to it."""
    found: list[tuple[int, ...]] = [()] * len(layout)
    for p in range(len(layout.spans)):
        before = layout.input_ids[rows_of(layout.spans.ancestors(p))].tolist()
        start, end = int(layout.spans.starts[p]), int(layout.spans.ends[p])
        for row in range(start, end):
            found[row] = (*before, *layout.input_ids[start : row + 1].tolist())
    return found


@pytest.mark.parametrize("window", [None, 9], ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("place", ["upstream", "query", "key", "value"])
def test_what_is_not_finite_stays_on_its_path(
    place: str, poison: float, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that no path leads to keep their bits; NaN shows in the others."""
    rollouts = [random_rollout(np.random.default_rng(s), turns=2, tokens=90, answers=(3,), opener=2) for s in (0, 1)]
    rollouts[1].input_ids[:40] = rollouts[0].input_ids[:40]
    pack = pack_layout(rollouts).spans
    visible = torch.as_tensor(visible_pairs(pack, window)).bool()
    tensors_, upstream = tensors(pack.n_rows), torch.randn(pack.n_rows, 4, 32)
    monkeypatch.setattr(native_backward, "SCORES", 4000)  # several steps a span

    def gradients_with(row: int | None) -> tuple[torch.Tensor, ...]:
        parts = {name: t.clone() for name, t in zip(("query", "key", "value"), tensors_, strict=True)}
        parts["upstream"] = upstream.clone()
        if row is not None:
            parts[place][row, 0, 5] = poison
        above = parts.pop("upstream")
        leaves = [t.requires_grad_() for t in parts.values()]
        return torch.autograd.grad(NativePlan(pack).run(*leaves, **SETTINGS | {"window": window})[0], leaves, above)

    clean = gradients_with(None)
    assert all(g.isfinite().all() for g in clean)
    for row in (0, 20, int(pack.starts[3]), pack.n_rows - 1):
        rows = torch.arange(pack.n_rows) == row if place in ("upstream", "query") else visible[:, row]
        keys = visible[rows].any(0)
        query, key, value = gradients_with(row)
        for found, wanted, reached in zip((query, key, value), clean, (rows, keys, keys), strict=True):
            assert torch.equal(found[~reached], wanted[~reached])
        if math.isnan(poison):
            shown = [query[rows], key[keys], *([] if place == "value" else [value[keys]])]
            assert all(g[:, 0].isnan().any(-1).all() for g in shown), "of the poisoned head"
        assert all(g[:, -1].isfinite().all() for g in (query, key, value)), "another head"


def test_gradient_of_the_log_sum_exp() -> None:
    pack = SpanRanges.single(9)
    leaves = [t.requires_grad_() for t in tensors(9)]
    _, lse = NativePlan(pack).run(*leaves, **SETTINGS)
    weight = torch.randn(9, 4)
    ours = torch.autograd.grad((lse * weight).sum(), leaves[:2])
    query, key = (t.detach().double().requires_grad_() for t in leaves[:2])
    scores = torch.einsum("nkgd,mkd->nkgm", query.view(9, 2, 2, 32), key).reshape(9, 4, 9) * 0.3
    scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1)[:, None], float("-inf"))
    wanted = torch.autograd.grad((scores.logsumexp(-1) * weight).sum(), [query, key])
    for o, w in zip(ours, wanted, strict=True):
        torch.testing.assert_close(o.double(), w, rtol=1e-5, atol=1e-6)


def test_what_it_does_not_run_is_said() -> None:
    assert why_not(torch.device("cpu"), torch.bfloat16) is None
    assert why_not(torch.device("cuda"), torch.bfloat16) == "the C++ kernel runs on the CPU, got cuda"
    pack = spans()
    with pytest.raises(ConfigError, match=r"backend 'native': the C\+\+ kernel takes float32, .*, got torch.float64"):
        NativePlan(pack).run(*tensors(pack.n_rows, torch.float64), **SETTINGS)
    with pytest.raises(ValueError, match=r"kernel: expected one that this processor runs on .* \(.*\), got mmx"):
        NativePlan(pack, "mmx").run(*tensors(pack.n_rows), **SETTINGS)


def arguments(**changes: Any) -> dict[str, Any]:
    query, key, value = tensors(70)
    rows = torch.full((2, 64), -1, dtype=torch.int64)
    rows.view(-1)[:70] = torch.arange(70)
    good = {
        "query": query,
        "key": key,
        "value": value,
        "out": torch.zeros(70, 4, 32),
        "lse": torch.zeros(70, 4),
        "block_rows": rows,
        "path_blocks": torch.tensor([0, 1]),
        "spans": torch.tensor([[0, 70, 0, 0]]),
        "scale": 0.3,
        "window": 0,
        "softcap": 0.0,
        "sinks": torch.zeros(4),
        "n_threads": 1,
        "kernel": kernels(torch.float32)[0],
    }
    assert set(changes) <= set(good)
    return good | changes


def test_good_arguments_of_the_cases_below_run() -> None:
    native.module().prefix_attention(**arguments())


BAD: list[tuple[dict[str, Any], str]] = [
    ({"query": None}, "query: expected a torch.Tensor, got <class 'NoneType'>"),
    ({"query": np.zeros((70, 4, 32))}, "query: expected a torch.Tensor, got <class 'numpy.ndarray'>"),
    ({"query": torch.zeros(70, 4, 32, device="meta")}, "query: expected a tensor on cpu, got meta"),
    ({"query": torch.zeros(70, 4, 32, dtype=torch.float64)}, "query: expected torch.float32 or .*, got torch.float64"),
    ({"query": torch.zeros(70, 128)}, r"query: expected 3 dimensions, got shape \(70, 128\)"),
    ({"query": torch.zeros(70, 4, 0)}, r"query: expected at least one head and dimension, got shape \(70, 4, 0\)"),
    ({"query": torch.zeros(70, 4, 64)[..., ::2]}, "query: expected a contiguous last axis, got stride 2"),
    (
        {"query": torch.from_numpy(np.zeros(70 * 4 * 32 * 4 + 1, dtype=np.uint8)[1:].view(np.float32)).view(70, 4, 32)},
        "query: expected memory aligned to its elements of 4 bytes, got an address that is 1 beyond",
    ),
    ({"key": torch.zeros(70, 2, 32).bfloat16()}, "key: expected torch.float32, got torch.bfloat16"),
    ({"key": torch.zeros(69, 2, 32)}, r"key: expected 70 rows as the query, got shape \(69, 2, 32\)"),
    ({"key": torch.zeros(70, 3, 32)}, r"key: expected heads that divide the query's 4, got shape \(70, 3, 32\)"),
    ({"key": torch.zeros(70, 0, 32)}, r"key: expected heads that divide the query's 4, got shape \(70, 0, 32\)"),
    ({"key": torch.zeros(70, 2, 31)}, r"key: expected head_dim 32 as the query, got shape \(70, 2, 31\)"),
    ({"value": torch.zeros(70, 1, 32)}, "value: expected rows and heads of the key"),
    ({"value": torch.zeros(70, 2, 0)}, "value: expected rows and heads of the key and at least one dimension"),
    ({"out": torch.zeros(70, 4, 31)}, r"out: expected shape \(70, 4, 32\), got shape \(70, 4, 31\)"),
    ({"out": torch.zeros(70, 32, 4).transpose(1, 2)}, "out: expected a contiguous tensor, got stride 4 on axis 2"),
    ({"out": torch.zeros(70, 4, 32).half()}, "out: expected torch.float32, got torch.float16"),
    ({"lse": torch.zeros(70, 3)}, r"lse: expected shape \(70, 4\), got shape \(70, 3\)"),
    ({"lse": torch.zeros(70, 4).double()}, "lse: expected torch.float32, got torch.float64"),
    ({"block_rows": torch.zeros(2, 63, dtype=torch.int64)}, r"block_rows: expected shape \(2, 64\)"),
    ({"block_rows": torch.zeros(2, 64, dtype=torch.int32)}, "block_rows: expected torch.int64, got torch.int32"),
    ({"block_rows": torch.full((2, 64), 70)}, r"block_rows: expected rows in -1\.\.69, got 70"),
    ({"block_rows": torch.full((2, 64), -2)}, r"block_rows: expected rows in -1\.\.69, got -2"),
    ({"path_blocks": torch.tensor([0, 2])}, r"path_blocks: expected blocks in 0\.\.1, got 2"),
    ({"path_blocks": torch.tensor([0, -1])}, r"path_blocks: expected blocks in 0\.\.1, got -1"),
    ({"path_blocks": torch.tensor([0])}, r"spans: expected 2 path blocks from a place in 0\.\.1, got 0"),
    ({"path_blocks": torch.zeros(4, dtype=torch.int64)[::2]}, "path_blocks: expected a contiguous tensor"),
    ({"spans": torch.tensor([[0, 71, 0, 0]])}, r"spans: expected rows within 0\.\.70, got 71 rows from 0 on"),
    ({"spans": torch.tensor([[-1, 5, 0, 0]])}, r"spans: expected rows within 0\.\.70, got 5 rows from -1 on"),
    ({"spans": torch.tensor([[0, 5, -1, 0]])}, "spans: expected a depth of at least 0, got -1"),
    ({"spans": torch.tensor([[0, 5, 2**62, 0]])}, "spans: expected a depth of at least 0, got"),
    ({"spans": torch.tensor([[0, 70, 0, 1]])}, r"spans: expected 2 path blocks from a place in 0\.\.2, got 1"),
    ({"spans": torch.tensor([[0, 70, 0, -1]])}, r"spans: expected 2 path blocks from a place in 0\.\.2, got -1"),
    ({"spans": torch.tensor([0, 70, 0, 0])}, r"spans: expected 2 dimensions, got shape \(4,\)"),
    ({"window": -1}, r"window: expected 0 \(all\) or more, got -1"),
    ({"softcap": -1.0}, r"softcap: expected 0 \(none\) or more, got -1"),
    ({"softcap": float("nan")}, r"softcap: expected 0 \(none\) or more, got"),
    ({"sinks": torch.zeros(3)}, r"sinks: expected shape \(4,\), got shape \(3,\)"),
    ({"n_threads": 0}, "n_threads: expected at least 1, got 0"),
    ({"kernel": "x"}, "kernel: expected one that this processor runs"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_arguments_are_named_and_never_run(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.module().prefix_attention(**arguments(**changes))


def test_a_defect_of_any_tensor_is_named(defect: Any) -> None:
    names = [name for name, argument in arguments().items() if isinstance(argument, torch.Tensor)]
    assert len(names) == 9
    for name in names:
        bad = defect.spoil(arguments()[name])
        with pytest.raises(ValueError, match=f"^{name}: expected {defect.expected}"):
            native.module().prefix_attention(**arguments(**{name: bad}))


def test_random_tables_never_crash() -> None:
    """In a process of its own, so that a crash is an error like any other; with the module that is tested here."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "fuzzed_attention_tables.py"), native.module().__file__],
        env=os.environ | {"PYTHONPATH": str(here.parent)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    refused, ran = (int(number) for number in done.stdout.split())
    assert refused + ran == 500
    assert refused > 100
    assert ran > 100


def test_a_plan_made_for_inference_serves_training() -> None:
    with torch.inference_mode():
        plan = NativePlan(SpanRanges.single(9))
    leaves = [t.requires_grad_() for t in tensors(9)]
    gradients = torch.autograd.grad(plan.run(*leaves, **SETTINGS)[0].sum(), leaves)
    assert all(g.isfinite().all() for g in gradients)


def test_empty_packs() -> None:
    empty = np.empty(0, dtype=np.int64)
    none = SpanRanges(0, empty, empty, empty, np.empty((0, 2), dtype=np.int64), np.zeros(1, dtype=np.int64))
    out, _ = NativePlan(none).run(*tensors(3), **SETTINGS)
    assert torch.equal(out, torch.zeros(3, 4, 32))
    assert NativePlan(none).run(*tensors(0), **SETTINGS)[0].shape == (0, 4, 32)
