"""What people watch, from the rollouts of a step and from their credit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trace_fast.credit import TurnCredit
from trace_fast.rollout import Rollout
from trace_fast.trainer.harness import StopReason
from trace_fast.trainer.search.tools import FIND, OPEN, SEARCH

Metrics = dict[str, float]
TOOLS = {SEARCH: "search", OPEN: "open", FIND: "find"}
UNKNOWN = "unknown"
COUNTED = ("repeated_queries", "reopened_documents", "repeated_finds", "navigation_errors")


def rollout_metrics(rollouts: Sequence[Rollout], *, by: str | None = None) -> Metrics:
    """Means over rollouts: ``reward``, ``success`` (the answer is right), ``format_valid``, ``turns``, ``tokens``,
    ``written_tokens``, ``answered`` and the other stop reasons as shares, diagnostics a rollout; and
    ``zero_std_groups``, the share of groups whose rewards are all equal. With ``by``, a key of the questions:
    ``success/hops=2`` and the like, of the rollouts whose question has that value."""
    if not rollouts:
        return {}
    records = [rollout.extra for rollout in rollouts]
    stops = Counter(record["stop_reason"] for record in records)
    calls = Counter(dict.fromkeys((*TOOLS.values(), UNKNOWN), 0))
    for record in records:
        for name, count in record["calls"].items():  # a policy may call anything by any name
            calls[TOOLS.get(name, UNKNOWN)] += count
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        assert rollout.reward is not None
        rewards.setdefault(rollout.group, []).append(rollout.reward)
    return {
        "reward": _mean(rollout.reward or 0.0 for rollout in rollouts),
        "success": _mean(record["correct"] for record in records),
        "format_valid": _mean(record["format_valid"] for record in records),
        "turns": _mean(rollout.n_turns for rollout in rollouts),
        "tokens": _mean(len(rollout.input_ids) for rollout in rollouts),
        "written_tokens": _mean(record["written_tokens"] for record in records),
        "invalid_turns": _mean(sum(record["invalid_turns"].values()) for record in records),
        "zero_std_groups": _mean(max(group) == min(group) for group in rewards.values()),
        **{f"calls/{name}": count / len(rollouts) for name, count in sorted(calls.items())},
        **{name: _mean(record[name] for record in records) for name in COUNTED},
        **{f"stop/{reason.value}": stops[reason.value] / len(rollouts) for reason in StopReason},
        **({} if by is None else _success_by(records, by)),
    }


def credit_metrics(credits: Sequence[TurnCredit]) -> Metrics:
    """``turn_credit``: mean |r_k| over turns; ``outcome_term``: mean |A_out| over the same turns; ``secured``: share of
    rollouts with a state whose answer is secured; ``value_gain``: mean of V_T, what the turns added to the score."""
    rewards = np.concatenate([credit.rewards for credit in credits] or [np.empty(0)])
    outcomes = [abs(credit.outcome_advantage or 0.0) for credit in credits for _ in range(credit.n_turns)]
    return {
        "turn_credit": _mean(np.abs(rewards).tolist()),
        "outcome_term": _mean(outcomes),
        "secured": _mean(credit.secured_at is not None for credit in credits),
        "value_gain": _mean(float(credit.values[credit.n_turns]) for credit in credits),
    }


def _success_by(records: Sequence[Mapping[str, Any]], key: str) -> Metrics:
    correct: dict[str, list[float]] = {}
    for record in records:
        correct.setdefault(f"success/{key}={record[key]}", []).append(record["correct"])
    return {name: _mean(correct[name]) for name in sorted(correct)}


def _mean(values: Iterable[float]) -> float:
    listed = [float(value) for value in values]
    return sum(listed) / len(listed) if listed else 0.0
