"""token_logprob against the eager log-softmax of all logits, and fused losses of other libraries where installed.

    python -m pytest -s benchmarks/bench_token_logprob.py

Numbers first: error against float64 no larger than 1.5 times that of the eager form in the same dtype.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import pytest
import torch

from trace_fast.bench.measure import gemm_rate, peak_extra_bytes
from trace_fast.kernels.token_logprob import token_logprob, why_not

# (rows, hidden, vocabulary): answer rows of SmolLM2, and of an 8B model on a GPU
SHAPES = {"cpu": [(496, 576, 49152), (248, 2048, 151936)], "cuda": [(2048, 4096, 131072), (4096, 4096, 131072)]}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Eager = Callable[[], torch.Tensor]


def exact(hidden_MH: torch.Tensor, weight_VH: torch.Tensor, targets_M: torch.Tensor) -> torch.Tensor:
    """In float64, 8 rows at a time."""
    parts = []
    weight_HV = weight_VH.double().T
    for hidden, targets in zip(hidden_MH.split(8), targets_M.split(8), strict=True):
        parts.append(torch.log_softmax(hidden.double() @ weight_HV, -1).gather(1, targets[:, None])[:, 0])
    return torch.cat(parts)


def peers(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> dict[str, Eager]:
    """The eager form, and what is installed of Liger and cut-cross-entropy (both on CUDA only)."""
    found: dict[str, Eager] = {
        "eager": lambda: torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None])[:, 0]
    }
    if hidden.device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(reduction="none")
        found["liger"] = lambda: -loss(weight, hidden, targets)
    if hidden.device.type == "cuda" and importlib.util.find_spec("cut_cross_entropy") is not None:
        linear_cross_entropy = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        found["cut_cross_entropy"] = lambda: -linear_cross_entropy(hidden, weight, targets, reduction="none")
    return found


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES[DEVICE], ids=str)
@pytest.mark.parametrize("name", ["triton", "torch"])
def test_token_logprob(
    race: Callable[..., dict[str, float]],
    device: torch.device,
    name: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    reason = why_not(name, device=device, dtype=dtype)
    if reason is not None:
        pytest.skip(reason)
    rows, hidden_size, vocabulary = shape
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(rows, hidden_size, device=device, generator=generator).to(dtype)
    weight = (torch.randn(vocabulary, hidden_size, device=device, generator=generator) * hidden_size**-0.5).to(dtype)
    targets = torch.randint(vocabulary, (rows,), device=device, generator=generator)

    def ours() -> torch.Tensor:
        return token_logprob(hidden, weight, targets, backend=name)

    others = peers(hidden, weight, targets)
    sample = slice(0, 64)
    truth = exact(hidden[sample], weight, targets[sample])
    found = ours()
    assert (found <= 0).all()
    error, eagers = ((values[sample].double() - truth).abs().mean() for values in (found, others["eager"]()))
    slack = torch.finfo(torch.float32).eps * 16  # of values near -12, summed in float32
    assert error <= 1.5 * eagers + slack, f"mean error {error:.2e}, eager {eagers:.2e}"
    rate = gemm_rate(dtype, device)
    flops = 2.0 * rows * hidden_size * vocabulary
    figures = {"gemm_gflops": rate / 1e9, "flops": flops, "peak_extra_bytes": peak_extra_bytes(ours, device)}
    case = f"{rows} x {hidden_size} x {vocabulary}, {dtype}"
    medians = race("token_logprob", case, (name, ours), others, rounds=3, **figures)
    print(f"  {flops / medians[name] / rate:.0%} of the GEMM rate {rate / 1e9:.0f} GFLOP/s")
