"""Settings, with the paper's values as defaults (TRACE, Tables 3-4). Unknown keys are refused.

Environment variables that change a number: none. The command line sets one where it is unset: ``TQDM_DISABLE=1`` when
standard error is no terminal, so that no library draws progress bars into a log.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Alias = Literal["max", "mean", "logsumexp"]
DType = Literal["float32", "bfloat16", "float16"]
CreditForm = Literal["log_ratio", "raw", "linear"]


LARGEST = 1e9  # with settings up to it no credit or advantage overflows (kernels/turn_credit/checks.py)


def _normal(value: float) -> float:
    """What float64 holds with all its digits; float32 tensors take less, which is checked with them."""
    if value < sys.float_info.min:
        raise ValueError(f"expected at least {sys.float_info.min:.3g}, below which float64 loses digits")
    return value


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CreditConfig(_Settings):
    """Turn credit, Eqs. 6-10.

    ``gap_offset`` is the paper's epsilon, ``terminal_scale`` its lambda_term, ``horizon`` its K (0 switches the
    dense backup off), ``discount`` its gamma_td. ``secured_threshold`` (nats) names a state secured when its mean
    log-probability reaches it; it changes no credit.
    """

    horizon: int = Field(3, ge=0)
    discount: float = Field(0.8, gt=0, le=1)
    gap_offset: Annotated[float, AfterValidator(_normal)] = Field(0.1, gt=0, le=LARGEST)
    terminal_scale: float = Field(2.0, ge=0, le=LARGEST)
    form: CreditForm = "log_ratio"
    normalize_window: bool = True
    std: Literal["population", "sample"] = "population"
    secured_threshold: float = Field(-0.3, le=0)


class AdvantageConfig(_Settings):
    """Per-token advantages, Eq. 11 and the answer-tail rule of A.1.

    ``answer_tail``: ``group_mean`` weighs an answer token by scale x mean answer length of the group / own answer
    length, ``constant`` by scale, ``off`` by 0.
    """

    alpha_out: float = Field(1.0, ge=0, le=LARGEST)
    alpha_turn: float = Field(0.2, ge=0, le=LARGEST)
    answer_tail: Literal["group_mean", "constant", "off"] = "group_mean"
    answer_tail_scale: float = Field(0.05, ge=0, le=LARGEST)
