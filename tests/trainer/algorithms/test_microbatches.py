"""Micro-batches: any split gives the batch's loss and gradient, on any number of ranks. Public failures of losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trace_fast.errors import ConfigError, TraceFastError
from trace_fast.kernels.policy_loss import PolicyLossConfig
from trace_fast.kernels.token_logprob import token_logprob
from trace_fast.rollout import Rollout
from trace_fast.trainer.algorithms import GigpoConfig, GrpoConfig, GspoConfig, TraceConfig, prepare
from trace_fast.trainer.batch import TrainingBatch, training_batch
from trace_fast.trainer.microbatches import MicroBatch, microbatches, pack

MakeRollout = Callable[..., Rollout]
RandomBatch = Callable[..., TrainingBatch]
Config = GrpoConfig | GspoConfig | GigpoConfig | TraceConfig
CONFIGS: dict[str, Config] = {
    "grpo": GrpoConfig(),
    "dapo": GrpoConfig(variant="dapo"),
    "dr_grpo": GrpoConfig.model_validate({"variant": "dr_grpo", "loss": {"divisor": 50}}),
    "gspo": GspoConfig(),
    "gigpo": GigpoConfig(),
    "trace": TraceConfig(),
}
each_algorithm = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
WHOLE = 10_000


class TinyPolicy(torch.nn.Module):
    """Token i+1 is predicted from a mix of the embeddings of tokens 0..i of the rollout, later ones counting more."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.embedding = torch.nn.Parameter(torch.randn(100, 6, generator=random, dtype=torch.float64))
        self.head = torch.nn.Parameter(torch.randn(100, 6, generator=random, dtype=torch.float64))

    def hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        """One rollout's; ``(n, H)``."""
        distance = positions[:, None] - positions[None, :]
        weights = torch.where(distance >= 0, 0.7 ** distance.clamp(min=0).double(), 0.0)
        return weights @ self.embedding[ids]

    def logprobs(self, micro: MicroBatch) -> Tensor:
        spans = pairwise(micro.cu_tokens_R1.tolist())
        hidden_NH = torch.cat([self.hidden(micro.input_ids_N[a:b], micro.positions_N[a:b]) for a, b in spans])
        rows_LH = hidden_NH[micro.rows_L]
        return token_logprob(rows_LH, self.head, micro.targets_L, temperature=micro.temperature, backend="reference")

    def step(self, micros: Sequence[MicroBatch], loss: PolicyLossConfig) -> tuple[float, Tensor]:
        """Summed loss, and the gradients of all parameters as one vector."""
        self.zero_grad()
        total = 0.0
        for micro in micros:
            result = micro.loss(self.logprobs(micro), loss)
            result.loss.backward()
            total += float(result.loss.detach())
        return total, torch.cat([p.grad.flatten() for p in (self.embedding, self.head) if p.grad is not None])


def log_softmax_of_each_token(policy: TinyPolicy, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """``(N,)`` log p(token i | tokens before i), 0 for the first; without any micro-batch."""
    ids = torch.from_numpy(rollout.input_ids)
    hidden = policy.hidden(ids, torch.arange(len(ids)))
    logprobs = torch.log_softmax(hidden @ policy.head.T / temperature, -1)
    return torch.cat((hidden.new_zeros(1), logprobs[:-1].gather(1, ids[1:, None]).squeeze(1))).detach()


def near_policy(batch: TrainingBatch, policy: TinyPolicy) -> TrainingBatch:
    """Old and sampler's log-probabilities within clip distance of the policy's own, some beyond."""
    (whole,) = microbatches(batch.with_advantages(batch.old_logprobs_N), WHOLE)
    random = torch.Generator().manual_seed(1)
    tensors = []
    for spread in (0.3, 0.5):
        own_N = torch.zeros_like(batch.old_logprobs_N)
        noise_L = spread * torch.randn(whole.targets_L.numel(), generator=random, dtype=torch.float64)
        own_N[batch.loss_mask_N] = (policy.logprobs(whole).detach() + noise_L).clamp(max=0)
        tensors.append(own_N)
    return replace(batch, old_logprobs_N=tensors[0], sampler_logprobs_N=tensors[1])


@each_algorithm
def test_any_split_gives_the_same_loss_and_gradient_verl_5625_ms_swift_10117(
    random_batch: RandomBatch, config: Config
) -> None:
    """verl #5625: the token mean depended on micro-batching; ms-swift #10117: accumulation divided once more.

    Sums of the same float64 terms in another order: at most 1e-12 of their size apart.
    """
    policy = TinyPolicy()
    batch = prepare(near_policy(random_batch(2), policy), config)
    loss, gradient = policy.step(microbatches(batch, WHOLE), config.loss)
    assert gradient.abs().max() > 1e-3
    longest = int(batch.cu_tokens_R1.diff().max())
    counts = set()
    for budget in (longest, 2 * longest, 120):
        for n_ranks in (1, 2, 4):
            micros = [m for rank in range(n_ranks) for m in microbatches(batch, budget, rank=rank, n_ranks=n_ranks)]
            counts.add(len(micros))
            split_loss, split_gradient = policy.step(micros, config.loss)
            assert split_loss == pytest.approx(loss, rel=1e-12, abs=1e-13)
            assert (split_gradient - gradient).abs().max() <= 1e-12 * gradient.abs().max()
    assert len(counts) > 2  # the splits were different


@each_algorithm
def test_every_rank_has_as_many_micro_batches_trl_3933(random_batch: RandomBatch, config: Config) -> None:
    """trl #3933: ranks with fewer batches left the others waiting. Fillers are forwarded, and add exactly nothing."""
    policy = TinyPolicy()
    batch = prepare(random_batch(4), config)
    trained = {r for r, count in enumerate(batch.trained_tokens_R.tolist()) if count}
    for n_ranks in (1, 3, 16, 2 * len(trained)):
        shares = [microbatches(batch, 60, rank=rank, n_ranks=n_ranks) for rank in range(n_ranks)]
        assert len({len(share) for share in shares}) == 1
        micros = [micro for share in shares for micro in share]
        real = [micro for micro in micros if micro.targets_L.numel()]
        assert sorted(r for micro in real for r in micro.rollouts) == sorted(trained)
        for filler in (micro for micro in micros if not micro.targets_L.numel()):
            loss, gradient = policy.step([filler], config.loss)
            assert loss == 0
            assert (gradient == 0).all()
            assert filler.input_ids_N.numel() > 0
    assert len(micros) > len(real)


def test_a_micro_batch_by_hand(make_rollout: MakeRollout) -> None:
    """Rollout 1 (prompt 7 8, action 1, observation 5, answer 4) behind rollout 0; rows are one before the targets."""
    batch = training_batch(
        [
            make_rollout("a", [], [3, 4], prompt=[9], reward=1.0, logprob=-0.5),
            make_rollout("b", [([1], [5])], [4], logprob=-2.0),
        ]
    )
    (micro,) = microbatches(prepare(batch, GrpoConfig()), 8)
    assert micro.input_ids_N.tolist() == [9, 3, 4, 7, 8, 1, 5, 4]
    assert micro.positions_N.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert micro.cu_tokens_R1.tolist() == [0, 3, 8]
    assert micro.rows_L.tolist() == [0, 1, 4, 6]
    assert micro.targets_L.tolist() == [3, 4, 1, 4]
    assert micro.old_logprobs_L.tolist() == micro.sampler_logprobs_L.tolist() == [-0.5, -0.5, -2, -2]
    assert micro.advantages_L.tolist() == [1, 1, -1, -1]
    assert micro.cu_trained_R1.tolist() == [0, 2, 4]
    assert (micro.longest, micro.rollouts) == (5, (0, 1))
    assert (micro.counts.n_tokens, micro.counts.n_rollouts) == (4, 2)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), min_size=0, max_size=30),
    st.integers(40, 200),
    st.integers(1, 9),
)
def test_packs_hold_every_rollout_once_within_the_budget(
    rollouts: list[tuple[int, int]], budget: int, n_ranks: int
) -> None:
    lengths, groups = [length for length, _ in rollouts], [group for _, group in rollouts]
    packs = pack(lengths, groups, budget, n_ranks)
    assert sorted(i for members in packs for i in members) == list(range(len(rollouts)))
    assert len(packs) % n_ranks == 0
    sizes = [sum(lengths[i] for i in members) for members in packs]
    assert max(sizes, default=0) <= budget
    assert sizes == sorted(sizes, reverse=True)
    if n_ranks == 1 and all(sum(n for n, other in rollouts if other == g) <= budget for g in groups):
        for g in set(groups):  # a group that fits stays whole
            assert len({p for p, members in enumerate(packs) for i in members if groups[i] == g}) == 1
        # Of any two packs, the later could not be put into the earlier.
        assert all(a + b > budget for i, a in enumerate(sizes) for b in sizes[:i])


def test_packs_by_hand() -> None:
    """Groups that just fill the budget stay whole; a larger one is cut where it ends; ranks may need packs halved."""
    assert pack([20] * 4, [0, 1, 0, 1], 40) == [(0, 2), (1, 3)]
    assert pack([20, 20, 20, 5], [0, 0, 0, 1], 40) == [(0, 1), (2, 3)]
    assert pack([10, 20, 30], [0, 0, 0], 60) == [(0, 1, 2)]
    assert pack([10, 20, 30], [0, 0, 0], 60, n_ranks=2) == [(0, 1), (2,)]
    assert pack([10], [0], 60, n_ranks=3) == [(0,), (), ()]
    assert pack([], [], 60, n_ranks=3) == []


def test_to_another_device_moves_every_tensor(random_batch: RandomBatch) -> None:
    (micro,) = microbatches(prepare(random_batch(), GrpoConfig()), WHOLE)
    moved = micro.to("meta")
    tensors = [v for name in moved.__slots__ if isinstance(v := getattr(moved, name), Tensor)]
    assert len(tensors) == 9
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_what_cannot_be_packed_is_refused(random_batch: RandomBatch) -> None:
    batch = random_batch()
    with pytest.raises(TraceFastError, match="batch: expected advantages"):
        microbatches(batch, 100)
    prepared = prepare(batch, GrpoConfig())
    lengths = batch.cu_tokens_R1.diff()
    name = batch.ids[int((lengths > 20).to(torch.uint8).argmax())]
    with pytest.raises(ConfigError, match=rf"budget: expected at least \d+ tokens .* of rollout '{name}'.*; got 20"):
        microbatches(prepared, 20)
    with pytest.raises(ConfigError, match=r"rank: expected 0\.\.1 of 2 ranks, got 2"):
        microbatches(prepared, 100, rank=2, n_ranks=2)


# --- public failures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_of_their_own_token_and_temperature_prime_rl_1525_trl_4159(
    random_rollouts: Callable[..., list[Rollout]], temperature: float
) -> None:
    """prime-rl #1525: off by one; trl #4159: without the sampling temperature.

    Where the policy in training is the sampler, every ratio and every importance weight is 1, in any pack.
    """
    policy = TinyPolicy()
    rollouts = [
        replace(r, logprobs=log_softmax_of_each_token(policy, r, temperature).numpy()) for r in random_rollouts(6)
    ]
    batch = prepare(training_batch(rollouts, temperature=temperature, dtype=torch.float64), GrpoConfig())
    for micro in microbatches(batch, 90):
        logprobs_L = policy.logprobs(micro)
        torch.testing.assert_close(logprobs_L, micro.sampler_logprobs_L, rtol=2**-23, atol=2**-23)  # float32 records
        metrics = micro.loss(logprobs_L.detach(), PolicyLossConfig()).metrics
        assert float(metrics.ratio_min) == pytest.approx(1, abs=1e-5)
        assert float(metrics.ratio_max) == pytest.approx(1, abs=1e-5)
        other = policy.logprobs(replace(micro, temperature=1.5 * temperature))
        assert (other - micro.sampler_logprobs_L).abs().max() > 0.1


@each_algorithm
def test_tool_tokens_have_no_part_trl_4975_trl_6369(random_batch: RandomBatch, config: Config) -> None:
    """trl #4975: the loss ignored the tool mask; trl #6369: denominators counted masked tokens."""
    policy = TinyPolicy()
    batch = random_batch(5)
    junk_N = torch.where(batch.loss_mask_N, batch.old_logprobs_N, -77.0)
    prepared, other = prepare(batch, config), prepare(batch.with_old_logprobs(junk_N), config)
    (micro,), (same,) = microbatches(prepared, WHOLE), microbatches(other, WHOLE)
    loss, gradient = policy.step([micro], config.loss)
    again, other_gradient = policy.step([same], config.loss)
    assert loss == again
    assert torch.equal(gradient, other_gradient)
    trained = int(prepared.loss_mask_N.sum())
    assert micro.targets_L.numel() == micro.counts.n_tokens == trained
    assert trained < prepared.input_ids_N.numel()


def test_longer_observations_do_not_change_the_loss_trl_6369(make_rollout: MakeRollout) -> None:
    """The same actions, their log-probabilities and advantages, beside observations of 1 and of 40 tokens."""
    losses = []
    for length in (1, 40):
        rollouts = [
            make_rollout("a", [([1, 2], [5] * length)], [4], reward=1.0, logprob=-0.9),
            make_rollout("b", [([1], [5])], [4], logprob=-1.1),
        ]
        batch = prepare(training_batch(rollouts, dtype=torch.float64), GrpoConfig(variant="dapo"))
        (micro,) = microbatches(batch, 100)
        losses.append(float(micro.loss(micro.old_logprobs_L + 0.1, PolicyLossConfig(aggregation="token_mean")).loss))
    assert losses[0] == losses[1] != 0


@each_algorithm
def test_extreme_ratios_stay_finite_prime_rl_2084_nemo_rl_4120(random_batch: RandomBatch, config: Config) -> None:
    """prime-rl #2084: 0 · infinity; NeMo-RL #4120: exponential before the mask."""
    batch = random_batch(1, dtype=torch.float32)
    (micro,) = microbatches(prepare(batch.with_old_logprobs(batch.old_logprobs_N - 5000), config), WHOLE)
    logprobs_L = torch.zeros_like(micro.old_logprobs_L).requires_grad_()
    result = micro.loss(logprobs_L, config.loss)
    result.loss.backward()
    assert result.loss.isfinite()
    assert logprobs_L.grad.isfinite().all()
    assert math.isfinite(float(result.metrics.approx_kl))
