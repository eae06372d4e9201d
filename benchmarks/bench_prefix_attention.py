"""prefix_attention against torch's SDPA on the same rows: a trunk with 32 or 62 branches of 12 rows.

    python -m pytest -s benchmarks/bench_prefix_attention.py

``sdpa_causal`` is the trunk alone (no branch), ``sdpa_mask`` the same rows under a dense mask. The GEMM rate of the
same run is the roof. Numbers first: error against exact float64 rows no larger than 1.5 times SDPA's in the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from trace_fast.bench.attention_problem import AttentionShape, exact_rows
from trace_fast.bench.measure import gemm_rate
from trace_fast.kernels.prefix_attention import plan_attention, prefix_attention, why_not

SHAPES = {
    "smollm2": AttentionShape(3820, 32, 12, heads=9, kv_heads=3, head_dim=64),
    "smollm2-8k": AttentionShape(8030, 62, 12, heads=9, kv_heads=3, head_dim=64),
    "16-8-128": AttentionShape(3820, 32, 12, heads=16, kv_heads=8, head_dim=128),
}


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """(N, H, D) in and out, one sequence."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["native", "triton", "torch"])
def test_prefix_attention(
    race: Callable[..., dict[str, float]], device: torch.device, name: str, shape: AttentionShape, dtype: torch.dtype
) -> None:
    reason = why_not(name, device=device, dtype=dtype)
    if reason is not None:
        pytest.skip(reason)
    query, key, value = shape.tensors(dtype, device)
    spans = shape.spans()
    plan = plan_attention(spans, name)
    trunk = (query[: shape.trunk], key[: shape.trunk], value[: shape.trunk])
    mask = shape.mask(device)

    def ours() -> torch.Tensor:
        return prefix_attention(query, key, value, plan, scale=shape.head_dim**-0.5)

    def masked() -> torch.Tensor:
        return sdpa(query, key, value, mask)

    rows = shape.sample(64)
    exact = exact_rows(query, key, value, spans, rows)
    error, torchs = ((found[rows].double() - exact).square().mean().sqrt() for found in (ours(), masked()))
    assert error <= 1.5 * torchs + torch.finfo(torch.float32).eps, f"rms error {error:.2e}, SDPA's {torchs:.2e}"
    others = {"sdpa_causal": lambda: sdpa(*trunk, None), "sdpa_mask": masked}
    rate = gemm_rate(dtype, device)
    figures = {"gemm_gflops": rate / 1e9, "flops": shape.flops}
    medians = race("prefix_attention", f"{shape}, {dtype}", (name, ours), others, rounds=5, **figures)
    print(f"  {shape.flops / medians[name] / rate:.0%} of the GEMM rate {rate / 1e9:.0f} GFLOP/s")
