"""The attention problem of the benchmarks is what it says: spans, mask and exact rows agree with the op's oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trace_fast.bench.attention_problem import AttentionShape, exact_rows
from trace_fast.kernels.prefix_attention import plan_attention, prefix_attention

CPU = torch.device("cpu")
SHAPES = [AttentionShape(37, 3, 5, 4, 2, 16), AttentionShape(20, 0, 0, 2, 2, 8), AttentionShape(9, 9, 1, 6, 1, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_rows_are_the_oracles(shape: AttentionShape) -> None:
    query, key, value = shape.tensors(torch.float64, CPU)
    spans = shape.spans()
    rows = shape.sample(20)
    found = exact_rows(query, key, value, spans, rows)
    oracle = prefix_attention(query, key, value, plan_attention(spans, "reference"), scale=shape.head_dim**-0.5)
    torch.testing.assert_close(found, oracle[torch.as_tensor(rows)], rtol=1e-12, atol=1e-12)
    assert {0, shape.trunk - 1, shape.rows - 1} <= set(rows.tolist())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_mask_says_the_same_and_its_pairs_are_counted(shape: AttentionShape) -> None:
    mask = shape.mask(CPU)
    spans = shape.spans()
    expected = torch.zeros_like(mask)
    for span in range(len(spans)):
        for row in range(spans.starts[span], spans.ends[span]):
            expected[row, spans.starts[span] : row + 1] = True
            for start, end in spans.ancestors(span):
                expected[row, start:end] = True
    assert torch.equal(mask, expected)
    assert shape.pairs == int(mask.sum())
    assert shape.flops == 4 * shape.head_dim * shape.heads * int(mask.sum())


def test_the_last_branch_hangs_at_the_end_of_the_trunk() -> None:
    places = AttentionShape(48_000, 62, 60, 32, 8, 128).places
    assert places[-1] == 48_000
    assert (np.diff(places) > 0).all()
