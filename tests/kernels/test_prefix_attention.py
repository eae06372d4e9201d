"""prefix_attention against its float64 oracle, and what may never reach a row: other branches, NaN, its pack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from span_trees import tree
from tiny_models import random_rollout

from trace_fast import native
from trace_fast.kernels.prefix_attention import plan_attention, prefix_attention
from trace_fast.kernels.prefix_attention.native_impl import DTYPES, NativePlan, kernels
from trace_fast.kernels.prefix_attention.native_plan import KEY_BLOCK, plan_blocks
from trace_fast.kernels.prefix_attention.tiles import DEPTH_BLOCK, plan_tiles
from trace_fast.layout import SpanRanges, pack_layout, rows_of
from trace_fast.rollout import Rollout

pytestmark = pytest.mark.usefixtures("poisoned_memory")
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window-1": {"window": 1},
    "window-7": {"window": 7},
    "window-700": {"window": 700},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "everything": {"window": 90, "softcap": 3.0, "sinks": True},
}

# torch's tiles, and every code path of the native module that this processor runs
NATIVE = {dtype: kernels(dtype) if native.status().available else [] for dtype in DTYPES}
ENGINES = [("torch", dtype) for dtype in DTYPES] + [(name, dtype) for dtype in DTYPES for name in NATIVE[dtype]]
FLOAT32_ENGINES = [name for name, dtype in ENGINES if dtype == torch.float32]
NATIVE_ENGINES = [(name, dtype) for name, dtype in ENGINES if name != "torch"]
engines = pytest.mark.parametrize(("engine", "dtype"), ENGINES, ids=lambda x: str(x).removeprefix("torch."))
float32_engines = pytest.mark.parametrize("engine", FLOAT32_ENGINES)


def pack(seed: int = 0, prompt: int = 400) -> list[Rollout]:
    """A group with a shared prompt, branches at many depths, and trunks across depth blocks."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, 99, prompt)
    return [
        random_rollout(rng, f"r{i}", prompt=shared, turns=3 + i, tokens=n, answers=(1, 9), opener=i)
        for i, n in enumerate((60, 300, 700))
    ]


def inputs(
    rows: int, heads: int = 4, kv_heads: int = 2, dim: int = 32, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    return [torch.randn(rows, h, dim, dtype=torch.float64).to(dtype) for h in (heads, kv_heads, kv_heads)]


def run(
    engine: str, tensors: list[torch.Tensor], spans: SpanRanges, *, sinks: bool = False, **features: Any
) -> torch.Tensor:
    sinks_H = torch.linspace(-2, 3, tensors[0].shape[1], dtype=tensors[0].dtype) if sinks else None
    plan = plan_attention(spans, engine) if engine in ("torch", "reference") else NativePlan(spans, engine)
    return prefix_attention(*tensors, plan, scale=0.3, sinks_H=sinks_H, **features)


def no_further_than_eager(
    engine: str, tensors: list[torch.Tensor], spans: SpanRanges, **features: Any
) -> torch.Tensor:
    """Runs an engine; its error against float64 is bounded by eager attention's own in the same dtype.

    Both accumulate in float32 and round once to the dtype. Engines sum in another order and may round the weights to
    the dtype before the second product: each weight then is off by up to half a unit, so the output by up to half a
    unit of the largest value, one unit with the final rounding. Means are compared tightly; the largest of some ten
    thousand roundings varies by itself, so it may be twice as large.
    """
    truth = run("reference", [t.double() for t in tensors], spans, **features)
    ours = run(engine, tensors, spans, **features)
    error = (ours.double() - truth).abs()
    eager = (run("reference", tensors, spans, **features).double() - truth).abs()
    unit = torch.finfo(ours.dtype).eps * tensors[2].double().abs().max()
    assert error.max() <= 2 * eager.max() + unit
    assert error.mean() <= 1.25 * eager.mean() + unit / 64
    return ours


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@engines
def test_no_engine_is_further_from_the_truth_than_eager_attention(
    features: dict[str, Any], engine: str, dtype: torch.dtype
) -> None:
    layout = pack_layout(pack())
    tensors = inputs(len(layout) + 3, dtype=dtype)
    ours = no_further_than_eager(engine, tensors, layout.spans, **features)
    assert ours.dtype == dtype
    assert (ours[len(layout) :] == 0).all(), "padding rows give zeros"


@engines
def test_random_tries(engine: str, dtype: torch.dtype) -> None:
    """Roots, chains, branches anywhere, twins, empty spans and rows of no span; paths within and across blocks."""
    settings = list(FEATURES.values())
    for seed in range(21):  # each setting with short, longer and long spans
        spans = tree(seed, longest=(20, 90, 300)[seed // len(settings)])
        tensors = inputs(spans.n_rows + 3, dtype=dtype)
        ours = no_further_than_eager(engine, tensors, spans, **settings[seed % len(settings)])
        covered = torch.zeros(len(ours), dtype=torch.bool)
        for start, end in zip(spans.starts, spans.ends, strict=True):
            covered[start:end] = True
        assert (ours[~covered] == 0).all(), "rows of no span give zeros"
        assert (ours[covered] != 0).any(-1).all(), "and no others"


@pytest.mark.parametrize("dim", [32, 48, 60, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (6, 3)])
def test_head_dims_and_groups(dim: int, heads: int, kv_heads: int) -> None:
    layout = pack_layout(pack(1, prompt=30)[:2])
    for engine, dtype in ENGINES:
        if dtype != torch.float16:  # float32's code after a conversion
            no_further_than_eager(engine, inputs(len(layout), heads, kv_heads, dim, dtype), layout.spans)


def test_many_heads_fold_into_a_tile() -> None:
    layout = pack_layout(pack(1, prompt=30)[:1])
    for engine in FLOAT32_ENGINES:
        for heads in (14, 200):  # more than the rows of a tile
            no_further_than_eager(engine, inputs(len(layout), heads, 1, 16), layout.spans)


@engines
def test_value_heads_may_have_another_size_and_dims_may_be_odd(engine: str, dtype: torch.dtype) -> None:
    layout = pack_layout(pack(2, prompt=30)[:1])
    for dim, value_dim in ((48, 32), (33, 17), (1, 1)):
        query, key, _ = inputs(len(layout), dim=dim, dtype=dtype)
        value = torch.randn(len(layout), 2, value_dim).to(dtype)
        no_further_than_eager(engine, [query, key, value], layout.spans)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
def test_float64_is_float64_throughout(features: dict[str, Any]) -> None:
    layout = pack_layout(pack(10, prompt=50)[:2])
    tensors = inputs(len(layout), dtype=torch.float64)
    truth = run("reference", tensors, layout.spans, **features)
    torch.testing.assert_close(run("torch", tensors, layout.spans, **features), truth, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("engine", "dtype"), [("reference", torch.float32), *ENGINES])
def test_a_row_reads_its_own_path_and_nothing_else(engine: str, dtype: torch.dtype) -> None:
    """Poison every row outside one branch's path: the branch must not change by a bit, nor notice NaN."""
    layout = pack_layout(pack(3))
    spans = layout.spans
    tensors = inputs(len(layout), dtype=dtype)
    clean = run(engine, tensors, spans)
    for p in (1, len(spans) // 2, len(spans) - 1):
        own = torch.arange(int(spans.starts[p]), int(spans.ends[p]))
        path = torch.cat([torch.as_tensor(rows_of(spans.ancestors(p))), own])
        others = torch.ones(len(layout), dtype=torch.bool).index_fill_(0, path, False)
        for poison in (float("nan"), float("inf"), 1e4):
            dirty = [t.masked_fill(others[:, None, None], poison) for t in tensors]
            assert torch.equal(run(engine, dirty, spans)[own], clean[own]), (p, poison)


@pytest.mark.parametrize("part", [1, 2], ids=["key", "value"])
@engines
def test_a_broken_row_stays_broken_and_breaks_only_what_follows_it(engine: str, dtype: torch.dtype, part: int) -> None:
    layout = pack_layout(pack(4))
    tensors = inputs(len(layout), dtype=dtype)
    clean = run(engine, tensors, layout.spans)
    tensors[part][200] = float("nan")  # in the shared prompt: rows behind it, of every rollout, must show it
    broken = run(engine, tensors, layout.spans)
    assert torch.equal(broken[:200], clean[:200])
    for p in range(len(layout.spans)):
        rows = slice(int(layout.spans.starts[p]), int(layout.spans.ends[p]))
        assert broken[rows][layout.positions[rows] >= 200].isnan().all()


@engines
def test_padding_rows_never_show(engine: str, dtype: torch.dtype) -> None:
    layout = pack_layout(pack(5))
    tensors = inputs(len(layout) + 60, dtype=dtype)
    for t in tensors:
        t[len(layout) :] = float("nan")
    out = run(engine, tensors, layout.spans)
    assert out.isfinite().all()


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@engines
def test_rows_are_bit_equal_alone_and_in_any_pack(features: dict[str, Any], engine: str, dtype: torch.dtype) -> None:
    group = pack(6)
    together = pack_layout([*group, *pack(7), group[0]])
    tensors = inputs(len(together), dtype=dtype)
    out = run(engine, tensors, together.spans, **features)
    by_path = {}
    for p in range(len(together.spans)):
        before = rows_of(together.spans.ancestors(p)).tolist()
        own = range(int(together.spans.starts[p]), int(together.spans.ends[p]))
        for i, row in enumerate(own):
            by_path[tuple(together.input_ids[[*before, *own[: i + 1]]])] = row
    for rollout in group:
        alone = pack_layout([rollout])
        place = []
        for p in range(len(alone.spans)):
            before = rows_of(alone.spans.ancestors(p)).tolist()
            own = range(int(alone.spans.starts[p]), int(alone.spans.ends[p]))
            place += [by_path[tuple(alone.input_ids[[*before, *own[: i + 1]]])] for i in range(len(own))]
        picked = [t[place] for t in tensors]
        assert torch.equal(run(engine, picked, alone.spans, **features), out[place])


@pytest.mark.parametrize(
    "count", [1, 2, 3, 4, 5, 31, 32, 33, 34, 63, 64, 65, 191, 192, 193, DEPTH_BLOCK - 1, DEPTH_BLOCK]
)
@engines
def test_a_span_of_any_length_gets_the_bits_of_the_whole(count: int, engine: str, dtype: torch.dtype) -> None:
    """The facts about torch's kernels that ``tiles`` and ``torch_impl`` build on; and tiles of any height."""
    total = 2 * DEPTH_BLOCK + 100
    tensors = inputs(total, dtype=dtype)
    whole = run(engine, tensors, SpanRanges.single(total))
    for start in (DEPTH_BLOCK - 1, DEPTH_BLOCK, DEPTH_BLOCK + 77):
        rows = torch.arange(start + count)
        spans = SpanRanges(
            n_rows=start + count,
            starts=np.array([start]),
            ends=np.array([start + count]),
            depths=np.array([start]),
            ranges=np.array([[0, start]]),
            cu_ranges=np.array([0, 1]),
        )
        part = run(engine, [t[rows] for t in tensors], spans)
        assert torch.equal(part[start:], whole[start : start + count])


def test_the_plan_copies_each_branch_once_and_the_trunk_once_more_at_most() -> None:
    rollout = random_rollout(np.random.default_rng(8), turns=60, tokens=4000, answers=(8,), opener=5)
    layout = pack_layout([rollout])
    tiles = plan_tiles(layout.spans)
    assert sum(t.count for t in tiles) == len(layout)
    copied = sum(c.count for t in tiles for c in t.copies)
    assert copied <= 4020 + DEPTH_BLOCK + 62 * 2 * DEPTH_BLOCK, "a branch may touch its depth block, not its path"


def test_blocks_are_shared_by_all_paths_that_run_through_them() -> None:
    rollout = random_rollout(np.random.default_rng(8), turns=60, tokens=4000, answers=(8,), opener=5)
    spans = pack_layout([rollout]).spans
    table = plan_blocks(spans)
    for p in range(len(spans)):
        row, count, depth, at = table.spans[p].tolist()
        path = [*rows_of(spans.ancestors(p)).tolist(), *range(row, row + count)]
        assert len(path) == depth + count
        blocks = table.block_rows[table.path_blocks[at : at + -(-len(path) // KEY_BLOCK)]].reshape(-1)
        # behind the branch point of a deeper span a shared block may go on with rows of its first owner
        assert blocks[: len(path)].tolist() == path
    trunk = -(-len(rollout.input_ids) // KEY_BLOCK)
    assert len(table.block_rows) <= trunk + len(spans) * 2, "a span adds the blocks that its own rows touch, no more"


@pytest.mark.skipif(not native.status().available, reason=f"native module: {native.status().reason}")
@engines
def test_the_number_of_threads_never_shows(engine: str, dtype: torch.dtype) -> None:
    layout = pack_layout(pack(11))
    tensors = inputs(len(layout), dtype=dtype)
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outs += [run(engine, tensors, layout.spans) for _ in range(2)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize(("engine", "dtype"), NATIVE_ENGINES)
def test_strides_are_followed(engine: str, dtype: torch.dtype) -> None:
    """transformers hands over (heads, rows, dim) tensors transposed; any other layout is as good."""
    layout = pack_layout(pack(12, prompt=30)[:1])
    tensors = inputs(len(layout), dtype=dtype)
    clean = run(engine, tensors, layout.spans)
    by_head = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors]
    by_dim = [t.permute(2, 1, 0).contiguous().permute(2, 1, 0) for t in tensors]
    assert torch.equal(run(engine, by_head, layout.spans), clean)
    assert torch.equal(run(engine, by_dim, layout.spans), clean)


@engines
def test_a_branch_may_run_along_the_trunk_of_a_later_rollout(engine: str, dtype: torch.dtype) -> None:
    """Spans come trunk-first a rollout, so the span that a branch hangs under may have a larger number."""
    rng = np.random.default_rng(0)
    prompt, common = rng.integers(3, 99, 70), rng.integers(3, 99, 300)

    def rollout(name: str, rest: np.ndarray, opener: np.ndarray) -> Rollout:
        ids = np.concatenate([prompt, rest])
        answers = (rng.integers(3, 99, 4),)
        return Rollout(
            id=name, group="g", input_ids=ids, boundaries=np.array([70, len(ids)]), n_turns=0, answers=answers,
            openers=(opener,) * 2,
        )  # fmt: skip

    first = rollout("first", rng.integers(100, 199, 50), np.concatenate([common[:200], [7]]))
    layout = pack_layout([first, rollout("later", common, rng.integers(3, 99, 3))])
    spans = layout.spans
    owners = [int(np.searchsorted(spans.ends, end - 1, side="right")) for _, end in spans.ranges.tolist()]
    spans_of_ranges = np.repeat(np.arange(len(spans)), np.diff(spans.cu_ranges))
    assert (np.array(owners) > spans_of_ranges).any(), "the case that this test is about"
    no_further_than_eager(engine, inputs(len(layout), dtype=dtype), spans)


def test_gradients_of_the_oracle_are_those_of_dense_attention() -> None:
    layout = pack_layout(pack(9, prompt=10)[:1])
    tensors = [t.double().requires_grad_() for t in inputs(len(layout))]
    weight = torch.randn(len(layout), 4, 32, dtype=torch.float64)
    (run("reference", tensors, layout.spans) * weight).sum().backward()
    mask = torch.full((len(layout), len(layout)), float("-inf"), dtype=torch.float64)
    for p in range(len(layout.spans)):
        before = rows_of(layout.spans.ancestors(p))
        for row in range(int(layout.spans.starts[p]), int(layout.spans.ends[p])):
            mask[row, before] = 0
            mask[row, int(layout.spans.starts[p]) : row + 1] = 0
    dense = [t.detach().requires_grad_() for t in tensors]
    query, key, value = (t.transpose(0, 1) for t in dense)
    scores = query @ key.repeat_interleave(2, 0).transpose(1, 2) * 0.3 + mask
    ((scores.softmax(-1) @ value.repeat_interleave(2, 0)).transpose(0, 1) * weight).sum().backward()
    for ours, theirs in zip(tensors, dense, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-11)
