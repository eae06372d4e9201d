"""The numbers of the example rollouts under SmolLM2-135M: credit lies where a reader expects it.

Every bound leaves room below or above the float32 value, so that it states the situation and not the last digit.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

import trace_fast as tf

NEAR_ZERO = 0.3  # |delta|, nats: nothing new was learned; a decisive turn has four times as much at least


@dataclass(frozen=True)
class Expected:
    """What one example must show, in nats; turns are 0-based.

    ``decisive``: turn with the largest delta, at least ``gain``. ``harmful``: turn with the most negative delta, at
    most -0.8. Every other turn stays within ``NEAR_ZERO``. ``before``: upper bound of l-bar on the states up to the
    decisive turn (on all states when there is none); ``after``: lower bound of l-bar right after it. ``secured_at``:
    first state with l-bar >= -0.3.
    """

    n_turns: int
    before: float
    decisive: int | None = None
    gain: float = 0.0
    after: float = 0.0
    harmful: int | None = None
    secured_at: int | None = None
    finished: bool = True


EXPECTED = {
    "ferry-decisive-search": Expected(2, before=-6, decisive=0, gain=2.4, after=-0.5, secured_at=3),
    "ferry-decisive-open": Expected(3, before=-6, decisive=1, gain=2.2, after=-0.55, secured_at=4),
    "ferry-rescue-query": Expected(5, before=-6, decisive=3, gain=2.2, after=-0.55, secured_at=6),
    "ferry-distractor": Expected(2, before=-6),
    "bell-redundant-finds": Expected(4, before=-6, decisive=0, gain=2.7, after=-0.3, secured_at=1),
    "bell-secured-then-lost": Expected(3, before=-6, decisive=0, gain=2.7, after=-0.3, harmful=2, secured_at=1),
    "bell-empty-find-misread": Expected(3, before=-6, decisive=0, gain=2.7, after=-0.3, harmful=2, secured_at=1),
    "bell-cut-off": Expected(3, before=-6, finished=False),
    "books-numeric": Expected(3, before=-2.5, decisive=1, gain=1.2, after=-0.8, secured_at=4),
    "teahouse-chinese": Expected(3, before=-1.8, decisive=1, gain=1.3, after=-0.5, secured_at=4),
    "flag-no-tools": Expected(0, before=-5.5),
}


@dataclass(frozen=True)
class Scored:
    rollout: tf.Rollout
    mean_logprobs: np.ndarray
    credit: tf.TurnCredit


@pytest.fixture(scope="module")
def scored(smollm2_gguf: Path) -> dict[str, Scored]:
    scorer = tf.Scorer.from_pretrained(str(smollm2_gguf), dtype="float32", device="cpu")
    with resources.as_file(resources.files("trace_fast").joinpath("examples/demo_rollouts.jsonl")) as path:
        rollouts = list(tf.read_rollouts(str(path), tokenizer=scorer.tokenizer))
    scores = scorer.score(rollouts)
    credit = tf.turn_credit(scores)
    return {
        rollout.id: Scored(rollout, score.mean_logprobs, turns)
        for rollout, score, turns in zip(rollouts, scores, credit, strict=True)
    }


def test_every_example_is_scored(scored: dict[str, Scored]) -> None:
    assert set(scored) == set(EXPECTED)


@pytest.mark.parametrize(("name", "expected"), EXPECTED.items(), ids=EXPECTED)
class TestExample:
    def test_shape_and_situation(self, scored: dict[str, Scored], name: str, expected: Expected) -> None:
        rollout = scored[name].rollout
        assert rollout.n_turns == expected.n_turns
        assert rollout.finished == expected.finished
        assert rollout.nested
        assert set(rollout.extra) == {"situation"}

    def test_l_bar_rises_where_the_evidence_arrives(
        self, scored: dict[str, Scored], name: str, expected: Expected
    ) -> None:
        mean_logprobs = scored[name].mean_logprobs
        if expected.decisive is None:
            assert mean_logprobs.max() <= expected.before
            return
        assert mean_logprobs[: expected.decisive + 1].max() <= expected.before
        assert mean_logprobs[expected.decisive + 1] >= expected.after
        assert turns_with_gold(scored[name].rollout)[0] == expected.decisive

    def test_credit_of_every_tool_turn(self, scored: dict[str, Scored], name: str, expected: Expected) -> None:
        deltas = scored[name].credit.deltas[: expected.n_turns]
        for turn, delta in enumerate(deltas):
            if turn == expected.decisive:
                assert delta == deltas.max()
                assert delta >= expected.gain
            elif turn == expected.harmful:
                assert delta == deltas.min()
                assert delta <= -0.8
            else:
                assert abs(delta) <= NEAR_ZERO, f"turn {turn}"

    def test_secured(self, scored: dict[str, Scored], name: str, expected: Expected) -> None:
        assert scored[name].credit.secured_at == expected.secured_at


def test_a_lost_answer_stays_lost(scored: dict[str, Scored]) -> None:
    for name in ("bell-secured-then-lost", "bell-empty-find-misread"):
        mean_logprobs = scored[name].mean_logprobs
        assert mean_logprobs[:4].max() == mean_logprobs[2] >= -0.25
        assert mean_logprobs[3] <= -0.55
        assert mean_logprobs[-1] < -0.3


def test_losing_turn_is_punished_below_its_neighbours_after_backup(scored: dict[str, Scored]) -> None:
    """The K-step reward of the losing turn is the lowest of its rollout, though the same outcome befell all turns."""
    for name in ("bell-secured-then-lost", "bell-empty-find-misread"):
        rewards = scored[name].credit.rewards
        assert int(rewards.argmin()) == 2
        assert rewards[2] < -1.5


def test_group_outcomes(scored: dict[str, Scored]) -> None:
    one_of_four, three_of_four = np.sqrt(3.0), np.sqrt(1.0 / 3.0)
    advantages = [scored[name].credit.outcome_advantage for name in EXPECTED]
    ferry, bell = [three_of_four] * 3 + [-one_of_four], [one_of_four] + [-three_of_four] * 3
    assert advantages == pytest.approx([*ferry, *bell, 0.0, 0.0, 0.0])


def turns_with_gold(rollout: tf.Rollout) -> list[int]:
    """Turns whose observation holds the gold answer, in order."""
    assert rollout.answer_texts is not None
    observations = [s for s in rollout.transcript if s.role == "tool"]
    return sorted({s.turn for s in observations if any(a in s.text for a in rollout.answer_texts)})
