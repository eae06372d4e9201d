"""Scores as JSON and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from trace_fast.output import shortest_float32
from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore

PROTOCOL = 2


def vocabulary_hash(tokenizer: Any) -> str:
    """Hex digest over every token and its id: equal where the same ids mean the same tokens."""
    return hashlib.sha256(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()).hexdigest()


def score_to_json(score: RolloutScore) -> dict[str, Any]:
    """The numbers of a score; what the asker knows already is left out."""
    return {
        "alias_mean_logprobs": score.alias_mean_logprobs.tolist(),
        "mean_logprobs": score.mean_logprobs.tolist(),
        "alias": score.alias.tolist(),
        "token_logprobs": [shortest_float32(values) for values in score.token_logprobs],
        "written_logprobs": None if score.written_logprobs is None else shortest_float32(score.written_logprobs),
    }


def score_from_json(record: Mapping[str, Any], rollout: Rollout, *, reference: str, written: bool) -> RolloutScore:
    """The score of ``rollout`` that a server answered.

    Raises:
        ValueError, KeyError, TypeError: a field is missing, or not of the rollout's shape.
        RolloutError: kind ``non_finite``, as ``RolloutScore``.
    """
    states, aliases = len(rollout.boundaries), len(rollout.answers)
    alias_S = _array(record["alias"], np.int64, (states,), "alias")
    if not ((alias_S >= 0) & (alias_S < aliases)).all():
        raise ValueError(f"alias: expected numbers below {aliases}, got {alias_S.tolist()}")
    given = record["token_logprobs"]
    if not isinstance(given, list) or len(given) != states:
        raise ValueError(f"token_logprobs: expected {states} lists")
    tokens = tuple(
        _array(values, np.float32, (len(rollout.answers[a]),), f"token_logprobs[{k}]")
        for k, (values, a) in enumerate(zip(given, alias_S, strict=True))
    )
    best = int(alias_S[-1])
    written_logprobs = None
    if written:
        if rollout.loss_mask is None:
            raise ValueError("written_logprobs: expected none of a rollout without a loss_mask")
        count = int(rollout.loss_mask[1:].sum())
        written_logprobs = _array(record["written_logprobs"], np.float32, (count,), "written_logprobs")
    return RolloutScore(
        id=rollout.id,
        group=rollout.group,
        n_turns=rollout.n_turns,
        boundaries=rollout.boundaries,
        mean_logprobs=_array(record["mean_logprobs"], np.float64, (states,), "mean_logprobs"),
        alias_mean_logprobs=_array(
            record["alias_mean_logprobs"], np.float64, (states, aliases), "alias_mean_logprobs"
        ),
        alias=alias_S,
        token_logprobs=tokens,
        answer=None if rollout.answer_texts is None else rollout.answer_texts[best],
        answer_ids=rollout.answers[best],
        reward=rollout.reward,
        written_logprobs=written_logprobs,
        model=reference,
        source=rollout.source,
        extra=rollout.extra,
    )


def _array(value: Any, dtype: type, shape: tuple[int, ...], name: str) -> np.ndarray:
    found = np.asarray(value)
    wanted = "iu" if dtype is np.int64 else "iuf"
    if found.shape != shape or (found.size and found.dtype.kind not in wanted):
        raise ValueError(f"{name}: expected numbers of shape {shape}, got {found.dtype} of shape {found.shape}")
    return found.astype(dtype)
