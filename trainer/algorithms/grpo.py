"""GRPO: every trained token of a rollout gets its outcome advantage, (R - mean) / std over its prompt group.

Variants, which only choose defaults:

======== =========== ================== ========================================================================
variant  std         zero-std groups    objective
======== =========== ================== ========================================================================
paper    population  trained with 0     Eq. 12 of TRACE: clip 0.20 / 0.28, mean over each rollout's tokens
dapo     population  dropped            clip 0.20 / 0.28, mean over all trained tokens of the batch
dr_grpo  none        trained with 0     clip 0.20 / 0.20, each rollout's sum divided by the constant ``loss.divisor``
======== =========== ================== ========================================================================

A group that is "trained with 0" has no gradient and counts in the objective's denominators; a dropped one does neither.

Sources: DeepSeekMath (GRPO), DAPO, "Understanding R1-Zero-Like Training" (Dr. GRPO).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator
from torch import Tensor

from trace_fast.kernels.policy_loss import PolicyLossConfig
from trace_fast.trainer.algorithms.groups import Std, equal_values, group_advantages, to_tokens
from trace_fast.trainer.algorithms.settings import TIS_CAP, AlgorithmSettings
from trace_fast.trainer.batch import TrainingBatch

Variant = Literal["paper", "dapo", "dr_grpo"]


class GrpoConfig(AlgorithmSettings):
    """Settings of GRPO.

    Args:
        variant: chooses the defaults of all other settings; what is given beside it holds.
        std: ``population`` divides squares by G, ``sample`` (other trainers' GRPO) by G-1, ``none`` does not divide.
        drop_zero_std_groups: leave groups of equal rewards, and groups of one, out of the batch.
    """

    name: Literal["grpo"] = "grpo"
    variant: Variant = "paper"
    std: Std = "population"
    drop_zero_std_groups: bool = False

    @classmethod
    def own_defaults(cls, given: dict[str, Any]) -> dict[str, Any]:
        if given.get("variant") == "dapo":
            return {"drop_zero_std_groups": True, "loss": PolicyLossConfig.dapo(tis_cap=TIS_CAP).model_dump()}
        if given.get("variant") == "dr_grpo":
            loss = PolicyLossConfig.dr_grpo(divisor=1.0, tis_cap=TIS_CAP)
            return {"std": "none", "loss": loss.model_dump(exclude={"divisor"})}  # the divisor must be given
        return {}

    @model_validator(mode="after")
    def _ratio_is_a_tokens(self) -> GrpoConfig:
        if self.loss.ratio != "token":
            raise ValueError(f"loss.ratio: expected 'token' for grpo, got {self.loss.ratio!r}; gspo has the sequence's")
        return self


def advantages(batch: TrainingBatch, config: GrpoConfig) -> Tensor:
    """``(N,)`` advantage of every token, 0 where nothing is trained."""
    return to_tokens(group_advantages(batch.rewards_R, batch.group_ids_R, config.std), batch)


def kept_rollouts(batch: TrainingBatch, config: GrpoConfig) -> Tensor | None:
    """``(R,) bool`` rollouts that stay in the batch; ``None`` for all."""
    return ~equal_values(batch.rewards_R, batch.group_ids_R) if config.drop_zero_std_groups else None
