"""The ops in graphs that torch.compile turns into C++: one case an op, with its gradient where it has one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from policy_loss_problems import batch as loss_batch
from torch import Tensor
from turn_credit_problems import batch as credit_batch
from turn_credit_problems import run as run_credit

from trace_fast import native
from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.kernels.policy_loss import PolicyLossConfig, policy_loss
from trace_fast.kernels.prefix_attention import plan_attention, prefix_attention
from trace_fast.kernels.token_logprob import token_logprob
from trace_fast.layout import SpanRanges

COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (looked for c++, g++, clang++)")
needs_native = pytest.mark.skipif(not native.status().available, reason=f"native module: {native.status().reason}")
Case = tuple[Callable[[Tensor], Tensor], Tensor]


def attention() -> Case:
    query, key, value = (torch.randn(9, heads, 8) for heads in (4, 2, 2))
    plan = plan_attention(SpanRanges.single(9), "native")
    return lambda x: prefix_attention(x * 2, key, value, plan, scale=0.3).square() + 1, query


def logprob() -> Case:
    hidden, weight, targets = torch.randn(6, 8), torch.randn(40, 8), torch.tensor([0, 39, 5, 7, 7, 1])
    return lambda x: token_logprob(x * 2, weight, targets).square() + 1, hidden


def loss() -> Case:
    problem, config = loss_batch(torch.float32, (5, 0, 30), kept=1.0), PolicyLossConfig(tis_cap=None)
    others = (problem.old_logprobs_N, problem.advantages_N, problem.mask_N, problem.cu_tokens_R1)
    return lambda x: policy_loss(x - 0.125, *others, config, backend="native").loss * 3, problem.logprobs_N


def credit() -> Case:
    tensors, settings = credit_batch(torch.float32, (2, 0, 5), (6, 3, 9)), (CreditConfig(), AdvantageConfig())

    def advantages(scores: Tensor) -> Tensor:
        named = tensors | {"mean_logprobs_S": scores * 2}
        return run_credit(named, *settings, "native", total_turns=7).advantages_N + 1

    return advantages, tensors["mean_logprobs_S"]


@pytest.mark.parametrize(
    ("make", "differentiable"),
    [
        pytest.param(attention, True, marks=needs_native),
        (logprob, True),
        pytest.param(loss, True, marks=needs_native),
        pytest.param(credit, False, marks=needs_native),
    ],
)
def test_compiled_code_gives_what_the_op_gives(
    make: Callable[[], Case], differentiable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operations around the op become C++ of one rounding each here too: a few units, no more."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    function, x = make()
    compiled = torch.compile(function, backend="inductor", fullgraph=True, options={"compile_threads": 1})
    ours, theirs = (x.clone().requires_grad_(differentiable) for _ in range(2))
    found, wanted = compiled(ours), function(theirs)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    if differentiable:
        found.sum().backward()
        wanted.sum().backward()
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
