"""No op asks for a number of a tensor on its way: on a GPU that would wait for the device, and break a captured graph.

The ops' own bodies run on the CPU under a mode that raises at the operators that hand a number (or a shape that depends
on numbers) to the host; Triton's do so in its interpreter, in a process of their own. The calls of token_logprob, whose
checks read CPU tensors, run on torch's meta device, which holds no numbers.

What may look: the checks of contents of CPU tensors, ``reference`` (the oracle), torch's tiles of prefix_attention
(they look for broken keys), ``turn_credit`` without ``total_turns``, and making a plan.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_loss_problems import batch as loss_batch
from span_trees import tree
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from turn_credit_problems import batch as credit_batch
from turn_credit_problems import run as run_credit

from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.kernels.policy_loss import PolicyLossConfig, policy_loss
from trace_fast.kernels.policy_loss import why_not as loss_why_not
from trace_fast.kernels.prefix_attention import plan_attention, prefix_attention
from trace_fast.kernels.prefix_attention import why_not as attention_why_not
from trace_fast.kernels.token_logprob import segment_mean_logprob, token_logprob, torch_impl
from trace_fast.kernels.token_logprob.problem import Problem
from trace_fast.kernels.turn_credit import why_not as credit_why_not

CPU = torch.device("cpu")
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)"
)
ATEN = torch.ops.aten
LOOKS = {
    ATEN._local_scalar_dense.default,
    ATEN.equal.default,
    ATEN.is_nonzero.default,
    ATEN.masked_select.default,
    ATEN.nonzero.default,
}
INDEXING = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default}


class LookError(Exception):
    """The host asked for a number of a tensor."""


class NoHostValues(TorchDispatchMode):
    """Raises where the host asks for a number; enters the bodies of this project's own operators, and lists them."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        by_mask = func in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1])
        unsized = func == ATEN.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if func in LOOKS or by_mask or unsized:
            raise LookError(f"{func} asks for a number on the host")
        if func.namespace != "trace_fast":
            return func(*args, **kwargs)
        self.entered.append(func._schema.name.removeprefix("trace_fast::"))
        with self:
            return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)


# --- bodies, on the CPU --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("look", [lambda x: x.item(), lambda x: x[x > 0], lambda x: (x > 0).nonzero(), bool])
def test_the_mode_notices_a_look(look: Any) -> None:
    value = torch.ones(1)
    with NoHostValues(), pytest.raises(LookError, match="asks for a number on the host"):
        look(value)


@pytest.mark.skipif(credit_why_not("native", device=CPU, dtype=torch.float32) is not None, reason="not built")
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
def test_turn_credit_with_total_turns(offsets: torch.dtype) -> None:
    tensors = credit_batch(torch.float32)
    tensors |= {name: tensors[name].to(offsets) for name in ("cu_states_R1", "cu_tokens_R1")}
    turns = int(tensors["n_turns_R"].sum())
    with NoHostValues() as mode:
        run_credit(tensors, CreditConfig(), AdvantageConfig(), "native", total_turns=turns)
    assert mode.entered == ["turn_credit_native"]
    with NoHostValues(), pytest.raises(LookError, match="asks for a number"):
        run_credit(tensors, CreditConfig(), AdvantageConfig(), "native")


@pytest.mark.skipif(loss_why_not("native", device=CPU, dtype=torch.float32) is not None, reason="not built")
def test_policy_loss() -> None:
    made = loss_batch(torch.float32)
    leaf = made.logprobs_N.clone().requires_grad_()
    with NoHostValues() as mode:
        arguments = (leaf, made.old_logprobs_N, made.advantages_N, made.mask_N, made.cu_tokens_R1, PolicyLossConfig())
        loss = policy_loss(*arguments, sampler_logprobs_N=made.sampler_logprobs_N, backend="native").loss
        loss.backward()
    assert mode.entered == ["policy_loss_native"]


@pytest.mark.skipif(attention_why_not("native", device=CPU, dtype=torch.float32) is not None, reason="not built")
def test_prefix_attention_with_a_plan() -> None:
    spans = tree(1)
    plan = plan_attention(spans, "native")
    query, key, value = (torch.randn(spans.n_rows, h, 32) for h in (4, 2, 2))
    with NoHostValues() as mode:
        prefix_attention(query, key, value, plan, scale=0.3, window=7, return_lse=True)
    assert mode.entered == ["prefix_attention_native"]


def test_token_logprob_in_chunks() -> None:
    hidden, weight, targets = torch.randn(20, 16), torch.randn(300, 16), torch.randint(300, (20,))
    problem, starts_S = Problem(hidden, weight, targets, None, 30.0, 1.0, 0.7), torch.tensor([0, 3, 20])
    with NoHostValues():
        scored = torch_impl.score(problem, starts_S=starts_S, ignore_index=-1, entropy=True)
    assert scored.mean_S is not None
    assert (scored.mean_S < 0).all()


def bodies_of_triton() -> None:
    """Run by the test below in Triton's interpreter."""
    from trace_fast.kernels.prefix_attention.triton_impl import TritonPlan

    spans = tree(1)
    plan = TritonPlan(spans)
    tensors = [torch.randn(spans.n_rows, h, 32) for h in (4, 2, 2)]
    prefix_attention(*tensors, plan, scale=0.3)
    credit = credit_batch(torch.float32)
    states = [credit[k] for k in ("mean_logprobs_S", "cu_states_R1", "n_turns_R", "outcome_advantages_R")]
    tokens = [credit[k] for k in ("boundaries_S", "loss_mask_N", "cu_tokens_R1", "group_ids_R")]
    turns = int(credit["n_turns_R"].sum())
    assert credit_why_not("triton", device=CPU, dtype=torch.float32) is None
    with NoHostValues() as mode:
        prefix_attention(*tensors, plan, scale=0.3)
        torch.ops.trace_fast.turn_credit_triton(
            *states, *tokens, turns, 3, 0.8, 0.1, 2.0, "log_ratio", True, 1.0, 0.2, "group_mean", 0.05
        )
    print(*mode.entered)


@NEEDS_TRITON
def test_the_bodies_of_triton() -> None:
    program = "import test_no_host_values as t; t.bodies_of_triton()"
    here = Path(__file__).parent
    paths = [str(here), str(here.parent)]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.split() == ["prefix_attention_triton", "turn_credit_triton"]


# --- public calls, on a device without numbers ---------------------------------------------------------------------


def test_calls_of_token_logprob() -> None:
    with torch.device("meta"):
        hidden, weight, targets = torch.randn(20, 16), torch.randn(300, 16), torch.randint(300, (20,))
        logprobs = token_logprob(hidden, weight, targets, ignore_index=-1)
        means, _ = segment_mean_logprob(hidden, weight, targets, torch.zeros(4, dtype=torch.int64))
    assert (logprobs.shape, means.shape) == ((20,), (3,))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        means.max().item()
