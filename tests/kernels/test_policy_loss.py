"""The policy loss: by hand, against formulas in NumPy, and the failures that others have had in public."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from policy_loss_problems import CONFIGS, UNIT, Batch, batch, by_hand, check_metrics, run
from pydantic import ValidationError

from trace_fast.errors import ConfigError, TraceFastError
from trace_fast.kernels.policy_loss import BatchCounts, PolicyLossConfig, policy_loss, why_not

CPU = torch.device("cpu")
BACKENDS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            why_not(name, device=CPU, dtype=torch.float32) is not None,
            reason=f"{name}: {why_not(name, device=CPU, dtype=torch.float32)}",
        ),
    )
    for name in ("reference", "native")
]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def small(ratios: list[float], advantages: list[float], lengths: list[int]) -> Batch:
    """All tokens trained; the sampler agrees with the old policy."""
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    new = old + torch.tensor(ratios, dtype=torch.float64).log()
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    everything = torch.ones(len(ratios), dtype=torch.bool)
    return Batch(new, old, old.clone(), torch.tensor(advantages).double(), everything, cu)


@each_backend
def test_every_case_of_the_clip_by_hand(backend: str) -> None:
    """clip 0.2 / 0.28, one rollout of six tokens, so each weighs 1/6.

    ratio 1.1, A 2: inside: gain 2.2.      ratio 1.5, A 2: held at 1.28: 2.56, no gradient.
    ratio 1.5, A -2: min(-3, -2.56) = -3.  ratio 0.5, A 2: min(1, 1.6) = 1.
    ratio 0.5, A -2: min(-1, -1.6) = -1.6, no gradient.   A 0: nothing.
    Sum 2.2 + 2.56 - 3 + 1 - 1.6 = 1.16.
    """
    problem = small([1.1, 1.5, 1.5, 0.5, 0.5, 1.5], [2, 2, -2, 2, -2, 0], [6])
    result, grad = run(problem, PolicyLossConfig(), backend)
    assert float(result.loss.detach()) == pytest.approx(-1.16 / 6, rel=1e-14)
    assert grad.tolist() == pytest.approx([-2.2 / 6, 0, 3 / 6, -1 / 6, 0, 0], rel=1e-14)
    assert float(result.metrics.clip_high_fraction) == pytest.approx(1 / 6)
    assert float(result.metrics.clip_low_fraction) == pytest.approx(1 / 6)


@each_backend
def test_aggregations_by_hand(backend: str) -> None:
    """Ratio 1. Rollout 0 has gains 1, 2, 3; rollout 1 has 6 (and rollout 2 no trained token).

    rollout_mean: (2 + 6) / 2 = 4.  token_mean: 12 / 4 = 3.  constant, divisor 10: (0.6 + 0.6) / 2 = 0.6.
    """
    problem = small([1.0] * 5, [1, 2, 3, 6, 9], [3, 1, 1])
    problem.mask_N[4] = False
    for aggregation, divisor, loss in (("rollout_mean", None, 4.0), ("token_mean", None, 3.0), ("constant", 10.0, 0.6)):
        config = PolicyLossConfig.model_validate({"aggregation": aggregation, "divisor": divisor})
        assert float(run(problem, config, backend)[0].loss.detach()) == pytest.approx(-loss, rel=1e-14)


@each_backend
def test_importance_weights_by_hand(backend: str) -> None:
    """The sampler gave a token half, a third of and twice its old probability: weights 2, 2 (of 3), 0.5."""
    problem = small([1.0, 1.0, 1.0], [1, 1, 1], [3])
    problem.sampler_logprobs_N -= torch.tensor([2.0, 3.0, 0.5], dtype=torch.float64).log()
    result, grad = run(problem, PolicyLossConfig(), backend)
    assert float(result.loss.detach()) == pytest.approx(-4.5 / 3, rel=1e-14)
    assert grad.tolist() == pytest.approx([-2 / 3, -2 / 3, -0.5 / 3], rel=1e-14)
    assert float(result.metrics.tis_mean) == pytest.approx(1.5)


@each_backend
def test_sequence_ratio_by_hand(backend: str) -> None:
    """Ratios 2 and 0.5 have mean log 0: ratio 1 for both. Ratios e^0.001 and 1: e^0.0005, above 1 + 4e-4: held."""
    problem = small([2.0, 0.5, math.exp(0.001), 1.0], [1, 3, 2, 2], [2, 2])
    result, grad = run(problem, PolicyLossConfig.gspo(), backend)
    assert float(result.loss.detach()) == pytest.approx(-(2.0 + 2 * 1.0004) / 2, rel=1e-14)
    assert grad.tolist() == pytest.approx([-0.25, -0.75, 0, 0], rel=1e-14)


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_equals_the_formulas_a_token_at_a_time(backend: str, dtype: torch.dtype, config: PolicyLossConfig) -> None:
    """A ratio is off by 4 units (difference of log-probabilities below 8 in size, exponential), a token's gradient by
    four products more, and so is each term of the loss, whose sum over n terms costs up to sqrt(n) units on average."""
    problem = batch(dtype)
    loss, grad, metrics = by_hand(problem, config)
    result, got = run(problem, config, backend)
    assert result.loss.dtype == dtype
    bound = 16 * UNIT[dtype] * abs(grad) + UNIT[dtype] ** 2
    assert (abs(got.double().numpy() - grad) <= bound).all()
    terms = (torch.from_numpy(grad).abs().sum() + abs(loss)).item()
    assert abs(float(result.loss.detach()) - loss) <= 64 * UNIT[dtype] * terms
    check_metrics(result.metrics, metrics, UNIT[dtype], exact_quantiles=backend == "reference")


# --- public failures ------------------------------------------------------------------------------------------------


@each_backend
def test_tool_tokens_have_no_part_trl_4975(backend: str) -> None:
    """trl #4975: the fused loss ignored the tool mask. Whatever a tool wrote, every number stays, bit for bit."""
    problem = batch(torch.float32)
    result, grad = run(problem, PolicyLossConfig(), backend)
    tools = ~problem.mask_N
    other = batch(torch.float32)
    for tensor in (other.logprobs_N, other.old_logprobs_N, other.sampler_logprobs_N, other.advantages_N):
        tensor[tools] = torch.linspace(-50, 0, int(tools.sum()))
    again, other_grad = run(other, PolicyLossConfig(), backend)
    assert torch.equal(result.loss, again.loss)
    assert torch.equal(grad, other_grad)
    assert (grad[tools] == 0).all()
    assert (grad[~tools] != 0).any()


@each_backend
@pytest.mark.parametrize("aggregation", ["rollout_mean", "token_mean"])
def test_denominators_count_trained_tokens_trl_6369(backend: str, aggregation: Any) -> None:
    """trl #6369: the denominator counted masked tokens. Padding a rollout must not change its loss."""
    config = PolicyLossConfig(aggregation=aggregation)
    plain = small([1.1, 0.9, 1.2], [1, 2, 3], [2, 1])
    padded = small([1.1, 7.0, 0.9, 1.2, 5.0, 5.0], [1, 9, 2, 3, 9, 9], [3, 3])
    padded.mask_N[[1, 4, 5]] = False
    first, second = (run(problem, config, backend)[0].loss for problem in (plain, padded))
    assert float(first.detach()) == pytest.approx(float(second.detach()), rel=1e-14)


@each_backend
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_any_split_into_micro_batches_sums_to_the_whole_verl_5625(backend: str, config: PolicyLossConfig) -> None:
    """verl #5625: the token mean depended on micro-batching. Gradients are the same bits, losses the same sum."""
    whole = batch(torch.float32)
    result, grad = run(whole, config, backend)
    n_tokens = int(whole.mask_N.sum())
    cu = whole.cu_tokens_R1.tolist()
    per_rollout = [int(whole.mask_N[a:b].sum()) for a, b in pairwise(cu)]
    counts = BatchCounts(n_tokens=n_tokens, n_rollouts=sum(n > 0 for n in per_rollout))
    for cuts in ([0, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 3, 5, 8]):
        parts = [run(whole.part(a, b), config, backend, counts=counts) for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat([g for _, g in parts]), grad)
        total = sum(float(part.loss.detach().double()) for part, _ in parts)
        assert total == pytest.approx(float(result.loss.detach()), rel=1e-5, abs=1e-6)


@each_backend
def test_a_rollout_split_between_micro_batches_sums_to_the_whole(backend: str) -> None:
    whole = batch(torch.float64, (40,))
    result, grad = run(whole, PolicyLossConfig(), backend)
    total = whole.mask_N.sum().reshape(1)
    halves = []
    for a, b in ((0, 17), (17, 40)):
        tensors = (whole.logprobs_N, whole.old_logprobs_N, whole.sampler_logprobs_N, whole.advantages_N, whole.mask_N)
        part = Batch(*(x[a:b] for x in tensors), torch.tensor([0, b - a]))
        counts = BatchCounts(n_rollouts=torch.tensor(1), tokens_per_rollout_R=total)
        halves.append(run(part, PolicyLossConfig(), backend, counts=counts))
    assert torch.equal(torch.cat([g for _, g in halves]), grad)
    assert sum(float(h.loss.detach()) for h, _ in halves) == pytest.approx(float(result.loss.detach()), rel=1e-13)
    with pytest.raises(TraceFastError, match=r"tokens_per_rollout_R: expected whole rollouts.* at \[0\]"):
        run(part, PolicyLossConfig.gspo(), backend, counts=BatchCounts(tokens_per_rollout_R=total))


@each_backend
def test_a_ratio_beyond_every_number_is_no_nan_prime_rl_2084(backend: str) -> None:
    """prime-rl #2084: 0 · infinity. A log ratio of 1000 beside an advantage of 0, at an upper and a lower clip."""
    problem = small([1.0] * 4, [0, 1, -1, 0], [4])
    problem.logprobs_N[:] = torch.tensor([1000.0, 1000.0, 1000.0, -1000.0])
    problem.sampler_logprobs_N[3] = -900.0  # a weight of exp(899), cut to 2
    result, grad = run(problem, PolicyLossConfig(), backend)
    gains = [0, 1.28, -math.exp(20), 0]
    assert float(result.loss.detach()) == pytest.approx(-sum(gains) / 4, rel=1e-12)
    assert grad.tolist() == [0, 0, 0, 0]  # beyond max_log_ratio nothing pulls
    assert all(math.isfinite(float(getattr(result.metrics, name))) for name in ("approx_kl", "ratio_mean", "tis_mean"))


@each_backend
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e38])
def test_the_mask_comes_before_the_exponential_nemo_rl_4120(backend: str, junk: float) -> None:
    """NeMo-RL #4120: exp before the mask; exp(inf) · 0 is NaN, in the loss and in its gradient."""
    problem = batch(torch.float32)
    for tensor in (problem.logprobs_N, problem.old_logprobs_N, problem.sampler_logprobs_N, problem.advantages_N):
        tensor[~problem.mask_N] = junk
    for config in CONFIGS.values():
        result, grad = run(problem, config, backend)
        assert result.loss.isfinite()
        assert grad.isfinite().all()
        assert (grad[~problem.mask_N] == 0).all()


# --- edges and what is refused --------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (3,)])
def test_without_trained_tokens_the_loss_is_0_and_metrics_are_unknown(backend: str, lengths: tuple[int, ...]) -> None:
    problem = batch(torch.float32, lengths, kept=0.0)
    for config in CONFIGS.values():
        result, grad = run(problem, config, backend)
        assert float(result.loss.detach()) == 0.0
        assert (grad == 0).all()
        assert float(result.metrics.n_tokens) == 0
        assert math.isnan(float(result.metrics.ratio_mean))
        assert math.isnan(float(result.metrics.ratio_q50))


def good(**changed: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "logprobs_N": torch.tensor([-1.0, -2.0, -3.0]),
        "old_logprobs_N": torch.tensor([-1.5, -2.0, -3.0]),
        "advantages_N": torch.tensor([1.0, 0.5, -1.0]),
        "mask_N": torch.tensor([True, True, False]),
        "cu_tokens_R1": torch.tensor([0, 1, 3]),
        "config": PolicyLossConfig(),
        "sampler_logprobs_N": torch.tensor([-1.0, -2.0, -3.0]),
    }
    return arguments | changed


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"logprobs_N": [-1.0]}, "logprobs_N: expected a torch.Tensor, got list"),
    ({"logprobs_N": torch.zeros(3, 1)}, r"logprobs_N: expected a flat tensor .* got shape \(3, 1\)"),
    ({"logprobs_N": torch.zeros(3).bfloat16()}, "logprobs_N: expected torch.float32 or .*, got torch.bfloat16"),
    ({"old_logprobs_N": torch.zeros(3).double()}, "old_logprobs_N: expected torch.float32, got torch.float64"),
    ({"old_logprobs_N": torch.zeros(6)[::2]}, r"old_logprobs_N: expected a contiguous tensor, got strides \(2,\)"),
    ({"old_logprobs_N": torch.zeros(3).to("meta")}, "old_logprobs_N: expected a tensor on cpu .* got meta"),
    ({"advantages_N": torch.zeros(2)}, "advantages_N: expected 3 entries, got 2"),
    ({"mask_N": torch.ones(3)}, "mask_N: expected torch.bool, got torch.float32"),
    ({"cu_tokens_R1": torch.tensor([0.0, 3.0])}, "cu_tokens_R1: expected torch.int32 or .*, got torch.float32"),
    ({"cu_tokens_R1": torch.zeros(0, dtype=torch.int64)}, r"cu_tokens_R1: expected R\+1 .* got an empty tensor"),
    ({"cu_tokens_R1": torch.tensor([1, 3])}, "cu_tokens_R1: expected 0 as first offset, got 1"),
    ({"cu_tokens_R1": torch.tensor([0, 4, 3])}, r"cu_tokens_R1: expected offsets that .* got 4 then 3 at \[1\]"),
    ({"cu_tokens_R1": torch.tensor([0, 2])}, r"cu_tokens_R1: expected 3 as last offset \(.*\), got 2"),
    ({"logprobs_N": torch.tensor([-1.0, math.nan, 0])}, r"logprobs_N: expected finite .* is set, got nan at \[1\]"),
    ({"old_logprobs_N": torch.tensor([-math.inf, 0, 0])}, r"old_logprobs_N: expected finite .* got -inf at \[0\]"),
    ({"sampler_logprobs_N": torch.tensor([0, math.inf, 0])}, r"sampler_logprobs_N: expected .* got inf at \[1\]"),
    ({"advantages_N": torch.tensor([0, math.nan, 0])}, r"advantages_N: expected finite .* got nan at \[1\]"),
    ({"sampler_logprobs_N": None}, "sampler_logprobs_N: expected the sampler's .* got none with tis_cap 2.0"),
    ({"config": PolicyLossConfig.grpo()}, "sampler_logprobs_N: expected .* none without, got some with tis_cap None"),
    ({"counts": BatchCounts(n_tokens=1)}, "n_tokens: expected at least the 2 trained tokens here, got 1"),
    ({"counts": BatchCounts(n_rollouts=1)}, "n_rollouts: expected at least the 2 rollouts .* got 1"),
    ({"counts": BatchCounts(n_rollouts=torch.ones(1))}, "n_rollouts: expected an integer .* got torch.float32"),
    ({"counts": BatchCounts(tokens_per_rollout_R=torch.tensor([1]))}, "tokens_per_rollout_R: expected 2 .* got 1"),
    ({"counts": BatchCounts(tokens_per_rollout_R=torch.tensor([1, 0]))}, r"tokens_per_rollout_R: .* got 0 at \[1\]"),
]


@each_backend
@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_bad_arguments_are_named(backend: str, changed: dict[str, Any], message: str) -> None:
    assert policy_loss(**good(), backend=backend).loss.isfinite()
    with pytest.raises(TraceFastError, match=message):
        policy_loss(**good(**changed), backend=backend)


def test_an_explicit_choice_runs_or_raises() -> None:
    with pytest.raises(ConfigError, match="backend 'cuda' cannot run: expected one of reference, native, triton"):
        policy_loss(**good(), backend="cuda")
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in good().items()}
    with pytest.raises(ConfigError, match="backend 'native' cannot run: the C\\+\\+ code runs on the CPU, got meta"):
        policy_loss(**meta, backend="native")


def test_paper_defaults_and_refused_settings() -> None:
    config = PolicyLossConfig()
    assert (config.clip_low, config.clip_high, config.tis_cap, config.aggregation) == (0.20, 0.28, 2.0, "rollout_mean")
    gspo = PolicyLossConfig.gspo()
    assert (gspo.ratio, gspo.clip_low, gspo.clip_high, gspo.max_log_ratio) == ("sequence", 3e-4, 4e-4, 10.0)
    for settings, message in (
        ({"clip": 0.2}, "Extra inputs are not permitted"),
        ({"clip_low": -0.1}, "greater than or equal to 0"),
        ({"aggregation": "constant"}, "divisor: expected a number with aggregation 'constant'"),
        ({"divisor": 3.0}, "divisor: .* None otherwise, got 3.0 with 'rollout_mean'"),
        ({"tis_cap": math.inf}, "finite number"),
    ):
        with pytest.raises(ValidationError, match=message):
            PolicyLossConfig.model_validate(settings)
