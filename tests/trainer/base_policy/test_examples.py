"""Readings, drills and transcripts: made by the real browser, read back by the strict parser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from trace_fast.formats.answers import encode
from trace_fast.trainer.base_policy.drills import DrillMaker
from trace_fast.trainer.base_policy.examples import READ, Example
from trace_fast.trainer.base_policy.experiment import harness_config, questions_of
from trace_fast.trainer.base_policy.library import Library
from trace_fast.trainer.base_policy.reading import Reader
from trace_fast.trainer.base_policy.settings import TEMPLATES
from trace_fast.trainer.base_policy.wandering import Wanderer, asked_for
from trace_fast.trainer.docworld import Question
from trace_fast.trainer.docworld.dice import Dice
from trace_fast.trainer.docworld.schema import RELATIONS
from trace_fast.trainer.harness import ChatFrame
from trace_fast.trainer.harness.actions import ActionParser, Answer
from trace_fast.trainer.harness.call_formats import Call
from trace_fast.trainer.search.tools import SEARCH

_MESSAGE = re.compile(r"<\|im_start\|> (\w+)\n (.*?)<\|im_end\|>", re.DOTALL)  # as it is decoded


def messages(frame: ChatFrame, example: Example) -> list[tuple[str, str]]:
    return _MESSAGE.findall(frame.tokenizer.decode(example.ids))


def again(frame: ChatFrame, text: str) -> str:
    """The text as it is decoded, in the middle of a longer one."""
    return frame.tokenizer.decode(encode(frame.tokenizer, text)).strip()


@pytest.fixture(scope="module")
def questions(library: Library) -> list[Question]:
    return questions_of(library.world, "train")


@pytest.fixture(scope="module")
def transcripts(library: Library, frame: ChatFrame, questions: list[Question]) -> list[Example]:
    wanderer = Wanderer(library, frame, harness_config(), Dice("test"))
    return list(wanderer.transcripts(questions, 60, lookups=0.5))


def cleaned(call: Call) -> dict[str, Any]:
    """The arguments without the space that decoding put before a query."""
    return {key: value.strip() if isinstance(value, str) else value for key, value in call.arguments.items()}


def written(frame: ChatFrame, example: Example) -> Iterator[str]:
    yield from (text for role, text in messages(frame, example) if role == "assistant")


def test_transcripts_are_read_by_the_strict_parser_without_an_error(
    frame: ChatFrame, transcripts: list[Example]
) -> None:
    parser = ActionParser(frame.call_format, repair=False, thinking_open=False)
    for example in transcripts:
        *calls, answer = [parser.parse(text) for text in written(frame, example)]
        assert all(isinstance(parsed.action, Call) and not parsed.repairs for parsed in calls)
        assert 1 <= len(calls) <= harness_config().max_turns
        assert isinstance(answer.action, Answer)
        assert answer.action.well_formed


def test_observations_are_what_the_browser_says_to_these_calls(
    library: Library, frame: ChatFrame, transcripts: list[Example]
) -> None:
    parser = ActionParser(frame.call_format, repair=False, thinking_open=False)
    config = harness_config()
    for example in transcripts:
        browser = library.browser(config.observation_tokens, frame.count_tokens)
        said = [text for role, text in messages(frame, example) if role == "tool"]
        calls = [parser.parse(text).action for text in written(frame, example)][:-1]
        expected = [browser.call(call.name, cleaned(call)).text for call in calls if isinstance(call, Call)]
        assert said == [again(frame, text) for text in expected]
        assert max(map(frame.count_tokens, expected)) <= config.observation_tokens


def test_weights_follow_who_wrote_a_token(frame: ChatFrame, transcripts: list[Example]) -> None:
    for example in transcripts:
        text = frame.tokenizer.decode(example.ids[example.weights == 1.0])
        assert text == "".join(f"{message}<|im_end|>" for message in written(frame, example))
        assert set(example.weights.tolist()) <= {0.0, float(np.float32(READ)), 1.0}
        question = next(text for role, text in messages(frame, example) if role == "user")
        prompt = frame.prompt(question).ids
        assert np.array_equal(example.ids[: len(prompt)], prompt)
        assert not example.weights[: len(prompt)].any()


def test_a_transcript_fits_into_an_episode(transcripts: list[Example]) -> None:
    assert max(len(example.ids) for example in transcripts) <= harness_config().max_tokens


def test_queries_are_words_of_the_question_and_of_what_was_seen(frame: ChatFrame, transcripts: list[Example]) -> None:
    parser = ActionParser(frame.call_format, repair=False, thinking_open=False)
    for example in transcripts:
        seen: set[str] = set()
        for role, text in messages(frame, example):
            action = parser.parse(text).action if role == "assistant" else None
            if isinstance(action, Call) and action.name == SEARCH:
                assert set(re.findall(r"\w+", action.arguments["query"])) <= seen
            seen |= set(re.findall(r"\w+", text))


def test_the_answer_is_in_what_was_seen_or_proved_by_it(frame: ChatFrame, transcripts: list[Example]) -> None:
    unseen = 0
    for example in transcripts:
        *before, (_, last) = messages(frame, example)
        answer = last.removeprefix("<answer>").removesuffix("</answer>").strip()
        unseen += answer not in "\n".join(text for role, text in before if role == "tool")
    assert unseen <= len(transcripts) // 20  # "nothing", where every search came back empty


def test_facts_shown_are_those_whose_lines_are_in_the_text(library: Library) -> None:
    browser = library.browser(400, lambda text: len(text) // 4)
    for document in library.world.documents[:80]:
        shown = library.shown(library.page(document.docid, browser))
        assert shown == list(dict.fromkeys(document.facts))
    cut = library.browser(64, lambda text: len(text) // 2)
    long = max(library.world.documents, key=lambda document: len(document.facts))
    shown = library.shown(library.page(long.docid, cut))
    assert shown == list(long.facts)[: len(shown)]
    assert len(shown) < len(long.facts)


def test_readings_ask_for_what_their_text_states(library: Library, frame: ChatFrame, questions: list[Question]) -> None:
    reader = Reader(library, frame, harness_config(), Dice("test"))
    golds = {lookup.question: lookup.answers[0] for lookup in library.lookups.values()}
    golds |= {question.question: question.answers[0] for question in questions}
    asked = 0
    for example in reader.examples(questions, 60, hops=0.3):
        text = frame.tokenizer.decode(example.ids)
        turns = messages(frame, example)
        for (role, question), (_, answer) in pairwise(turns):
            if role == "user" and answer.startswith("<answer>"):
                asked += 1
                gold = golds[question]
                assert answer == again(frame, f"<answer>{gold}</answer>")
                assert text.index(again(frame, gold)) < text.index(question)
        only = frame.tokenizer.decode(example.ids[example.weights == 1.0])
        queries = re.findall(r'"query": " ([^"]+)"', only)
        assert set(queries) <= {entity.name for entity in library.world.entities.values()}
        assert all(text.index(query) < text.index("<tool_call>") for query in queries)
    assert asked > 60


def test_drills_repeat_or_ask_what_they_tell(library: Library, frame: ChatFrame) -> None:
    golds = {lookup.question: lookup.answers[0] for lookup in library.lookups.values()}
    kinds = {"repeated": 0, "behind": 0, "in front": 0}
    for example in DrillMaker(library, frame, Dice("test")).examples(200):
        text = frame.tokenizer.decode(example.ids)
        told = [line.strip() for line in text.partition("<|im_start|>")[0].split("\n")]
        if "<|im_start|>" not in text:
            kinds["repeated"] += 1
            assert sorted(told[: len(told) // 2]) == sorted(told[len(told) // 2 :])
            continue
        kind = "behind" if told[0] else "in front"
        kinds[kind] += 1
        turns = messages(frame, example)
        if kind == "behind":
            shown = ["\n".join(told)] * (len(turns) // 2)
            asked, answers = turns[0::2], turns[1::2]
        else:
            asked, calls, seen, answers = (turns[i::4] for i in range(4))
            shown = [text for _, text in seen]
            for (_, question), (role, call) in zip(asked, calls, strict=True):
                assert role == "assistant"
                query = re.findall(r'"query": " ([^"]+)"', call)[0]
                assert set(query.split()) <= set(again(frame, question.replace("?", "")).split())
        for (asking, question), (role, answer), seen_text in zip(asked, answers, shown, strict=True):
            assert (asking, role) == ("user", "assistant")
            assert answer == again(frame, f"<answer>{golds[question]}</answer>")
            assert again(frame, golds[question]) in seen_text
        own = [text for role, text in turns if role == "assistant"]
        assert frame.tokenizer.decode(example.ids[example.weights == 1.0]) == "".join(f"{a}<|im_end|>" for a in own)
    assert min(kinds.values()) > 3, kinds


def test_every_relation_is_drilled(library: Library, frame: ChatFrame) -> None:
    asked = {fact.relation: 0 for fact in library.lookups}
    relations = {lookup.question: fact.relation for fact, lookup in library.lookups.items()}
    for example in DrillMaker(library, frame, Dice("test")).examples(300):
        for role, text in messages(frame, example):
            if role == "user":
                asked[relations[text]] += 1
    assert min(asked.values()) > 10, asked


def test_what_a_question_asks_for(questions: list[Question], library: Library) -> None:
    for question in questions:
        relation, about = asked_for(question)
        kind = RELATIONS[relation].subject if about else RELATIONS[relation].object
        entity = {entity.name: entity for entity in library.world.entities.values()}.get(question.answers[0])
        assert (entity.kind if entity is not None else kind) == kind
        assert question.template in TEMPLATES
