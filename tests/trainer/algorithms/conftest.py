"""Builders of small rollouts, scores and batches for the tests of the algorithms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from training_rollouts import build_random_rollouts, build_random_scores, build_rollout, build_score

from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore
from trace_fast.trainer.batch import TrainingBatch, training_batch


def split_tokens(values_N: torch.Tensor, batch: TrainingBatch) -> list[list[float]]:
    """Values by rollout."""
    return [values_N[a:b].tolist() for a, b in pairwise(batch.cu_tokens_R1.tolist())]


@pytest.fixture(scope="session")
def make_rollout() -> Callable[..., Rollout]:
    return build_rollout


@pytest.fixture(scope="session")
def make_score() -> Callable[..., RolloutScore]:
    return build_score


@pytest.fixture(scope="session")
def random_rollouts() -> Callable[..., list[Rollout]]:
    return build_random_rollouts


@pytest.fixture(scope="session")
def random_batch() -> Callable[..., TrainingBatch]:
    """A scored batch of random rollouts, with old log-probabilities near the sampler's."""

    def build(
        seed: int = 0, group_sizes: Sequence[int] = (4, 1, 3, 5), dtype: torch.dtype = torch.float64
    ) -> TrainingBatch:
        rollouts = build_random_rollouts(seed, group_sizes)
        batch = training_batch(rollouts, build_random_scores(rollouts, seed), dtype=dtype)
        noise_N = torch.randn(batch.input_ids_N.numel(), generator=torch.Generator().manual_seed(seed)).to(dtype)
        return batch.with_old_logprobs((batch.sampler_logprobs_N + 0.3 * noise_N).clamp(max=0))

    return build


@pytest.fixture(scope="session")
def by_rollout() -> Callable[[torch.Tensor, TrainingBatch], list[list[float]]]:
    return split_tokens
