"""Correctness of every Triton and CUDA kernel against float64, at small and odd sizes, forward and backward.

    python benchmarks/gpu_checks.py         also under compute-sanitizer

The bound of a case is what the eager form of the same dtype is off, plus the rounding that a fused kernel adds: of the
probabilities to the input's dtype before the second product, and of sums in another order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from gpu_common import kernel_failures

from trace_fast.bench.attention_problem import AttentionShape
from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.kernels import policy_loss as loss_op
from trace_fast.kernels import prefix_attention as attention_op
from trace_fast.kernels import token_logprob as logprob_op
from trace_fast.kernels import turn_credit as credit_op

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOAT32_EPS = torch.finfo(torch.float32).eps
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """One implementation of an op on one case; ``failure`` is what it raised, ``absent`` why it does not run here."""

    op: str
    implementation: str
    case: str
    error: float = float("nan")
    allowed: float = float("nan")
    failure: str | None = None
    absent: str | None = None

    @property
    def wrong(self) -> bool:
        return self.absent is None and (self.failure is not None or not self.error <= self.allowed)

    def __str__(self) -> str:
        verdict = "absent" if self.absent else "WRONG" if self.wrong else "right"
        told = self.absent or self.failure or f"error {self.error:.2e}, allowed {self.allowed:.2e}"
        return f"{verdict:<7}{self.op} [{self.implementation}] {self.case}: {told}"


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def judge(
    op: str, name: str, case: str, found: Callable[[], Tensors], eager: Tensors, truth: Tensors, slack: float
) -> Check:
    """The worst of several outputs, in units of its bound: 1.5 times the eager error plus ``slack`` of its size."""
    try:
        outputs = found()
    except kernel_failures() as error:
        return Check(op, name, case, failure=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    judged = []
    for output, rough, exact in zip(outputs, eager, truth, strict=True):
        error = rms(output.double() - exact.double())
        allowed = 1.5 * rms(rough.double() - exact.double()) + slack * rms(exact) + torch.finfo(torch.float32).tiny
        judged.append(Check(op, name, case, error, allowed))
    wrong = (check for check in judged if check.wrong)  # a NaN has no order among them
    return next(wrong, max(judged, key=lambda check: check.error / check.allowed))


def attention_checks(device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Check]:
    features = {
        "plain": {},
        "window": {"window": 37},
        "softcap": {"softcap": 5.0},
        "sinks": {"sinks_H": None},
    }
    shapes = [
        AttentionShape(333, 5, 12, 9, 3, 64),
        AttentionShape(1000, 17, 60, 8, 2, 128),
        AttentionShape(129, 3, 1, 4, 4, 32),
        AttentionShape(200, 2, 7, 4, 1, 256),
        AttentionShape(1, 0, 0, 2, 1, 80),
    ]
    for dtype in dtypes:
        for shape in shapes:
            chosen = features if shape.head_dim == 64 else {"plain": {}}
            for feature, settings in chosen.items():
                yield _attention(device, dtype, shape, f"{shape}, {dtype}, {feature}", dict(settings))
        yield _attention(device, dtype, AttentionShape(61, 3, 5, 4, 2, 48), f"no rows in a span, {dtype}", {}, pad=11)


def _attention(
    device: torch.device, dtype: torch.dtype, shape: AttentionShape, case: str, settings: dict, pad: int = 0
) -> Check:
    name = "triton"
    reason = attention_op.why_not(name, device=device, dtype=dtype)
    if reason is not None:
        return Check("prefix_attention", name, case, absent=reason)
    inputs = tuple(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad)) for x in shape.tensors(dtype, device))
    if "sinks_H" in settings:
        settings["sinks_H"] = torch.linspace(-2, 2, shape.heads, device=device)
    spans = shape.spans()
    upstream = torch.linspace(-1, 1, inputs[0].numel(), device=device).view_as(inputs[0])

    def run(backend: str, tensors: Tensors) -> Tensors:
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        options = {k: v.to(leaves[0].dtype) if isinstance(v, torch.Tensor) else v for k, v in settings.items()}
        plan = attention_op.plan_attention(spans, backend)
        out = attention_op.prefix_attention(*leaves, plan, scale=shape.head_dim**-0.5, **options)
        out.backward(upstream.to(out.dtype))
        return (out.detach(), *(leaf.grad for leaf in leaves))

    truth = run("reference", tuple(x.double() for x in inputs))
    # the probabilities, and their gradients, are rounded to the input's dtype; sums run over at most the trunk
    slack = torch.finfo(dtype).eps + 4 * FLOAT32_EPS * shape.rows**0.5
    return judge("prefix_attention", name, case, lambda: run(name, inputs), run("reference", inputs), truth, slack)


def logprob_checks(device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Check]:
    # rows, hidden, vocabulary; logits of ordinary size, all far below zero, and peaked
    cases = [(5, 64, 1000, 1.0, 0.0), (130, 576, 4999, 1.0, -50.0), (17, 128, 2049, 8.0, 0.0), (1, 96, 257, 1.0, 0.0)]
    for dtype in dtypes:
        for rows, hidden_size, vocabulary, spread, shift in cases:
            case = f"{rows} x {hidden_size} x {vocabulary}, spread {spread}, shift {shift}, {dtype}"
            reason = logprob_op.why_not("triton", device=device, dtype=dtype)
            if reason is not None:
                yield Check("token_logprob", "triton", case, absent=reason)
                continue
            generator = torch.Generator(device).manual_seed(rows)
            hidden = torch.randn(rows, hidden_size, device=device, generator=generator).to(dtype)
            weight = torch.randn(vocabulary, hidden_size, device=device, generator=generator) * hidden_size**-0.5
            bias = torch.full((vocabulary,), shift, device=device)
            targets = torch.randint(vocabulary, (rows,), device=device, generator=generator)
            yield _logprob(case, hidden, (spread * weight).to(dtype), bias.to(dtype), targets)


def _logprob(
    case: str, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor
) -> Check:
    def run(backend: str, dtype: torch.dtype) -> Tensors:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
        out = logprob_op.token_logprob(*leaves, targets, bias_V=bias.to(dtype), softcap=30.0, backend=backend)
        out.sum().backward()
        assert not (out > 0).any(), "a log-probability above 0"
        return (out.detach(), *(leaf.grad for leaf in leaves))

    dtype = hidden.dtype
    # gradients leave in the input's dtype, their sums run over rows or vocabulary in float32
    slack = torch.finfo(dtype).eps + 4 * FLOAT32_EPS * len(weight) ** 0.5
    truth = run("reference", torch.float64)
    return judge(
        "token_logprob", "triton", case, lambda: run("triton", dtype), run("reference", dtype), truth, slack
    )


def credit_checks(device: torch.device) -> Iterator[Check]:
    for dtype in (torch.float32, torch.float64):
        yield from _credit(device, dtype)


def _credit(device: torch.device, dtype: torch.dtype) -> Iterator[Check]:
    """Finished and cut-off rollouts of 0 to 128 turns, credit and token advantages."""
    rng = np.random.default_rng(0)
    turns = np.array([0, 1, 61, 3, 20, 0, 7, 128, 2])
    states = turns + 1 + np.array([1, 0, 1, 1, 0, 0, 1, 1, 1])
    tokens = 3 + (states - 1) * 5 + 4
    cu_states, cu_tokens = (
        torch.from_numpy(np.concatenate([[0], np.cumsum(x)]).astype(np.int32)).to(device) for x in (states, tokens)
    )
    scores = torch.from_numpy(-rng.exponential(3.0, states.sum())).to(device, dtype)
    boundaries = torch.from_numpy(np.concatenate([3 + np.arange(s) * 5 for s in states])).to(device)
    outcome = torch.linspace(-2, 2, len(turns), dtype=torch.float64).to(device, dtype)
    mask = torch.from_numpy(rng.random(tokens.sum()) < 0.5).to(device)
    places = (boundaries, cu_states, torch.from_numpy(turns).to(device))
    tail = (mask, cu_tokens, torch.arange(len(turns), device=device) // 3)

    def run(name: str, config: CreditConfig, to: torch.dtype) -> Tensors:
        arguments = (scores.to(to), *places, outcome.to(to), *tail, config, AdvantageConfig())
        result = credit_op.credit_and_advantages(*arguments, backend=name)
        credit = result.credit
        return credit.values_S, credit.deltas_D, credit.rewards_T, result.advantages_N

    for config in (
        CreditConfig(),
        CreditConfig(form="raw", horizon=0),
        CreditConfig(form="linear", horizon=100, normalize_window=False),
    ):
        case = f"{len(turns)} rollouts, {config.form}, K = {config.horizon}, {dtype}"
        truth, eager = run("reference", config, torch.float64), run("reference", config, dtype)
        slack = 16 * torch.finfo(dtype).eps  # a log, a sum over the horizon, a product
        for name in ("triton", "cuda"):
            reason = credit_op.why_not(name, device=device, dtype=dtype)
            if reason is not None:
                yield Check("turn_credit", name, case, absent=reason)
            else:
                yield judge("turn_credit", name, case, partial(run, name, config, dtype), eager, truth, slack)


def loss_checks(device: torch.device) -> Iterator[Check]:
    for dtype in (torch.float32, torch.float64):
        yield from _loss(device, dtype)


def _loss(device: torch.device, dtype: torch.dtype) -> Iterator[Check]:
    """Rollouts of 0, 1 and thousands of tokens, half of them trained."""
    n, offsets = 5000, [0, 1, 1, 700, 4999, 5000]
    configs = {
        "paper": loss_op.PolicyLossConfig(),
        "dapo": loss_op.PolicyLossConfig.dapo(tis_cap=2.0),
        "gspo": loss_op.PolicyLossConfig(ratio="sequence", clip_low=3e-4, clip_high=4e-4),
    }
    generator = torch.Generator().manual_seed(0)
    old, drift, sampler, advantages = (torch.randn(n, generator=generator) for _ in range(4))
    mask = (torch.rand(n, generator=generator) < 0.5).to(device)
    cu = torch.tensor(offsets, dtype=torch.int32, device=device)
    # token log ratios of one size, away from a clip's edge: there a gradient jumps with the last bit
    tensors = (-old.abs(), -old.abs() + 0.1 * drift.sign(), -old.abs() + 0.05 * sampler, advantages)
    given = [x.to(device, dtype) for x in tensors]

    def run(name: str, config: loss_op.PolicyLossConfig, to: torch.dtype) -> Tensors:
        old_N, new_N, sampler_N, advantages_N = (x.detach().to(to) for x in given)
        new_N = new_N.clone().requires_grad_()
        arguments = (new_N, old_N, advantages_N, mask, cu, config)
        loss = loss_op.policy_loss(*arguments, sampler_logprobs_N=sampler_N, backend=name).loss
        loss.backward()
        return loss.detach(), new_N.grad

    for label, config in configs.items():
        case = f"{n} tokens, {label}, {dtype}"
        reason = loss_op.why_not("triton", device=device, dtype=dtype)
        if reason is not None:
            yield Check("policy_loss", "triton", case, absent=reason)
            continue
        truth, eager = run("reference", config, torch.float64), run("reference", config, dtype)
        slack = 64 * torch.finfo(dtype).eps  # exponentials, and a sum over all tokens
        yield judge("policy_loss", "triton", case, partial(run, "triton", config, dtype), eager, truth, slack)


def run_checks(device: torch.device, dtypes: Sequence[torch.dtype] = DTYPES) -> list[Check]:
    """All checks; nothing of this stops at the first wrong one."""
    return [
        *attention_checks(device, dtypes),
        *logprob_checks(device, dtypes),
        *credit_checks(device),
        *loss_checks(device),
    ]


def main() -> int:
    if not torch.cuda.is_available():
        print(f"gpu_checks: torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return 2
    checks = run_checks(torch.device("cuda"))
    for check in checks:
        print(check)
    return int(any(check.wrong for check in checks))


if __name__ == "__main__":
    sys.exit(main())
