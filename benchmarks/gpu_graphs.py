"""What a serving or training loop relies on: an op neither waits for the device nor is bound to the tensors' values.

Every op runs once more with torch told to raise where the host waits, is captured into a CUDA graph, and replayed on
other values in the same memory: the result is that of an ordinary call, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from gpu_checks import Check, Tensors, rms
from gpu_common import kernel_failures

from trace_fast.bench.attention_problem import AttentionShape
from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.kernels import policy_loss as loss_op
from trace_fast.kernels import prefix_attention as attention_op
from trace_fast.kernels import token_logprob as logprob_op
from trace_fast.kernels import turn_credit as credit_op

Call = Callable[..., Tensors]
_WARM_UPS = 3


def graph_checks(device: torch.device) -> Iterator[Check]:
    """A check an op and implementation; ``absent`` where there is no CUDA device."""
    shape = AttentionShape(300, 5, 20, 8, 2, 64)
    tensors = tuple(shape.tensors(torch.bfloat16, device))
    spans = shape.spans()

    def attend(*given: torch.Tensor) -> Tensors:
        return (attention_op.prefix_attention(*given, plan, scale=shape.head_dim**-0.5),)

    reason = attention_op.why_not("triton", device=device, dtype=torch.bfloat16)
    if reason is None:
        plan = attention_op.plan_attention(spans, "triton")
    yield _check("prefix_attention", "triton", attend, tensors, reason)

    generator = torch.Generator(device).manual_seed(0)
    hidden, weight = (torch.randn(n, 128, device=device, generator=generator) for n in (130, 4999))
    targets = torch.randint(4999, (130,), device=device, generator=generator)
    reason = logprob_op.why_not("triton", device=device, dtype=torch.bfloat16)
    yield _check(
        "token_logprob",
        "triton",
        lambda h, w: (logprob_op.token_logprob(h, w, targets, backend="triton"),),
        (hidden.bfloat16(), weight.bfloat16()),
        reason,
    )

    states, tokens = torch.tensor([0, 4, 6, 67]), torch.tensor([0, 90, 130, 900])
    boundaries = torch.cat([3 + 5 * torch.arange(n) for n in states.diff().tolist()]).to(device)
    turns = (states.diff() - 2).to(device)
    n_turns = int(turns.sum())
    outcome = torch.linspace(-2, 2, 3, device=device)
    mask = (torch.arange(900) % 2 == 0).to(device)
    groups = torch.zeros(3, dtype=torch.int64, device=device)
    cu_states, cu_tokens = (cu.to(device, torch.int32) for cu in (states, tokens))

    for name in ("triton", "cuda"):

        def credit(scores: torch.Tensor, name: str = name) -> Tensors:
            result = credit_op.credit_and_advantages(
                scores,
                boundaries,
                cu_states,
                turns,
                outcome,
                mask,
                cu_tokens,
                groups,
                CreditConfig(),
                AdvantageConfig(),
                backend=name,
                total_turns=n_turns,
            )
            return result.credit.rewards_T, result.advantages_N

        reason = credit_op.why_not(name, device=device, dtype=torch.float32)
        scores = -torch.rand(67, device=device, generator=generator)
        yield _check("turn_credit", name, credit, (scores,), reason)

    new, old, sampler, advantages = (torch.randn(900, device=device, generator=generator) for _ in range(4))
    reason = loss_op.why_not("triton", device=device, dtype=torch.float32)

    def loss(*given: torch.Tensor) -> Tensors:
        new_N, old_N, sampler_N, advantages_N = given
        arguments = (new_N, old_N, advantages_N, mask, cu_tokens, loss_op.PolicyLossConfig())
        return (loss_op.policy_loss(*arguments, sampler_logprobs_N=sampler_N, backend="triton").loss,)

    yield _check("policy_loss", "triton", loss, (-new.abs(), -old.abs(), -sampler.abs(), advantages), reason)


def _check(op: str, name: str, call: Call, inputs: Tensors, reason: str | None) -> Check:
    case = "no wait for the device, and a CUDA graph on other values"
    if reason is not None:
        return Check(op, name, case, absent=reason)
    if inputs[0].device.type != "cuda":
        return Check(op, name, case, absent="a CUDA graph needs a CUDA device")
    try:
        return Check(op, name, case, _replayed(call, inputs), 0.0)
    except kernel_failures() as error:
        return Check(op, name, case, failure=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _replayed(call: Call, inputs: Tensors) -> float:
    """How far a replay is from an ordinary call on the same values."""
    held = tuple(x.clone() for x in inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):  # compiles, and tunes nothing inside the capture
            call(*held)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(*held)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call(*held)
    for x in held:
        x.copy_(0.75 * x)
    graph.replay()
    return max(rms(output.double() - wanted.double()) for output, wanted in zip(outputs, call(*held), strict=True))
