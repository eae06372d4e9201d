"""GSPO: GRPO's advantages, trained with the ratio of the whole sequence instead of each token's.

The sequence's ratio is s = exp(mean over its trained tokens of logp - old logp). The objective takes each token's
ratio as sg[s] · exp(logp - sg[logp]), clips it to [1 - 3e-4, 1 + 4e-4] and averages over each rollout's tokens.

Source: "Group Sequence Policy Optimization", Eqs. 5-7 and its token form.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator
from torch import Tensor

from trace_fast.kernels.policy_loss import PolicyLossConfig
from trace_fast.trainer.algorithms.groups import Std, group_advantages, to_tokens
from trace_fast.trainer.algorithms.settings import TIS_CAP, AlgorithmSettings
from trace_fast.trainer.batch import TrainingBatch


class GspoConfig(AlgorithmSettings):
    """Settings of GSPO; ``std`` as in ``GrpoConfig``."""

    name: Literal["gspo"] = "gspo"
    std: Std = "population"

    @classmethod
    def own_defaults(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"loss": PolicyLossConfig.gspo(tis_cap=TIS_CAP).model_dump()}

    @model_validator(mode="after")
    def _ratio_is_the_sequences(self) -> GspoConfig:
        if self.loss.ratio != "sequence":
            raise ValueError(f"loss.ratio: expected 'sequence' for gspo, got {self.loss.ratio!r}; grpo has the token's")
        return self


def advantages(batch: TrainingBatch, config: GspoConfig) -> Tensor:
    """``(N,)`` advantage of every token, 0 where nothing is trained."""
    return to_tokens(group_advantages(batch.rewards_R, batch.group_ids_R, config.std), batch)
