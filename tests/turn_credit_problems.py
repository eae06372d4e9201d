"""Batches for the tests of turn_credit's implementations, their truth in float64, and the error that is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.kernels.turn_credit import CreditAndAdvantages, credit_and_advantages

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
ODD_TURNS = (0, 1, 61, 3, 130, 0, 20)
ODD_TOKENS = (0, 7, 3000, 1, 1030, 5, 40)
SETTINGS: dict[str, Any] = {  # as the native module takes them, in the order of the custom ops
    "horizon": 3,
    "discount": 0.8,
    "gap_offset": 0.1,
    "terminal_scale": 2.0,
    "form": "log_ratio",
    "normalize_window": True,
    "alpha_out": 1.0,
    "alpha_turn": 0.2,
    "answer_tail": "group_mean",
    "answer_tail_scale": 0.05,
}


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def batch(
    dtype: torch.dtype,
    turns: Sequence[int] = ODD_TURNS,
    tokens: Sequence[int] = ODD_TOKENS,
    seed: int = 0,
    integers: torch.dtype = torch.int64,
) -> dict[str, Any]:
    """The tensors of ``credit_and_advantages``; every second rollout is finished, groups lie scattered."""
    random = torch.Generator().manual_seed(seed)
    states = [t + 1 + i % 2 for i, t in enumerate(turns)]
    scores = -torch.empty(sum(states), dtype=torch.float64).exponential_(1 / 3, generator=random)
    same = torch.rand(len(scores), generator=random) < 0.1
    scores[1:] = torch.where(same[1:], scores[:-1], scores[1:])  # some scores do not change
    boundaries = [
        torch.randint(0, n + 1, (s,), generator=random).sort().values for n, s in zip(tokens, states, strict=True)
    ]
    return {
        "mean_logprobs_S": scores.to(dtype),
        "boundaries_S": torch.cat([torch.zeros(0, dtype=torch.int64), *boundaries]).to(integers),
        "cu_states_R1": offsets(states),
        "n_turns_R": torch.tensor(turns).to(integers),
        "outcome_advantages_R": torch.randn(len(turns), generator=random, dtype=torch.float64).to(dtype),
        "loss_mask_N": torch.rand(sum(tokens), generator=random) < 0.5,
        "cu_tokens_R1": offsets(tokens),
        "group_ids_R": torch.tensor([(7, -2, 7, 5)[i % 4] for i in range(len(turns))]).to(integers),
    }


def in_float64(tensors: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if v.is_floating_point() else v for k, v in tensors.items()}


def run(
    tensors: dict[str, Any], credit: CreditConfig, advantage: AdvantageConfig, backend: str, **more: Any
) -> CreditAndAdvantages:
    return credit_and_advantages(**tensors, credit=credit, advantage=advantage, backend=backend, **more)


def numbers(result: CreditAndAdvantages) -> dict[str, Tensor]:
    credit = result.credit
    return {
        "values_S": credit.values_S,
        "deltas_D": credit.deltas_D,
        "rewards_T": credit.rewards_T,
        "advantages_N": result.advantages_N,
    }


def size_of_terms(truth: CreditAndAdvantages, tensors: dict[str, Any], credit: CreditConfig) -> float:
    """At least the sum of the magnitudes that go into any one number: what the rounding of a sum is relative to."""
    deltas = truth.credit.deltas_D.abs()
    largest = max((float(deltas[a:b].sum()) for a, b in pairwise(truth.credit.cu_deltas_R1.tolist())), default=0.0)
    outcome = float(tensors["outcome_advantages_R"].abs().max()) if len(tensors["n_turns_R"]) else 0.0
    return largest + (1 + credit.terminal_scale) * outcome


def raw_tensors(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Inputs and NaN- or garbage-filled outputs as the native module takes them."""
    scores, n_rollouts = tensors["mean_logprobs_S"], len(tensors["n_turns_R"])
    offsets = torch.full((2, n_rollouts + 1), -99, dtype=torch.int32)
    return {
        **tensors,
        "values_S": torch.full_like(scores, float("nan")),
        "deltas_D": torch.full_like(scores[n_rollouts:], float("nan")),
        "rewards_T": scores.new_full((int(tensors["n_turns_R"].sum()),), float("nan")),
        "advantages_N": scores.new_full(tensors["loss_mask_N"].shape, float("nan")),
        "cu_deltas_R1": offsets[0],
        "cu_turns_R1": offsets[1],
    }
