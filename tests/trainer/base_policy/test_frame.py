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
    "text", ["Garetu Velulgast", "1328", "The Bell and the\n12: Quiet Letter", "miller", "Ünïcode → ok", '{"id": 3}}']
)
def test_text_comes_back_but_for_spaces(frame: ChatFrame, text: str) -> None:
    decoded = frame.tokenizer.decode(encode(frame.tokenizer, text))
    assert "".join(decoded.split()) == "".join(text.split())
    assert np.array_equal(encode(frame.tokenizer, decoded), encode(frame.tokenizer, text))


@pytest.mark.parametrize(
    ("before", "after"),
    [("was made by ", "."), ("\n", " was"), ("<answer>", "</answer>"), ('{"query": "', '"}}'), ("for '", "':")],
)
def test_a_name_has_the_same_ids_everywhere(frame: ChatFrame, library: Library, before: str, after: str) -> None:
    names = [entity.name for entity in library.world.entities.values()]
    for name in [*names, "1328", "miller"]:
        alone = encode(frame.tokenizer, name)
        ids = encode(frame.tokenizer, before + name + after)
        assert any(np.array_equal(ids[i : i + len(alone)], alone) for i in range(len(ids))), name
    assert len(names) > 100


def test_no_answer_of_any_split_merges_with_the_opener(frame: ChatFrame, library: Library) -> None:
    answers = [library.spelled(fact.object) for document in library.world.documents for fact in document.facts]
    opener = frame.opener_ids
    for answer, ids in zip(answers, frame.answers(answers), strict=True):
        assert np.array_equal(encode(frame.tokenizer, frame.opener_text + answer), np.concatenate([opener, ids]))


def test_no_whole_name_of_a_person_is_one_token(frame: ChatFrame, library: Library) -> None:
    persons = [entity.name for entity in library.world.entities.values() if entity.kind == "person"]
    assert min(len(encode(frame.tokenizer, name)) for name in persons) >= 4
