"""What a model refuses of a rollout: one validator, one wording. ``Rollout`` itself checks what needs no model."""

from __future__ import annotations

import numpy as np

from trace_fast.errors import RolloutError
from trace_fast.model_spec import ModelSpec
from trace_fast.rollout import Rollout


def check_rollout(rollout: Rollout, spec: ModelSpec, vocab_size: int) -> None:
    """Raises RolloutError (``vocabulary`` or ``length``) where the model cannot score the rollout exactly."""

    def refuse(kind: str, reason: str) -> RolloutError:
        return RolloutError(kind, reason, rollout_id=rollout.id, source=rollout.source)

    named = [("input_ids", rollout.input_ids)]
    named += [(f"gold answer {a}", answer) for a, answer in enumerate(rollout.answers)]
    named += [(f"opener of state {k}", opener) for k, opener in enumerate(rollout.openers)]
    named += [(f"prefix of state {k}", prefix) for k, prefix in enumerate(rollout.state_prefixes or ())]
    for name, ids in named:
        outside = (ids < 0) | (ids >= vocab_size)
        if outside.any():
            at = int(np.argmax(outside))
            raise refuse(
                "vocabulary",
                f"{name}[{at}]: expected a token id in 0..{vocab_size - 1} ({spec.name}'s vocabulary), got {ids[at]}; "
                "the rollout was tokenised for another model",
            )
    if spec.max_positions is None:
        return
    answer = max(len(a) for a in rollout.answers)
    longest = max(
        len(rollout.input_ids),
        *(len(rollout.prefix(k)) + len(rollout.openers[k]) + answer - 1 for k in range(rollout.n_states)),
    )
    if longest > spec.max_positions:
        raise refuse(
            "length",
            f"its longest state with opener and answer has {longest} tokens; expected at most {spec.max_positions} for "
            f"{spec.name}, because {spec.length_rule}",
        )
