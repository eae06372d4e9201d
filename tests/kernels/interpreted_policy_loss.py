"""policy_loss's Triton kernels in Triton's interpreter (run with TRITON_INTERPRET=1, by ``test_triton.py``)."""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
import torch
from derivative_refusals import expect_first_order_only, expect_no_forward_mode
from policy_loss_problems import CONFIGS, UNIT, batch, by_hand, check_metrics, run

from trace_fast.errors import TraceFastError
from trace_fast.kernels.policy_loss import BatchCounts, PolicyLossConfig, why_not
from trace_fast.kernels.policy_loss import policy_loss as policy_loss_op
from trace_fast.kernels.policy_loss.triton_impl import policy_loss

pytestmark = pytest.mark.usefixtures("poisoned_memory")
LENGTHS = (5, 0, 300, 1, 700, 63, 2)


def test_this_is_the_interpreter() -> None:
    assert why_not("triton", device=torch.device("cpu"), dtype=torch.float32) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_error_is_that_of_eager_and_the_rounding_of_its_sums(dtype: torch.dtype, config: PolicyLossConfig) -> None:
    """Slack: a token's gradient has an exponential each for ratio and weight and four products (8 units); a program's
    sum adds blocks one after the other and 512 lanes pairwise, together below 64 units of the terms' size."""
    problem = batch(dtype, LENGTHS)
    loss, grad, metrics = by_hand(problem, config)
    wanted = torch.from_numpy(grad)
    eager, eager_grad = run(problem, config, "reference")
    result, got = run(problem, config, "triton")
    assert result.loss.dtype == dtype
    error = (got.double() - wanted).abs().max()
    assert error <= (eager_grad.double() - wanted).abs().max() + 8 * UNIT[dtype] * wanted.abs().max()
    assert (got[~problem.mask_N] == 0).all()
    terms = float(wanted.abs().sum()) + abs(loss)
    allowed = abs(float(eager.loss.detach()) - loss) + 64 * UNIT[dtype] * terms
    assert abs(float(result.loss.detach()) - loss) <= allowed
    check_metrics(result.metrics, metrics, UNIT[dtype], exact_quantiles=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["paper", "gspo tis"])
def test_a_repetition_gives_the_same_bits(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trace_fast.kernels.policy_loss.triton_impl.TOKENS_A_PROGRAM", 128)  # four programs a rollout
    problem = batch(dtype, (70, 0, 1500, 1), kept=0.9)
    (first, grad), (second, again) = (run(problem, CONFIGS[name], "triton") for _ in range(2))
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(grad, again)
    for field in fields(first.metrics):
        assert torch.equal(getattr(first.metrics, field.name), getattr(second.metrics, field.name)), field.name


def test_int32_offsets_change_nothing() -> None:
    problem = batch(torch.float32, LENGTHS)
    first, grad = run(problem, PolicyLossConfig(), "triton")
    problem.cu_tokens_R1 = problem.cu_tokens_R1.int()
    second, again = run(problem, PolicyLossConfig(), "triton")
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(grad, again)


@pytest.mark.parametrize("name", ["paper", "dapo", "gspo"])
def test_any_split_into_micro_batches_has_the_same_gradient(name: str) -> None:
    problem, config = batch(torch.float32, LENGTHS), CONFIGS[name]
    _, grad = run(problem, config, "triton")
    cu = problem.cu_tokens_R1.tolist()
    rollouts = sum(bool(problem.mask_N[a:b].any()) for a, b in pairwise(cu))
    counts = BatchCounts(n_tokens=int(problem.mask_N.sum()), n_rollouts=rollouts)
    parts = [run(problem.part(a, b), config, "triton", counts=counts)[1] for a, b in pairwise([0, 3, 4, 7])]
    assert torch.equal(torch.cat(parts), grad)


def test_extreme_ratios_are_no_nan() -> None:
    problem = batch(torch.float32, (4,), kept=1.0)
    problem.logprobs_N[:] = problem.old_logprobs_N + torch.tensor([1000.0, 1000.0, 1000.0, -1000.0])
    problem.advantages_N[:] = torch.tensor([0.0, 1.0, -1.0, 0.0])
    problem.sampler_logprobs_N[:] = problem.old_logprobs_N
    result, grad = run(problem, PolicyLossConfig(), "triton")
    assert float(result.loss.detach()) == pytest.approx((math.exp(20) - 1.28) / 4, rel=1e-5)
    assert grad.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("lengths", [(), (0, 0), (3, 2)])
def test_without_trained_tokens_the_loss_is_0(lengths: tuple[int, ...]) -> None:
    result, grad = run(batch(torch.float32, lengths, kept=0.0), PolicyLossConfig(), "triton")
    assert float(result.loss.detach()) == 0.0
    assert (grad == 0).all()
    assert math.isnan(float(result.metrics.ratio_q50))


def test_bad_contents_are_refused_where_looking_costs_nothing() -> None:
    problem = batch(torch.float32, (3, 2), kept=1.0)
    problem.advantages_N[1] = math.nan
    with pytest.raises(TraceFastError, match=r"advantages_N: expected finite numbers .* got nan at \[1\]"):
        run(problem, PolicyLossConfig(), "triton")


def arguments(**changed: Any) -> tuple[Any, ...]:
    problem = batch(torch.float32, (5, 0, 30), kept=1.0)
    named = {
        "logprobs_N": problem.logprobs_N,
        "old_logprobs_N": problem.old_logprobs_N,
        "sampler_logprobs_N": problem.sampler_logprobs_N,
        "advantages_N": problem.advantages_N,
        "mask_N": problem.mask_N,
        "cu_tokens_R1": problem.cu_tokens_R1,
    } | changed
    return (*named.values(), None, None, None, "token", 0.2, 0.28, 20.0, 2.0, "rollout_mean", None)


def test_a_nan_that_is_not_looked_for_reaches_the_loss() -> None:
    """What a CUDA device gets unchecked: here the op itself, below the checks."""
    advantages = torch.ones(35)
    advantages[7] = math.nan
    loss, grads, _ = policy_loss(*arguments(advantages_N=advantages))
    assert loss.isnan()
    assert grads.isnan().nonzero().flatten().tolist() == [7]
    logprobs = torch.full((35,), -1.0)
    logprobs[9] = math.nan
    assert policy_loss(*arguments(logprobs_N=logprobs))[0].isnan()


def test_wild_offsets_stay_inside() -> None:
    loss, grads, _ = policy_loss(*arguments(cu_tokens_R1=torch.tensor([-40, 3, 20, 90])))
    assert loss.isfinite()
    assert grads.isfinite().all()


def test_custom_op_passes_opcheck() -> None:
    tensors = arguments()
    results = torch.library.opcheck(policy_loss, (tensors[0].requires_grad_(), *tensors[1:]))
    assert set(results.values()) == {"SUCCESS"}


def test_derivatives_that_it_does_not_have_are_refused() -> None:
    old, advantages = -torch.rand(5), torch.randn(5)
    others = (torch.ones(5, dtype=torch.bool), torch.tensor([0, 2, 5]), PolicyLossConfig(tis_cap=None))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return policy_loss_op(x, old, advantages, *others, backend="triton").loss

    expect_no_forward_mode(loss, -torch.rand(5), "triton")
    expect_first_order_only(loss, -torch.rand(5), "triton")
