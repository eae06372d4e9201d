"""Settings of the harness, with the paper's values as defaults (TRACE, Tables 3-4). Unknown keys are refused."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trace_fast.trainer.harness.frame import INSTRUCTIONS
from trace_fast.trainer.search.browser import LEAST_TOKENS


class HarnessConfig(BaseModel):
    """How an episode runs and what it is worth.

    ``max_turns``: tool turns, calls that failed included; after the last one the policy may still answer.
    ``max_tokens``: of the whole trajectory. ``max_response_tokens``: of one thing the policy writes.
    ``observation_tokens``: of one observation. ``timeout_s``: wall time of one episode, checked between turns.
    ``parser``: ``strict`` accepts what the format allows and nothing else, ``repair`` mends what can be understood
    and counts it. ``normaliser``: how an answer is compared with the gold ones. ``opener``: what follows the
    generation prompt in the states that are scored; ``auto`` is ``<answer>``, with a line break where the vocabulary
    needs one. ``instructions``: the system message. ``tool_threads``: calls that run at the same time.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_turns: int = Field(60, ge=0)
    max_tokens: int = Field(48_000, ge=1)
    max_response_tokens: int = Field(4_096, ge=1)
    observation_tokens: int = Field(2_048, ge=LEAST_TOKENS)
    timeout_s: float = Field(240.0, gt=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    parser: Literal["strict", "repair"] = "strict"
    normaliser: Literal["squad", "strict"] = "squad"
    outcome_coefficient: float = Field(1.0, ge=0)
    format_score: float = Field(0.1, ge=0)
    opener: str = "auto"
    instructions: str = Field(INSTRUCTIONS, min_length=1)
    tool_threads: int = Field(16, ge=1)

    @classmethod
    def evaluation(cls, **changes: Any) -> HarnessConfig:
        """The paper's evaluation limits, with the repairing parser."""
        limits: dict[str, Any] = {"max_turns": 80, "max_tokens": 72_000, "max_response_tokens": 8_192}
        return cls(**{**limits, "parser": "repair", **changes})
