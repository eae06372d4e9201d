"""Exact turn-level credit for agent rollouts, from gold-answer log-probabilities in one packed pass.

    import trace_fast as tf
    scorer = tf.Scorer.from_pretrained("Qwen/Qwen3-4B")
    rollouts = list(tf.read_rollouts("rollouts.jsonl", tokenizer=scorer.tokenizer))
    scores = scorer.score(rollouts)
    credit = tf.turn_credit(scores)
    advantages = tf.token_advantages(rollouts, credit)

Everything public is listed in ``__all__``; heavy modules (torch, transformers) load on first use.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trace_fast.advantages import token_advantages
    from trace_fast.config import AdvantageConfig, CreditConfig
    from trace_fast.credit import TurnCredit, turn_credit
    from trace_fast.errors import (
        ConfigError,
        InputError,
        ModelError,
        OutputError,
        RolloutError,
        TraceFastError,
    )
    from trace_fast.formats import FieldKeys, read_rollouts, write_rollouts
    from trace_fast.oracle_credit import reference_credit
    from trace_fast.rollout import Rollout, RolloutGroup, Segment, group_rollouts
    from trace_fast.rollout_score import RolloutScore
    from trace_fast.scorer import Scorer

__version__ = version("trace-fast")

_HOMES = {
    "AdvantageConfig": "config",
    "ConfigError": "errors",
    "CreditConfig": "config",
    "FieldKeys": "formats",
    "InputError": "errors",
    "ModelError": "errors",
    "OutputError": "errors",
    "Rollout": "rollout",
    "RolloutError": "errors",
    "RolloutGroup": "rollout",
    "RolloutScore": "rollout_score",
    "Scorer": "scorer",
    "Segment": "rollout",
    "TraceFastError": "errors",
    "TurnCredit": "credit",
    "group_rollouts": "rollout",
    "read_rollouts": "formats",
    "reference_credit": "oracle_credit",
    "token_advantages": "advantages",
    "turn_credit": "credit",
    "write_rollouts": "formats",
}

__all__ = [
    "AdvantageConfig",
    "ConfigError",
    "CreditConfig",
    "FieldKeys",
    "InputError",
    "ModelError",
    "OutputError",
    "Rollout",
    "RolloutError",
    "RolloutGroup",
    "RolloutScore",
    "Scorer",
    "Segment",
    "TraceFastError",
    "TurnCredit",
    "__version__",
    "group_rollouts",
    "read_rollouts",
    "reference_credit",
    "token_advantages",
    "turn_credit",
    "write_rollouts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trace_fast' has no attribute {name!r}")
    return getattr(import_module(f"trace_fast.{_HOMES[name]}"), name)
