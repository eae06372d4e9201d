"""turn_credit of 10,000 rollouts (target: less than 100 microseconds) and policy_loss against the eager form."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from gpu_common import Call, GpuRun, interleaved_seconds

from trace_fast.config import CreditConfig
from trace_fast.kernels.policy_loss import PolicyLossConfig, policy_loss
from trace_fast.kernels.policy_loss import why_not as loss_why_not
from trace_fast.kernels.turn_credit import turn_credit_flat
from trace_fast.kernels.turn_credit import why_not as credit_why_not
from trace_fast.oracle_credit import reference_credit

ROLLOUTS, TURNS = 10_000, 20
TARGET_SECONDS = 100e-6
LOSS_ROLLOUTS, LOSS_TOKENS = 64, 48_000


def run(run: GpuRun) -> None:
    turn_credit(run)
    loss(run)


def turn_credit(run: GpuRun) -> None:
    dtype, case = torch.float32, f"{ROLLOUTS} rollouts of {TURNS} turns"
    states, config = TURNS + 2, CreditConfig()
    rows = (-np.random.default_rng(0).exponential(3.0, (ROLLOUTS, states))).astype(np.float32)
    outcome = torch.linspace(-2, 2, ROLLOUTS, device=run.device)
    arguments = (
        torch.from_numpy(rows.reshape(-1)).to(run.device),
        torch.arange(0, ROLLOUTS * states + 1, states, dtype=torch.int32, device=run.device),
        torch.full((ROLLOUTS,), TURNS, device=run.device),
        outcome,
        config,
    )
    outcomes = outcome.cpu().numpy()
    sample = list(range(0, ROLLOUTS, 97))
    exact = rows.astype(np.float64)
    truth = np.stack([reference_credit(exact[i], TURNS, float(outcomes[i]), config).rewards for i in sample])
    # a log, a weighted mean over the horizon and a product, each of numbers of order 10
    allowed = 10 * 16 * torch.finfo(dtype).eps
    calls: dict[str, Call] = {"reference": lambda: turn_credit_flat(*arguments)}
    for name in ("triton", "cuda"):
        if not run.may_run("turn_credit", case, name, credit_why_not(name, device=run.device, dtype=dtype)):
            continue
        call = partial(turn_credit_flat, *arguments, backend=name, total_turns=ROLLOUTS * TURNS)
        rewards = call().rewards_T.view(ROLLOUTS, TURNS).double().cpu().numpy()[sample]
        if run.check("turn_credit", case, name, float(np.abs(rewards - truth).max()), allowed):
            calls[name] = call
    times = interleaved_seconds(calls, run.device, rounds=20)
    medians = {name: run.speed("turn_credit", case, name, runs, dtype) for name, runs in times.items()}
    fused = {name: seconds for name, seconds in medians.items() if name != "reference"}
    if fused:
        best = min(fused, key=fused.__getitem__)
        run.target("turn_credit", case, f"100 microseconds over our time ({best})", TARGET_SECONDS / fused[best], 1.0)


def loss(run: GpuRun) -> None:
    dtype, n = torch.float32, LOSS_ROLLOUTS * LOSS_TOKENS
    case = f"{LOSS_ROLLOUTS} rollouts of {LOSS_TOKENS} tokens, loss and gradient"
    if not run.may_run("policy_loss", case, "triton", loss_why_not("triton", device=run.device, dtype=dtype)):
        return
    generator = torch.Generator(run.device).manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(n, device=run.device, generator=generator)

    old = -draw().abs()
    new, sampler, advantages, mask = old + 0.1 * draw().sign(), old + 0.05 * draw(), draw(), draw() > 0
    cu = torch.arange(0, n + 1, LOSS_TOKENS, dtype=torch.int32, device=run.device)
    config = PolicyLossConfig()

    def step(name: str, to: torch.dtype = dtype) -> torch.Tensor:
        leaf = new.detach().to(to).requires_grad_()
        tensors = (leaf, old.to(to), advantages.to(to), mask, cu, config)
        policy_loss(*tensors, sampler_logprobs_N=sampler.to(to), backend=name).loss.backward()
        assert leaf.grad is not None
        return leaf.grad

    truth = step("reference", torch.float64)
    error = float((step("triton").double() - truth).abs().max())
    if not run.check("policy_loss", case, "triton", error, 64 * torch.finfo(dtype).eps * float(truth.abs().max())):
        return
    calls: dict[str, Call] = {"triton": lambda: step("triton"), "eager": lambda: step("reference")}
    times = interleaved_seconds(calls, run.device, rounds=7)
    medians = {name: run.speed("policy_loss", case, name, runs, dtype) for name, runs in times.items()}
    run.target("policy_loss", case, "time of the eager form over ours", medians["eager"] / medians["triton"], 5.0)
