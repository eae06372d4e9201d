"""``sample_groups`` with an engine that fails: what is sampled again, with which seeds, and what is left out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from trace_fast.errors import ConfigError
from trace_fast.trainer.engines.engine import FinishReason, Generation, failed
from trace_fast.trainer.harness import ChatFrame, Harness, HarnessConfig, Task
from trace_fast.trainer.sampling import sample_groups
from trace_fast.trainer.search import Document, SearchIndex
from trace_fast.trainer.search.bm25 import Bm25Retriever

TASKS = [Task(name, f"Where is {name}?", ("Basel",)) for name in ("rhine", "alps", "jura")]


class FlakyEngine:
    """Answers ``Basel``, and fails as ``fails(question, number of requests for it so far)`` says."""

    def __init__(self, frame, fails):
        text = frame.tokenizer("<answer>Basel</answer>", add_special_tokens=False)["input_ids"]
        self._ids = np.array([*text, frame.stop_ids[0]])
        self._frame = frame
        self._fails = fails
        self.asked = Counter()
        self.seeds = []
        self.batches = []

    def generate(self, requests):
        self.batches.append(len(requests))
        return [self._one(request) for request in requests]

    def _one(self, request):
        prompt = self._frame.tokenizer.decode(request.prompt_ids)
        (task,) = (task for task in TASKS if task.question in prompt)
        number = self.asked[task.id]
        self.asked[task.id] += 1
        self.seeds.append(request.seed)
        if self._fails(task.id, number):
            return failed(f"lost {task.id} {number}")
        return Generation(self._ids, np.full(len(self._ids), -0.5, np.float32), FinishReason.STOP)


@pytest.fixture(scope="module")
def frame(smollm2_tokenizer):
    return ChatFrame(smollm2_tokenizer)


@pytest.fixture(scope="module")
def harness(frame):
    document = Document("basel", "https://x/basel", "Basel", "Basel lies on the Rhine.")
    return Harness(frame, SearchIndex([document], Bm25Retriever.build([document.text])), HarnessConfig())


def test_nothing_failed(frame, harness):
    engine = FlakyEngine(frame, lambda *_: False)
    sampled = sample_groups(TASKS, harness, engine, seed=1, samples=3, attempts=3)
    assert [r.id for r in sampled.rollouts] == [f"{t.id}/{n}" for t in TASKS for n in range(3)]
    assert sampled.failures == []
    assert engine.batches == [9]


def test_lost_rollouts_are_sampled_again_with_new_seeds(frame, harness):
    engine = FlakyEngine(frame, lambda task, number: number < {"rhine": 1, "alps": 0, "jura": 3}[task])
    sampled = sample_groups(TASKS, harness, engine, seed=1, samples=3, attempts=2)
    assert sampled.failures == []
    assert [(r.id, r.group) for r in sampled.rollouts] == [(f"{t.id}/{n}", t.id) for t in TASKS for n in range(3)]
    assert all(r.reward == pytest.approx(1.1) for r in sampled.rollouts)
    assert engine.asked["alps"] == 3  # whole groups are left alone
    assert len(set(engine.seeds)) == len(engine.seeds)


def test_the_same_seed_gives_the_same_seeds(frame, harness):
    def seeds(seed):
        engine = FlakyEngine(frame, lambda task, number: number < 2)
        sample_groups(TASKS, harness, engine, seed=seed, samples=3, attempts=2)
        return engine.seeds

    assert seeds(1) == seeds(1)
    assert not set(seeds(1)) & set(seeds(2))


@pytest.mark.parametrize(("incomplete", "kept"), [("keep", {"rhine": 3, "alps": 1}), ("drop", {"rhine": 3})])
def test_groups_that_stay_incomplete(incomplete, kept, frame, harness):
    """Of ``alps`` one rollout works, of ``jura`` none ever does."""
    engine = FlakyEngine(frame, lambda task, number: task == "jura" or (task == "alps" and number != 1))
    sampled = sample_groups(TASKS, harness, engine, seed=1, samples=3, attempts=3, incomplete=incomplete)
    assert Counter(r.group for r in sampled.rollouts) == kept
    assert Counter(f.group for f in sampled.failures) == {"alps": 2, "jura": 3}
    assert {f.id for f in sampled.failures} == {"alps/0", "alps/2", "jura/0", "jura/1", "jura/2"}
    assert all(f.error.startswith(f"lost {f.group}") for f in sampled.failures)


def test_one_attempt_repeats_nothing(frame, harness):
    engine = FlakyEngine(frame, lambda task, number: number == 0)
    sampled = sample_groups(TASKS, harness, engine, seed=1, samples=2)
    assert engine.batches == [6]
    assert [f.id for f in sampled.failures] == ["rhine/0", "alps/0", "jura/0"]
    assert [f.error for f in sampled.failures] == ["lost rhine 0", "lost alps 0", "lost jura 0"]


def test_an_engine_that_always_fails_leaves_nothing(frame, harness):
    sampled = sample_groups(TASKS, harness, FlakyEngine(frame, lambda *_: True), seed=1, samples=2, attempts=2)
    assert sampled.rollouts == []
    assert len(sampled.failures) == 6


@pytest.mark.parametrize("turns", [1, 2])
def test_a_wish_to_stop_is_heard_between_turns(turns, frame, harness):
    """In the first attempt, and in the second, which samples again what the first lost."""
    engine = FlakyEngine(frame, lambda task, number: task == "alps" and number == 0)
    whole = sample_groups(TASKS, harness, engine, seed=1, samples=2, attempts=2)
    assert (engine.batches, len(whole.rollouts)) == ([6, 1], 6)
    engine = FlakyEngine(frame, lambda task, number: task == "alps" and number == 0)
    sampled = sample_groups(
        TASKS, harness, engine, seed=1, samples=2, attempts=2, stop=lambda: len(engine.batches) >= turns
    )
    assert (sampled.rollouts, sampled.failures) == ([], [])
    assert engine.batches == [6, 1][:turns]


def test_nothing_to_sample(frame, harness):
    engine = FlakyEngine(frame, lambda *_: False)
    assert sample_groups([], harness, engine, seed=1, samples=2).rollouts == []
    with pytest.raises(ConfigError, match="attempts: expected at least 1, got 0"):
        sample_groups(TASKS, harness, engine, seed=1, samples=2, attempts=0)
