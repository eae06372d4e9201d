"""The documents state the facts that the world was made of, no more and no less, and the facts fit together."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

from trace_fast.trainer.docworld import Fact, World
from trace_fast.trainer.docworld.schema import BANDS, RELATIONS


def numbers(world: World, relation: str) -> dict[str, int]:
    facts = {fact for document in world.documents for fact in document.facts if fact.relation == relation}
    return {fact.subject: int(fact.object) for fact in facts}


def objects(world: World, relation: str) -> dict[str, str]:
    facts = {fact for document in world.documents for fact in document.facts if fact.relation == relation}
    return {fact.subject: str(fact.object) for fact in facts}


def test_a_reader_gets_exactly_the_facts_back(world: World, reader: Any) -> None:
    for document in world.documents:
        assert Counter(reader.read(document)) == Counter(document.facts), document


def test_the_reader_would_notice(world: World, reader: Any) -> None:
    document = next(document for document in world.documents if len(document.facts) > 2)
    lines = document.text.split("\n")
    without = type(document)(document.docid, document.url, document.title, "\n".join(lines[:1] + lines[2:]), ())
    assert len(reader.read(without)) == len(document.facts) - 1


def test_every_relation_is_functional_typed_and_told(world: World) -> None:
    facts = {fact for document in world.documents for fact in document.facts}
    assert len({(fact.subject, fact.relation) for fact in facts}) == len(facts)
    assert {fact.relation for fact in facts} == set(RELATIONS)
    for fact in facts:
        relation = RELATIONS[fact.relation]
        assert world.entities[fact.subject].kind == relation.subject
        if relation.links:
            assert world.entities[str(fact.object)].kind == relation.object
        elif relation.object == "word":
            assert fact.object in relation.words
        else:
            assert isinstance(fact.object, int)


def test_facts_are_spread_and_some_are_told_twice(world: World) -> None:
    sources = Counter(fact for document in world.documents for fact in document.facts)
    twice = [fact for fact, times in sources.items() if times == 2]
    assert max(sources.values()) == 2
    assert 0.02 < len(twice) / len(sources) < 0.2
    assert all(RELATIONS[fact.relation].links for fact in twice)
    pages = {document.title: document for document in world.documents}
    elsewhere = [fact for fact in sources if fact not in pages[world.entities[fact.subject].name].facts]
    assert 0.3 < len(elsewhere) / len(sources) < 0.7
    assert sum(not document.facts for document in world.documents) >= 0.1 * len(world.documents)


def test_years_fit_together(world: World) -> None:
    born, finished = numbers(world, "born_year"), numbers(world, "finished")
    founded, first_given = numbers(world, "company_founded"), numbers(world, "first_given")
    for pupil, teacher in objects(world, "teacher").items():
        assert 15 <= born[pupil] - born[teacher] <= 50
    for company, founder in objects(world, "founder").items():
        assert 20 <= founded[company] - born[founder] <= 50
    for work, creator in objects(world, "creator").items():
        assert 20 <= finished[work] - born[creator] <= 60
    for work, company in objects(world, "commissioner").items():
        assert founded[company] <= finished[work]
    for work, prize in objects(world, "won").items():
        assert first_given[prize] <= finished[work]
    mayors = objects(world, "mayor")
    assert len(set(mayors.values())) == len(mayors)
    for thousands in numbers(world, "population").values():
        assert any(band.low <= thousands <= band.high for band in BANDS)


def test_names_are_unique_and_people_have_namesakes(world: World) -> None:
    names = [entity.name.lower() for entity in world.entities.values()]
    assert len(set(names)) == len(names)
    families = Counter(entity.name.split()[1] for entity in world.entities.values() if entity.kind == "person")
    assert sum(times > 1 for times in families.values()) >= 5


def test_documents_are_short_lines_with_unique_ids(world: World) -> None:
    assert len({document.docid for document in world.documents}) == len(world.documents)
    assert len({document.url for document in world.documents}) == len(world.documents)
    for document in world.documents:
        assert document.title.strip() == document.title != ""
        lines = document.text.split("\n")
        assert 1 <= len(lines) <= 12
        for line in lines:
            assert re.fullmatch(r"[A-Z][^{}]*\.", line), line
            assert len(line.split()) <= 24


def test_the_order_of_documents_does_not_follow_the_entities(world: World) -> None:
    entity_of = {entity.name: number for number, entity in enumerate(world.entities.values())}
    order = [entity_of[document.title] for document in world.documents if document.title in entity_of]
    rising = sum(a < b for a, b in itertools.pairwise(order))
    assert len(order) == len(world.entities)
    assert abs(rising - len(order) / 2) < 3 * len(order) ** 0.5


def test_the_vocabulary_beside_names_is_small(small_world: World) -> None:
    named = {word.lower() for entity in small_world.entities.values() for word in entity.name.split()}
    texts = [f"{document.title} {document.text}" for document in small_world.documents]
    texts += [question.question for question in small_world.questions("train")]
    words = {word.lower() for text in texts for word in re.findall(r"[A-Za-z]+", text)}
    assert 100 < len(words - named) < 350


def test_every_fact_has_a_lookup(world: World) -> None:
    lookups = [lookup for split in ("train", "validation", "test") for lookup in world.lookups(split)]
    facts = {fact for document in world.documents for fact in document.facts}
    assert Counter(lookup.fact for lookup in lookups) == Counter(facts)
    texts = {document.docid: document.text for document in world.documents}
    stated = {document.docid: document.facts for document in world.documents}
    for lookup in lookups:
        subject = world.entities[lookup.fact.subject]
        assert subject.name in lookup.question
        assert lookup.answers[0] not in lookup.question.replace(subject.name, "")
        for docid in lookup.docids:
            assert lookup.fact in stated[docid]
            assert lookup.answers[0] in texts[docid]


def test_facts_of_a_document_stand_in_its_order(world: World, reader: Any) -> None:
    for document in world.documents:
        facts: list[Fact] = reader.read(document)
        assert tuple(facts) == document.facts
