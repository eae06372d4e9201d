"""Every question is answered by what its documents say, needs each of them, and shares no entity with another split."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, get_args

import pytest

from trace_fast.errors import ConfigError
from trace_fast.trainer.docworld import SPLITS, Fact, Question, Template, World, WorldSize, make_world
from trace_fast.trainer.docworld.questions import HOPS, gives_away, support_of
from trace_fast.trainer.docworld.solver import (
    Atom,
    Count,
    Extreme,
    FactBase,
    Select,
    Var,
    needs_every_atom,
    proof,
    solve,
    values,
)


def all_questions(world: World) -> list[Question]:
    return [question for split in SPLITS for question in world.questions(split)]


def answer_in_words(world: World, question: Question, base: FactBase, without: str | None = None) -> str | None:
    answer = solve(question.query, base, without=without)
    return world.entities[str(answer)].name if answer in world.entities else None if answer is None else str(answer)


def test_the_texts_alone_give_the_answer(world: World, read_base: FactBase) -> None:
    for question in all_questions(world):
        assert answer_in_words(world, question, read_base) == question.answers[0], question


def test_the_support_alone_gives_the_answer(world: World, read_base: FactBase) -> None:
    for question in all_questions(world):
        assert answer_in_words(world, question, read_base.only(question.support)) == question.answers[0], question


def test_removal_of_any_support_document_loses_the_answer_and_of_no_other(world: World, read_base: FactBase) -> None:
    for question in all_questions(world):
        assert 2 <= len(set(question.support)) == len(question.support) == question.hops <= 6
        lost = {
            document.docid
            for document in world.documents
            if answer_in_words(world, question, read_base, without=document.docid) != question.answers[0]
        }
        assert lost == set(question.support), question


def test_no_condition_can_be_left_out(world: World, read_base: FactBase) -> None:
    for question in all_questions(world):
        assert needs_every_atom(question.query, read_base), question


def test_conditions_of_an_intersection_fit_several_entities_each(world: World, read_base: FactBase) -> None:
    checked = 0
    for question in all_questions(world):
        if question.template != "intersection":
            continue
        assert isinstance(question.query, Select)
        for atom in question.query.atoms:
            if atom.subject == question.query.target and not isinstance(atom.object, Var):
                assert len(values(Select(question.query.target, (atom,)), read_base, limit=2)) == 2, question
                checked += 1
    assert checked > 20


def test_answers_are_not_in_the_question_but_in_its_documents(world: World) -> None:
    texts = {document.docid: f"{document.title}\n{document.text}" for document in world.documents}
    for question in all_questions(world):
        for answer in question.answers:
            assert not re.search(rf"\b{re.escape(answer)}\b", question.question, re.IGNORECASE), question
        if question.template != "filtered_count":
            assert any(question.answers[0] in texts[docid] for docid in question.support), question


def test_an_answer_in_the_question_is_noticed() -> None:
    assert gives_away("Who made the novel of Pat Holm?", ("Pat Holm",))
    assert gives_away("Which city is like kel?", ("Kel",))
    assert gives_away("Is it 1345?", ("x", "1345"))
    assert not gives_away("Which work of the 1340s shows Kelaburg?", ("Kel", "1340"))


def test_support_is_refused_where_documents_stand_in_for_one_another() -> None:
    work, born = Fact("work1", "creator", "person1"), Fact("person1", "born_year", 1345)
    query = Select(Var("year"), (Atom("work1", "creator", Var("p")), Atom(Var("p"), "born_year", Var("year"))))
    assert support_of(query, FactBase([("d1", [work]), ("d2", [born])])) == ("d1", "d2")
    assert support_of(query, FactBase([("d1", [work, born])])) is None  # one document is enough
    assert support_of(query, FactBase([("d1", [work]), ("d2", [born]), ("d3", [born])])) is None
    chain = [Fact(f"person{i}", "teacher", f"person{i + 1}") for i in range(7)]
    atoms = tuple(Atom("person0" if i == 0 else Var(str(i)), "teacher", Var(str(i + 1))) for i in range(7))
    documents = [(f"d{i}", [fact]) for i, fact in enumerate(chain)]
    assert support_of(Select(Var("6"), atoms[:6]), FactBase(documents)) == tuple(f"d{i}" for i in range(6))
    assert support_of(Select(Var("7"), atoms), FactBase(documents)) is None  # seven


def parts(query: Select) -> list[Select]:
    """The descriptions inside ``query``: where an atom joins two variables, the part that hangs on the target by it."""
    found = []
    for joint in query.atoms:
        if isinstance(joint.subject, Var) and isinstance(joint.object, Var):
            for end, other in ((joint.subject, joint.object), (joint.object, joint.subject)):
                reached, atoms = {end}, [atom for atom in query.atoms if atom is not joint]
                for _ in query.atoms:
                    reached |= {t for a in atoms if {a.subject, a.object} & reached for t in (a.subject, a.object)}
                    reached = {term for term in reached if isinstance(term, Var)}
                if query.target not in reached | {end} and other not in reached:
                    hanging = tuple(atom for atom in atoms if {atom.subject, atom.object} & reached)
                    found.append(Select(end, hanging))
    return found


def test_every_definite_description_fits_one_entity(world: World, read_base: FactBase) -> None:
    checked = 0
    for question in all_questions(world):
        if isinstance(question.query, Count):  # it may say "someone who"
            continue
        query = question.query
        selects = [query] if isinstance(query, Select) else [query.first, query.second]
        for part in (part for select in selects for part in parts(select)):
            assert len(values(part, read_base)) == 1, (question, part)
            checked += 1
    assert checked > 50


def test_questions_are_obfuscated(world: World) -> None:
    seen: Counter[str] = Counter()
    for question in all_questions(world):
        assert question.obfuscations, question
        seen.update(question.obfuscations)
        if "name_mask" in question.obfuscations:  # something on the way is not named
            assert any(name not in question.question for name in question.entities), question
        years = re.findall(r"(\w+ )(\d{4})\b(?!s)", question.question)  # blurred: only as a bound, and round
        assert all(word in ("before ", "after ") and year[2:] in ("00", "50") for word, year in years), question
    assert set(seen) == {"name_mask", "role", "time_blur", "qualitative"}


def test_splits_share_no_entity(world: World) -> None:
    split_of = {entity.name: entity.split for entity in world.entities.values()}
    for split in SPLITS:
        for question in world.questions(split):
            ids = {end for fact in proof(question.query, world.base) for end in (fact.subject, fact.object)}
            names = {world.entities[str(end)].name for end in ids if end in world.entities}
            assert names == set(question.entities)
            assert {split_of[name] for name in names} == {split}
    texts = {split: "\n".join(question.question for question in world.questions(split)) for split in SPLITS}
    for name, split in split_of.items():
        for other in SPLITS:
            if other != split:  # whole titles: one may begin with another
                assert not re.search(rf"(?<! )\b{re.escape(name)}\b(?! of| and)", texts[other]), name


def test_all_templates_and_hops_occur(small_world: World) -> None:
    world = small_world
    for split in SPLITS:
        questions = world.questions(split)
        templates = Counter(question.template for question in questions)
        assert set(templates) == set(get_args(Template))
        assert max(templates.values()) - min(templates.values()) <= 1
        assert {question.hops for question in questions} == set(HOPS)
        assert len({question.question for question in questions}) == len(questions)
        assert len({question.id for question in questions}) == len(questions)
    numbers = [len(world.questions(split)) for split in SPLITS]
    assert numbers == [1000, 100, 100]
    both = Counter((question.template, question.hops) for question in world.questions("train"))
    for template in get_args(Template):
        assert sum(both[template, hops] > 0 for hops in HOPS) >= 4, both


def test_logical_forms_belong_to_their_templates(world: World) -> None:
    forms = {"filtered_count": Count, "comparison": Extreme}
    for question in all_questions(world):
        assert isinstance(question.query, forms.get(question.template, Select)), question
        if question.template == "filtered_count":
            assert 1 <= int(question.answers[0]) <= 9


@pytest.mark.parametrize("seed", [2, 3])
def test_other_seeds_hold_too(seed: int) -> None:
    world = make_world(seed, "tiny")
    for question in all_questions(world):
        assert answer_in_words(world, question, world.base) == question.answers[0]
        for docid in question.support:
            assert answer_in_words(world, question, world.base, without=docid) != question.answers[0]


def test_guessing_does_not_pay(small_world: World) -> None:
    for template in get_args(Template):
        answers = Counter(q.answers[0] for q in small_world.questions("train") if q.template == template)
        assert max(answers.values()) <= 0.4 * answers.total(), (template, answers.most_common(3))


def test_hop_weights_are_followed() -> None:
    world = make_world(0, WorldSize((2, 1, 1), (60, 5, 5), (1.0, 0.0, 0.0, 0.0, 0.0)))
    chains = ("bridge_entity", "intersection", "reverse_lookup")  # the others cannot always do with two
    hops = Counter(question.hops for question in world.questions("train") if question.template in chains)
    assert hops == {2: 36}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_world(0, "huge"), "expected one of tiny, small, medium, large, got 'huge'"),
        (lambda: make_world("0", "tiny"), "seed: expected an integer, got '0'"),  # type: ignore[arg-type]
        (lambda: WorldSize((1, 0, 1), (1, 1, 1)), r"lands: expected 3 numbers >= 1, got \(1, 0, 1\)"),
        (lambda: WorldSize((1, 1, 1), (1, 1)), "questions: expected 3 numbers"),  # type: ignore[arg-type]
        (lambda: WorldSize((1, 1, 1), (1, 1, 1), (0.0, 0.0, 0.0, 0.0, 0.0)), "hop_weights: expected 5 weights"),
        (lambda: make_world(0, WorldSize((1, 1, 1), (2000, 1, 1))), r"400 \w+ questions in split train, found \d+;"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_an_unknown_split_is_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="expected one of train, validation, test, got 'dev'"):
        world.questions("dev")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got 'dev'"):
        list(world.lookups("dev"))  # type: ignore[arg-type]
