"""TRACE: outcome advantage plus the K-step credit of each tool turn, from the reference's scores of the states.

    A token of turn k:   alpha_out · A_out + alpha_turn · r_k             (Eq. 11)
    An answer token:     tail weight · alpha_out · A_out                  (A.1)

``credit.form`` chooses how a step of the score becomes credit (``log_ratio``, ``raw``, ``linear``; Table 5).
The equations themselves: ``trace_fast.kernels.turn_credit``.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor

from trace_fast.backends import fastest
from trace_fast.config import AdvantageConfig, CreditConfig
from trace_fast.errors import TraceFastError
from trace_fast.kernels.turn_credit import CreditAndAdvantages, credit_and_advantages, outcome_advantages
from trace_fast.trainer.algorithms.settings import AlgorithmSettings
from trace_fast.trainer.batch import TrainingBatch


class TraceConfig(AlgorithmSettings):
    """Settings of TRACE, with the paper's values as defaults.

    Args:
        credit: Eqs. 5-10, and the std of A_out. advantage: Eq. 11.
    """

    name: Literal["trace"] = "trace"
    credit: CreditConfig = Field(default_factory=CreditConfig)
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)

    @model_validator(mode="after")
    def _ratio_is_a_tokens(self) -> TraceConfig:
        if self.loss.ratio != "token":  # one ratio a rollout would undo that its turns differ
            raise ValueError(f"loss.ratio: expected 'token' for trace, got {self.loss.ratio!r}")
        return self


def turn_credit_of(batch: TrainingBatch, config: TraceConfig, *, backend: str = "auto") -> CreditAndAdvantages:
    """Credit of every state and turn with the advantages, for metrics; see ``credit_and_advantages``.

    ``backend`` is one of its implementations, or the fastest that runs on the batch's device.

    Raises:
        TraceFastError: the batch was made without scores.
    """
    scores_S = batch.mean_logprobs_S
    if scores_S is None:
        raise TraceFastError("batch: expected the reference's scores of all states for trace, got a batch without")
    return credit_and_advantages(
        scores_S,
        batch.boundaries_S,
        batch.cu_states_R1,
        batch.n_turns_R,
        outcome_advantages(batch.rewards_R, batch.group_ids_R, config.credit.std),
        batch.loss_mask_N,
        batch.cu_tokens_R1,
        batch.group_ids_R,
        config.credit,
        config.advantage,
        backend=fastest("turn_credit", scores_S.device, scores_S.dtype) if backend == "auto" else backend,
    )


def advantages(batch: TrainingBatch, config: TraceConfig) -> Tensor:
    """``(N,)`` advantage of every token, 0 where nothing is trained."""
    return turn_credit_of(batch, config).advantages_N
