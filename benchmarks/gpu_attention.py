"""Attention of a 48k trunk with 62 branches of 60 rows against the best trunk-only attention and FlexAttention.

Targets: the whole pack in at most 1 / 0.9 of the time of the fastest trunk alone, and 1.5 times faster than
FlexAttention on the same mask.
"""

from __future__ import annotations

import importlib
import importlib.util

import numpy as np
import torch
import torch.nn.functional as F
from gpu_common import Call, GpuRun, interleaved_seconds, kernel_failures
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from trace_fast.bench.attention_problem import AttentionShape, exact_rows
from trace_fast.kernels.prefix_attention import plan_attention, prefix_attention, why_not

SHAPE = AttentionShape(48_000, 62, 60, heads=32, kv_heads=8, head_dim=128)
DTYPE = torch.bfloat16
OP = "prefix_attention"
# Of 64 exact rows, in rms: probabilities are rounded to bfloat16 by every kernel here, and so is the output.
RELATIVE_ERROR = 2.0 * torch.finfo(DTYPE).eps


def run(run: GpuRun) -> None:
    """Rows of every engine that runs here, then the two targets."""
    tensors = SHAPE.tensors(DTYPE, run.device)
    trunk = tuple(x[: SHAPE.trunk] for x in tensors)
    rows = SHAPE.sample(64)
    exact = exact_rows(*tensors, SHAPE.spans(), rows)
    ours = _ours(run, tensors)
    whole = {"triton": ours} if ours is not None else {}
    whole |= _flex(tensors)
    right = _right(run, whole, rows, exact)
    of_trunk = rows < SHAPE.trunk
    alone = _right(run, _trunk_engines(run, trunk), rows[of_trunk], exact[torch.as_tensor(of_trunk)])
    times = interleaved_seconds({**right, **alone}, run.device, rounds=5)
    medians = {
        name: run.speed(OP, str(SHAPE), name, runs, DTYPE, flops=SHAPE.flops if name in right else SHAPE.trunk_flops)
        for name, runs in times.items()
    }
    if "triton" in right and alone:
        best = min(alone, key=lambda name: medians[name])
        ratio = medians[best] / medians["triton"]
        run.target(OP, str(SHAPE), f"time of the best trunk-only attention ({best}) over ours", ratio, 0.9)
    if {"triton", "flex_attention"} <= right.keys():
        ratio = medians["flex_attention"] / medians["triton"]
        run.target(OP, str(SHAPE), "time of FlexAttention over ours", ratio, 1.5)


def _ours(run: GpuRun, tensors: tuple[torch.Tensor, ...]) -> Call | None:
    if not run.may_run(OP, str(SHAPE), "triton", why_not("triton", device=run.device, dtype=DTYPE)):
        return None
    plan = plan_attention(SHAPE.spans(), "triton")
    return lambda: prefix_attention(*tensors, plan, scale=SHAPE.head_dim**-0.5)


def _flex(tensors: tuple[torch.Tensor, ...]) -> dict[str, Call]:
    """FlexAttention, compiled; its block mask is made once and not timed, which favours it."""
    owner, reach = (torch.as_tensor(x, device=tensors[0].device) for x in SHAPE.owner_and_reach())

    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return ((owner[q] == owner[k]) & (q >= k)) | ((owner[k] < 0) & (k < reach[q]))

    compiled = torch.compile(flex_attention)
    query, key, value = (x.transpose(0, 1)[None] for x in tensors)
    masks: list[object] = []

    def call() -> torch.Tensor:
        if not masks:
            masks.append(create_block_mask(visible, None, None, SHAPE.rows, SHAPE.rows, query.device, _compile=True))
        return compiled(query, key, value, block_mask=masks[0], enable_gqa=True)[0].transpose(0, 1)

    return {"flex_attention": call}


def _trunk_engines(run: GpuRun, trunk: tuple[torch.Tensor, ...]) -> dict[str, Call]:
    query, key, value = (x.transpose(0, 1)[None] for x in trunk)

    def sdpa(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    found: dict[str, Call] = {
        "sdpa_flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
        "sdpa_cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
    }
    for name, package in (("flash_attn", "flash_attn"), ("flash_attn_3", "flash_attn_interface")):
        if importlib.util.find_spec(package) is None:
            run.refuse(OP, str(SHAPE), name, "absent", f"the package {package} is not installed")
            continue
        function = importlib.import_module(package).flash_attn_func
        found[name] = lambda f=function: _first(f(*(x[None] for x in trunk), causal=True))[0]
    return found


def _first(result: object) -> torch.Tensor:
    """Some versions return the log-sum-exp too."""
    out = result[0] if isinstance(result, tuple) else result
    assert isinstance(out, torch.Tensor)
    return out


def _right(run: GpuRun, calls: dict[str, Call], rows: np.ndarray, exact: torch.Tensor) -> dict[str, Call]:
    """Those whose sampled rows are right."""
    found = {}
    bound = RELATIVE_ERROR * float(exact.square().mean().sqrt())
    for name, call in calls.items():
        try:
            out = call()
        except kernel_failures() as error:
            own = name == "triton"
            run.refuse(OP, str(SHAPE), name, "failed" if own else "absent", " ".join(str(error).split())[:300])
            continue
        assert isinstance(out, torch.Tensor)
        error = float((out[torch.as_tensor(rows, device=out.device)].double() - exact).square().mean().sqrt())
        if run.check(OP, str(SHAPE), name, error, bound):
            found[name] = call
    return found
