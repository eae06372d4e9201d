"""token_logprob at the size that Liger publishes: hidden 4,096, vocabulary 131,072, 2,048 and 4,096 rows, bfloat16.

Targets: at or ahead of Liger's fused forward where it is installed (it published 3.12 and 6.05 ms on an H100), and less
than 64 MB beside the inputs.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch
from gpu_common import Call, GpuRun, interleaved_seconds, kernel_failures

from trace_fast.bench.measure import peak_extra_bytes
from trace_fast.kernels.token_logprob import token_logprob, why_not

OP, DTYPE = "token_logprob", torch.bfloat16
HIDDEN, VOCABULARY = 4096, 131_072
PUBLISHED = {2048: 3.12e-3, 4096: 6.05e-3}  # Liger on an H100, seconds
LIMIT_BYTES = 64e6
SAMPLE = 32


@torch.no_grad()
def run(run: GpuRun) -> None:
    for rows in PUBLISHED:
        _size(run, rows)


def _size(run: GpuRun, rows: int) -> None:
    case = f"{rows} x {HIDDEN} x {VOCABULARY}, {DTYPE}"
    generator = torch.Generator(run.device).manual_seed(rows)
    hidden = torch.randn(rows, HIDDEN, device=run.device, generator=generator).to(DTYPE)
    weight = (torch.randn(VOCABULARY, HIDDEN, device=run.device, generator=generator) * HIDDEN**-0.5).to(DTYPE)
    targets = torch.randint(VOCABULARY, (rows,), device=run.device, generator=generator)
    truth = _exact(hidden[:SAMPLE], weight, targets[:SAMPLE])
    calls = _calls(run, case, hidden, weight, targets)
    right: dict[str, Call] = {}
    eager_error: float | None = None
    for name, call in calls.items():  # eager is first: it is the measure
        try:
            found = call()
        except kernel_failures() as error:
            run.refuse(OP, case, name, "failed", " ".join(str(error).split())[:300])
            continue
        assert isinstance(found, torch.Tensor)
        error = float((found[:SAMPLE].double() - truth).abs().mean())
        eager_error = error if eager_error is None else eager_error
        # eager rounds each logit to bfloat16; a kernel that keeps them in float32 is off by its sums' rounding only
        allowed = 1.5 * eager_error + 16 * torch.finfo(torch.float32).eps * float(truth.abs().mean())
        positive = name == "triton" and bool((found > 0).any())
        if run.check(OP, case, name, float("inf") if positive else error, allowed):
            right[name] = call
    times = interleaved_seconds(right, run.device, rounds=7)
    flops = 2.0 * rows * HIDDEN * VOCABULARY
    medians, extra = {}, {}
    for name, runs in times.items():
        extra[name] = peak_extra_bytes(right[name], run.device)
        medians[name] = run.speed(OP, case, name, runs, DTYPE, flops=flops, peak_extra_bytes=extra[name])
    if "triton" in medians:
        ours = medians["triton"]
        if "liger" in medians:
            run.target(OP, case, "time of Liger's fused forward over ours", medians["liger"] / ours, 1.0)
        run.target(OP, case, "Liger's published time on an H100 over ours", PUBLISHED[rows] / ours, 1.0)
        run.target(OP, case, "64 MB over extra memory", LIMIT_BYTES / max(extra["triton"] or 0, 1), 1.0)


def _exact(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """float64 log-probabilities, a slice of the vocabulary at a time."""
    logits = torch.cat([hidden.double() @ part.double().T for part in weight.split(16_384)], dim=1)
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


def _calls(
    run: GpuRun, case: str, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> dict[str, Call]:
    found: dict[str, Call] = {
        "eager": lambda: torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None])[:, 0]
    }
    if run.may_run(OP, case, "triton", why_not("triton", device=run.device, dtype=DTYPE)):
        found["triton"] = lambda: token_logprob(hidden, weight, targets, backend="triton")
    if importlib.util.find_spec("liger_kernel") is None:
        run.refuse(OP, case, "liger", "absent", "the package liger-kernel is not installed")
    else:
        loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(reduction="none")
        found["liger"] = lambda: -loss(weight, hidden, targets)
    if importlib.util.find_spec("cut_cross_entropy") is None:
        run.refuse(OP, case, "cut_cross_entropy", "absent", "the package cut-cross-entropy is not installed")
    else:
        cce = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        found["cut_cross_entropy"] = lambda: -cce(hidden, weight, targets, reduction="none")
    return found
