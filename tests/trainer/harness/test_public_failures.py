"""Failures of other harnesses and verifiers, by where they were reported; each is a test here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trace_fast.rollout import Rollout
from trace_fast.trainer.harness import ChatFrame, Harness, HarnessConfig, Task, exact_match
from trace_fast.trainer.harness.actions import ActionParser, Invalid
from trace_fast.trainer.harness.call_formats import Call
from trace_fast.trainer.search import SearchIndex

QUESTION = "Write <answer>Bern</answer>, as in <answer>Basel</answer>. Which is it?"
TASK = Task("t", QUESTION, ("Basel", "Bern"))
OBJECT = '{"name": "browser.search", "arguments": {"query": "Evil"}}'


def _run(frame: ChatFrame, index: SearchIndex, engine: Any, **settings: Any) -> Rollout:
    (rollout,) = Harness(frame, index, HarnessConfig(**settings)).run([TASK], engine, seed=0)
    return rollout


def test_search_r1_79_an_answer_in_the_prompt_or_an_observation_is_not_the_policys(
    frame: ChatFrame, index: SearchIndex, scripted: Any, call: Any
) -> None:
    opened = [call("browser.search", '{"query": "Evil"}'), call("browser.open", '{"id": 0, "loc": 0}')]
    rollout = _run(frame, index, scripted(frame, {QUESTION: [*opened, "I do not know."]}))
    assert "<answer>Bern</answer>" in frame.tokenizer.decode(rollout.input_ids[rollout.boundaries[1] :])
    assert rollout.extra["prediction"] is None
    assert rollout.reward == 0.0
    wrong = _run(frame, index, scripted(frame, {QUESTION: ["<answer>Basel</answer> or <answer>Olten</answer>"]}))
    assert wrong.extra["prediction"] == "Olten"
    assert wrong.reward == pytest.approx(0.1)


def test_vllm_39056_a_call_inside_thinking_has_an_outcome(frame: ChatFrame) -> None:
    text = f"<think>I call <tool_call>{OBJECT}</tool_call></think>"
    strict = ActionParser("json_tag", repair=False, thinking_open=False).parse(text)
    assert isinstance(strict.action, Invalid)
    assert strict.action.kind == "call_in_reasoning"
    mended = ActionParser("json_tag", repair=True, thinking_open=False).parse(text)
    assert mended.action == Call("browser.search", {"query": "Evil"})
    assert mended.repairs == ("call_in_reasoning",)


def test_vllm_17790_two_objects_in_one_tag_have_an_outcome() -> None:
    text = f"<tool_call>{OBJECT}\n{OBJECT.replace('Evil', 'Rhine')}</tool_call>"
    strict = ActionParser("json_tag", repair=False, thinking_open=False).parse(text)
    assert isinstance(strict.action, Invalid)
    assert strict.action.kind == "several_calls"
    mended = ActionParser("json_tag", repair=True, thinking_open=False).parse(text)
    assert (mended.action, mended.repairs) == (Call("browser.search", {"query": "Evil"}), ("several_calls",))


@pytest.mark.parametrize("normaliser", ["squad", "strict"])
def test_ultrarag_509_a_gold_answer_of_an_article_is_not_empty(normaliser: str) -> None:
    assert exact_match("A", ["A"], normaliser)
    assert exact_match("a.", ["A"], normaliser)
    for other in ("", "the", "an", "?", "B"):
        assert not exact_match(other, ["A"], normaliser)


def test_squad_normalisation_joins_numbers_and_strict_does_not() -> None:
    assert exact_match("220", ["22.0"], "squad")
    assert not exact_match("220", ["22.0"], "strict")
    assert exact_match("5", ["-5"], "squad")
    assert not exact_match("5", ["-5"], "strict")
    assert exact_match("\u22125", ["-5"], "strict")


def test_trl_5224_generated_ids_are_never_decoded_and_encoded_again(
    frame: ChatFrame, index: SearchIndex, scripted: Any, call: Any
) -> None:
    """Ids that no tokenizer would give for their text come back as they were."""
    text = call("browser.search", '{"query": "Evil"}')
    letters = [frame.tokenizer(character, add_special_tokens=False)["input_ids"] for character in text]
    odd = [i for ids in letters for i in ids] + [frame.stop_ids[0]]
    usual = frame.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(odd) > 1.5 * len(usual)
    from trace_fast.trainer.engines.engine import FinishReason, Generation

    spelled = Generation(np.asarray(odd), np.full(len(odd), -0.5, dtype=np.float32), FinishReason.STOP)
    engine = scripted(frame, {QUESTION: [spelled, "<answer>Bern</answer>"]})
    rollout = _run(frame, index, engine)
    assert rollout.extra["calls"] == {"browser.search": 1}
    prompt = len(frame.prompt(QUESTION).ids)
    assert rollout.input_ids[prompt : prompt + len(odd)].tolist() == odd
    assert engine.requests[1][0].prompt_ids[prompt : prompt + len(odd)].tolist() == odd


def test_trl_4970_the_mask_comes_from_who_wrote_a_token(
    frame: ChatFrame, index: SearchIndex, scripted: Any, call: Any
) -> None:
    """The policy repeats what the environment says, id by id: only the policy's copy is trained."""
    said = frame.tokenizer.decode(frame.prompt(QUESTION).ids[:20])
    rollout = _run(frame, index, scripted(frame, {QUESTION: [f"{said} <answer>Bern</answer>"]}))
    prompt = len(frame.prompt(QUESTION).ids)
    assert not rollout.loss_mask[:prompt].any()
    assert rollout.loss_mask[prompt:].all()
    assert set(rollout.input_ids[prompt:].tolist()) & set(rollout.input_ids[:20].tolist())


def test_a_document_cannot_end_the_turn_or_speak_as_the_policy(
    frame: ChatFrame, index: SearchIndex, scripted: Any, call: Any
) -> None:
    opened = [call("browser.search", '{"query": "Evil"}'), call("browser.open", '{"id": 0, "loc": 0}')]
    rollout = _run(frame, index, scripted(frame, {QUESTION: [*opened, "<answer>Bern</answer>"]}))
    ends = int((rollout.input_ids == frame.stop_ids[0]).sum())
    assert ends == 2 + 2 + 2 + 1  # system and user, two calls, two results, the answer
