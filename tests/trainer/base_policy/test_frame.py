"""The tokenizer and its template, as the harness needs them."""

from __future__ import annotations

import numpy as np
import pytest

from trace_fast.formats.answers import encode
from trace_fast.trainer.base_policy.library import Library
from trace_fast.trainer.harness import ChatFrame


def test_the_template_has_parts_that_the_harness_tells_apart(frame: ChatFrame) -> None:
    assert frame.call_format == "json_tag"
    assert frame.end_text == "<|im_end|>"
    assert not frame.thinking_open
    assert frame.opener_text == "<|im_start|>assistant\n<answer>"


def test_what_stands_around_a_question_costs_less_than_60_tokens(frame: ChatFrame) -> None:
    piece = frame.prompt("")
    assert len(piece.ids) < 60
    assert frame.tokenizer.decode(piece.ids).count("browser.") == 3


@pytest.mark.parametrize(
    "text", ["Garetu Velulgast", "1328", "The Bell and the Quiet Letter", "miller", "Ünïcode → ok", " \n\t"]
)
def test_text_comes_back_as_it_was(frame: ChatFrame, text: str) -> None:
    assert frame.tokenizer.decode(encode(frame.tokenizer, text)) == text


def test_a_name_has_the_same_ids_everywhere_but_for_its_first_letters(frame: ChatFrame, library: Library) -> None:
    names = [entity.name for entity in library.world.entities.values()]
    for name in names:
        tail = encode(frame.tokenizer, name[3:])
        for before, after in (("was made by ", "."), ("\n", " was"), ("<answer>", "</answer>"), ('{"query": "', '"}}')):
            ids = encode(frame.tokenizer, before + name + after)
            assert any(np.array_equal(ids[i : i + len(tail)], tail) for i in range(len(ids))), (name, before)
    assert len(names) > 100


def test_no_answer_of_any_split_merges_with_the_opener(frame: ChatFrame, library: Library) -> None:
    answers = [library.spelled(fact.object) for document in library.world.documents for fact in document.facts]
    opener = frame.opener_ids
    for answer, ids in zip(answers, frame.answers(answers), strict=True):
        assert np.array_equal(encode(frame.tokenizer, frame.opener_text + answer), np.concatenate([opener, ids]))


def test_no_whole_name_of_a_person_is_one_token(frame: ChatFrame, library: Library) -> None:
    persons = [entity.name for entity in library.world.entities.values() if entity.kind == "person"]
    assert min(len(encode(frame.tokenizer, name)) for name in persons) >= 4
