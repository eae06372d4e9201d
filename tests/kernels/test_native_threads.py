"""The C++ ops run on as many threads as torch is told to use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from policy_loss_problems import batch as loss_batch
from policy_loss_problems import run as run_loss
from turn_credit_problems import batch as credit_batch
from turn_credit_problems import run as run_credit

from trace_fast import native
from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.kernels.policy_loss import PolicyLossConfig
from trace_fast.kernels.prefix_attention import plan_attention, prefix_attention
from trace_fast.layout import SpanRanges

pytestmark = pytest.mark.skipif(not native.status().available, reason=f"native module: {native.status().reason}")


def attention() -> None:
    query, key, value = (torch.randn(9, heads, 8) for heads in (4, 2, 2))
    prefix_attention(query, key, value, plan_attention(SpanRanges.single(9), "native"), scale=0.3)


def credit() -> None:
    run_credit(credit_batch(torch.float32, (2, 1), (5, 3)), CreditConfig(), AdvantageConfig(), "native")


def loss() -> None:
    run_loss(loss_batch(torch.float32, (5, 3)), PolicyLossConfig(), "native")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("call", "entry", "argument"),
    [
        (attention, "prefix_attention", -2),
        (credit, "turn_credit", -2),
        (loss, "policy_loss_counts", -1),
        (loss, "policy_loss", -2),
    ],
)
def test_threads_are_those_of_torch(
    call: Any, entry: str, argument: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, seen = native.module(), []
    original = getattr(module, entry)

    def spy(*arguments: Any) -> None:
        seen.append(arguments[argument])
        original(*arguments)

    monkeypatch.setattr(module, entry, spy)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        call()
    finally:
        torch.set_num_threads(before)
    assert seen == [threads]
