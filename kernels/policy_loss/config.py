"""Settings of the policy loss, with the paper's values as defaults (TRACE, Tables 3-4). Unknown keys are refused."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Ratio = Literal["token", "sequence"]
Aggregation = Literal["rollout_mean", "token_mean", "constant"]


class PolicyLossConfig(BaseModel):
    """The clipped objective (Eq. 12) and how its tokens are summed.

    Args:
        ratio: ``token`` clips each token's own ratio; ``sequence`` (GSPO) gives every token of a rollout the ratio
            exp(mean log ratio of its trained tokens), and each token's gradient as if that ratio were its own.
        clip_low, clip_high: the ratio is held within [1 - clip_low, 1 + clip_high].
        max_log_ratio: a log ratio is cut here before the exponential; a token beyond has no gradient. It keeps a
            token with a negative advantage, whose objective is not clipped from above, from overflowing.
        tis_cap: each token's loss is multiplied by min(exp(old - sampler), ``tis_cap``), truncated importance
            sampling; ``None`` switches it off, and the sampler's log-probabilities must then not be given.
        aggregation: ``rollout_mean`` averages the tokens of each rollout, then the rollouts that have trained tokens;
            ``token_mean`` averages all trained tokens (DAPO); ``constant`` divides each rollout's sum by
            ``divisor``, then averages the rollouts (Dr. GRPO).
        divisor: with ``constant``, usually the most tokens that a rollout may have.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    ratio: Ratio = "token"
    clip_low: float = Field(0.20, ge=0, le=1)
    clip_high: float = Field(0.28, ge=0)
    max_log_ratio: float = Field(20.0, gt=0, le=30)
    tis_cap: float | None = Field(2.0, gt=0)
    aggregation: Aggregation = "rollout_mean"
    divisor: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _divisor_belongs_to_constant(self) -> PolicyLossConfig:
        if (self.divisor is None) == (self.aggregation == "constant"):
            raise ValueError(
                "divisor: expected a number with aggregation 'constant' and None otherwise, "
                f"got {self.divisor} with {self.aggregation!r}"
            )
        return self

    @classmethod
    def grpo(cls, clip: float = 0.2, tis_cap: float | None = None) -> PolicyLossConfig:
        """GRPO: symmetric clip, mean of each rollout's mean."""
        return cls(clip_low=clip, clip_high=clip, tis_cap=tis_cap)

    @classmethod
    def dapo(cls, tis_cap: float | None = None) -> PolicyLossConfig:
        """DAPO: the upper clip is wider, all tokens weigh the same."""
        return cls(aggregation="token_mean", tis_cap=tis_cap)

    @classmethod
    def dr_grpo(cls, divisor: float, clip: float = 0.2, tis_cap: float | None = None) -> PolicyLossConfig:
        """Dr. GRPO: a rollout's length does not change the weight of its tokens."""
        return cls(clip_low=clip, clip_high=clip, aggregation="constant", divisor=divisor, tis_cap=tis_cap)

    @classmethod
    def gspo(cls, tis_cap: float | None = None) -> PolicyLossConfig:
        """GSPO: sequence ratio, length-normalised, clip 3e-4 / 4e-4, log ratio up to 10."""
        return cls(ratio="sequence", clip_low=3e-4, clip_high=4e-4, max_log_ratio=10.0, tis_cap=tis_cap)
