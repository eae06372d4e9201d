"""Metrics and the divergence from the reference on rollouts that are made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from training_rollouts import build_rollout, build_score

from trace_fast.config import CreditConfig
from trace_fast.credit import turn_credit
from trace_fast.errors import RolloutError
from trace_fast.rollout import Rollout
from trace_fast.trainer.metrics import credit_metrics, rollout_metrics
from trace_fast.trainer.reference import Scored, reference_kl


def record(stop: str, *, correct: bool, calls: dict[str, int], **changes: Any) -> dict[str, Any]:
    quiet = {"repeated_queries": 0, "reopened_documents": 0, "repeated_finds": 0, "navigation_errors": 0}
    found = {"stop_reason": stop, "correct": correct, "format_valid": correct, "calls": calls, "invalid_turns": {}}
    return found | quiet | {"written_tokens": 3} | changes


@pytest.fixture
def rollouts() -> list[Rollout]:
    made = [
        build_rollout("a", [([1], [5])], [4], reward=1.1),
        build_rollout("b", [([1], [5]), ([2, 3], [6])], None, reward=0.1),
        build_rollout("c", [], [4], group="h", reward=0.1),
        build_rollout("d", [], [4], group="h", reward=0.1),
    ]
    extras = [
        record("answer", correct=True, calls={"browser.search": 1}, repeated_queries=2),
        record("timeout", correct=False, calls={"browser.open": 2, "rm -rf": 3}, invalid_turns={"json": 2, "two": 1}),
        record("answer", correct=False, calls={}, format_valid=True, written_tokens=9),
        record("answer", correct=False, calls={"search": 1}),
    ]
    return [replace(rollout, extra=extra) for rollout, extra in zip(made, extras, strict=True)]


def test_means_over_rollouts(rollouts: list[Rollout]) -> None:
    found = rollout_metrics(rollouts)
    wanted = {
        "reward": 1.4 / 4,
        "success": 1 / 4,
        "format_valid": 2 / 4,
        "turns": 3 / 4,
        "tokens": (5 + 7 + 3 + 3) / 4,
        "written_tokens": 18 / 4,
        "invalid_turns": 3 / 4,
        "zero_std_groups": 1 / 2,
        "calls/search": 1 / 4,
        "calls/open": 2 / 4,
        "calls/find": 0.0,
        "calls/unknown": 4 / 4,  # whatever else a policy calls has no name of its own
        "repeated_queries": 2 / 4,
        "reopened_documents": 0.0,
        "repeated_finds": 0.0,
        "navigation_errors": 0.0,
        "stop/answer": 3 / 4,
        "stop/timeout": 1 / 4,
    }
    others = ("stop/max_turns", "stop/context", "stop/length", "stop/parse", "stop/engine_error")
    assert found == pytest.approx(wanted | dict.fromkeys(others, 0.0))


def test_success_by_a_key_of_the_questions(rollouts: list[Rollout]) -> None:
    hops = (2, 1, 2, 2)
    split = [replace(r, extra=dict(r.extra) | {"hops": value}) for r, value in zip(rollouts, hops, strict=True)]
    found = rollout_metrics(split, by="hops")
    assert found == pytest.approx(rollout_metrics(rollouts) | {"success/hops=1": 0.0, "success/hops=2": 1 / 3})


def test_nothing_has_no_metrics() -> None:
    assert rollout_metrics([], by="hops") == {}


def test_credit_by_hand(rollouts: list[Rollout]) -> None:
    """Eps 0.1, K 1: r_k is the step's own log-ratio, and the last turn has lambda gamma A_out beside it."""
    scores = [
        build_score(rollouts[0], [-3.9, -1.9, -0.2]),
        build_score(rollouts[1], [-0.9, -1.9, -3.9]),
        build_score(rollouts[2], [-1.0, -0.4]),
    ]
    credits = turn_credit(scores, CreditConfig(horizon=1, discount=0.5, terminal_scale=2.0))
    found = credit_metrics(credits)
    first = [np.log(2) + 2 * 0.5 * 1]
    second = [-np.log(2), -np.log(2) - 2 * 0.5 * 1]
    assert found == pytest.approx(
        {
            "turn_credit": np.mean(np.abs([*first, *second])),
            "outcome_term": 1.0,  # a and b: +1 and -1; c has no turn
            "secured": 1 / 3,
            "value_gain": (np.log(2) - np.log(4) + 0) / 3,
        }
    )
    assert credit_metrics([]) == {"turn_credit": 0, "outcome_term": 0, "secured": 0, "value_gain": 0}


def test_kl_to_the_reference_by_hand() -> None:
    """Over written tokens only: prompt and observation count not."""
    rollout = build_rollout("a", [([1, 2], [5])], [4], prompt=(7, 8), logprob=-0.5)
    reference = np.array([-0.75, -1.5, -0.25], dtype=np.float32)
    score = replace(build_score(rollout, [-1, -1, -1]), written_logprobs=reference)
    assert reference_kl([rollout], [score]) == pytest.approx((0.25 + 1.0 - 0.25) / 3, abs=1e-12)
    assert reference_kl([rollout], [build_score(rollout, [-1, -1, -1])]) is None
    assert reference_kl([], []) is None


def test_without_the_groups_that_the_reference_could_not_score_in_full(rollouts: list[Rollout]) -> None:
    scores = [build_score(rollout, [-1.0] * rollout.n_states) for rollout in rollouts]
    lost = [RolloutError("length", "too long", rollout_id="b")]
    scored = Scored([rollouts[i] for i in (0, 2, 3)], [scores[i] for i in (0, 2, 3)], lost)
    complete = scored.complete_groups(rollouts)
    assert complete.rollouts == rollouts[2:]
    assert complete.scores == scores[2:]
    assert complete.errors == lost
