"""What the settings of all algorithms have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trace_fast.kernels.policy_loss import PolicyLossConfig

TIS_CAP = 2.0  # the same correction of the sampler's probabilities under every algorithm (TRACE, Table 4)


class AlgorithmSettings(BaseModel):
    """Settings of one algorithm; unknown keys are refused.

    Args:
        loss: the objective that its advantages are trained with. Given in part, the rest is the algorithm's own, not
            ``PolicyLossConfig``'s.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig)

    @classmethod
    def own_defaults(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Defaults that depend on the algorithm or on what was ``given``; ``loss`` as a dict of settings."""
        return {}

    @model_validator(mode="before")
    @classmethod
    def _fill_in_own_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        defaults = cls.own_defaults(given)
        filled = defaults | given
        if isinstance(given.get("loss"), dict):
            filled["loss"] = defaults.get("loss", {}) | given["loss"]
        return filled
