"""GiGPO: the outcome of the rollout plus how an action compares with others that answered the same observation.

    A = A_E + step_weight · A_S

- A_E is relative to the prompt group. ``episode_rows="rollout"`` counts every rollout once (the paper's equation);
  ``"step"`` counts a rollout's outcome once for each of its actions, as the authors' code does, so that long rollouts
  weigh more in mean and std.
- A_S is relative to the actions of the prompt group that answered the identical observation, the same rollout's
  included; an action alone with its observation gets 0. What is compared is the discounted return: with a rollout's
  outcome R as its only reward, discount^m · R for the action with m further actions behind it.
- ``norm``: ``mean_norm`` subtracts the mean only, ``mean_std_norm`` also divides by the sample std.

An action is one turn of the policy, and its final answer is one; an action without trained tokens counts nowhere. Two
deviations from the authors' code, both where it turns rounding or a missing comparison into an advantage: no epsilon is
added to the std but equal returns get exactly 0, and a group of one rollout gets 0, not its reward.

Source: "Group-in-Group Policy Optimization for LLM Agent Training", Eqs. 3-8.

Suffixes: N tokens, R rollouts, A actions, C actions with trained tokens.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from trace_fast.trainer.algorithms.groups import Std, group_advantages
from trace_fast.trainer.algorithms.settings import AlgorithmSettings
from trace_fast.trainer.batch import TrainingBatch


class GigpoConfig(AlgorithmSettings):
    """Settings of GiGPO.

    Args:
        step_weight: the authors' w.
        discount: of a step's return, their gamma.
        norm: of both terms. episode_rows: what A_E's statistics count.
    """

    name: Literal["gigpo"] = "gigpo"
    step_weight: float = Field(1.0, ge=0)
    discount: float = Field(0.95, gt=0, le=1)
    norm: Literal["mean_norm", "mean_std_norm"] = "mean_norm"
    episode_rows: Literal["rollout", "step"] = "rollout"

    @model_validator(mode="after")
    def _ratio_is_a_tokens(self) -> GigpoConfig:
        if self.loss.ratio != "token":  # one ratio a rollout would undo that its actions differ
            raise ValueError(f"loss.ratio: expected 'token' for gigpo, got {self.loss.ratio!r}")
        return self


def advantages(batch: TrainingBatch, config: GigpoConfig) -> Tensor:
    """``(N,)`` advantage of every token, 0 where nothing is trained."""
    std: Std = "none" if config.norm == "mean_norm" else "sample"
    action_N, rollout_A = batch.action_N, batch.rollout_A
    acted_A = torch.zeros_like(rollout_A, dtype=torch.bool)
    acted_A[action_N[batch.loss_mask_N]] = True
    rollout_C = rollout_A[acted_A]
    rewards_C, groups_C = batch.rewards_R[rollout_C], batch.group_ids_R[rollout_C]

    if config.episode_rows == "step":
        episode_C = group_advantages(rewards_C, groups_C, std)
    else:
        episode_C = group_advantages(batch.rewards_R, batch.group_ids_R, std)[rollout_C]
    # Powers from a table: the same power has the same bits wherever it stands, as equal returns must.
    powers = config.discount ** np.arange(rollout_C.numel() + 1, dtype=np.float64)
    powers_C = torch.as_tensor(powers).to(rewards_C)[_actions_behind(rollout_C, batch.n_rollouts)]
    step_C = group_advantages(powers_C * rewards_C, batch.observation_keys_A[acted_A], std)

    joint_A = batch.rewards_R.new_zeros(rollout_A.numel())
    joint_A[acted_A] = episode_C + config.step_weight * step_C
    return torch.where(batch.loss_mask_N, joint_A[action_N.clamp(min=0)], 0.0)


def _actions_behind(rollout_C: Tensor, n_rollouts: int) -> Tensor:
    """``(C,) int64`` later actions of the same rollout."""
    counts_R = torch.bincount(rollout_C, minlength=n_rollouts)
    return counts_R.cumsum(0)[rollout_C] - 1 - torch.arange(rollout_C.numel(), device=rollout_C.device)
