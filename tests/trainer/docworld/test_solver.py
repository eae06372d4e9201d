"""The solver against enumeration, and irreplaceability on facts small enough to check by eye."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_fast.trainer.docworld import Fact
from trace_fast.trainer.docworld.solver import (
    Atom,
    Count,
    Extreme,
    FactBase,
    Select,
    Span,
    Var,
    irreplaceable,
    needs_every_atom,
    proof,
    solve,
    values,
)

X, Y, Z = Var("x"), Var("y"), Var("z")
THINGS = ("a", "b", "c", 5, 7)


def enumerated(query: Select | Count, facts: set[Fact]) -> set[str | int]:
    """Values of the target, by trying every assignment of every variable."""
    terms = {term for atom in query.atoms for term in (atom.subject, atom.object)}
    variables = [variable for variable in (X, Y, Z) if variable in terms]
    found = set()
    for assignment in itertools.product(THINGS, repeat=len(variables)):
        bound = dict(zip(variables, assignment, strict=True))
        if all(holds(atom, bound, facts) for atom in query.atoms):
            found.add(bound[query.target])
    return found


def holds(atom: Atom, bound: dict, facts: set[Fact]) -> bool:
    subject = bound.get(atom.subject, atom.subject)
    if isinstance(atom.object, Span):
        in_span = (v for v in THINGS if isinstance(v, int) and atom.object.low <= v <= atom.object.high)
        return any(Fact(subject, atom.relation, value) in facts for value in in_span)
    return Fact(subject, atom.relation, bound.get(atom.object, atom.object)) in facts


NAMES = st.sampled_from(["a", "b", "c"])
FACTS = st.sets(st.builds(Fact, NAMES, st.sampled_from(["r", "s"]), st.sampled_from(THINGS)), max_size=12)
OBJECTS = st.sampled_from([X, Y, Z, "a", "b", 5, Span(4, 6), Span(5, 7)])
ATOMS = st.lists(
    st.builds(Atom, st.sampled_from([X, Y, Z, "a"]), st.sampled_from(["r", "s"]), OBJECTS), min_size=0, max_size=3
)


@given(FACTS, ATOMS, st.builds(Atom, st.just(X), st.sampled_from(["r", "s"]), OBJECTS))
def test_values_are_those_of_enumeration(facts: set[Fact], atoms: list[Atom], first: Atom) -> None:
    query = Select(X, (first, *atoms))
    base = FactBase([("d", sorted(facts, key=repr))])
    expected = enumerated(query, facts)
    assert set(values(query, base)) == expected
    assert solve(query, base) == (next(iter(expected)) if len(expected) == 1 else None)
    assert solve(Count(X, query.atoms), base) == (len(expected) or None)


EMPLOYS, BORN = Fact("pat", "employer", "firm"), Fact("pat", "born_in", "town")
FOUNDED = Fact("firm", "company_founded", 1400)


def test_a_document_told_twice_is_replaceable() -> None:
    query = Select(Y, (Atom(X, "born_in", "town"), Atom(X, "employer", Y)))
    once = FactBase([("d1", [EMPLOYS]), ("d2", [BORN])])
    assert irreplaceable(query, once) == ["d2", "d1"]
    twice = FactBase([("d1", [EMPLOYS]), ("d2", [BORN]), ("d3", [FOUNDED, EMPLOYS])])
    assert solve(query, twice) == "firm"
    assert irreplaceable(query, twice) == ["d2"]
    assert solve(query, twice.only(["d2"])) is None
    assert solve(query, twice.only(["d2", "d3"])) == "firm"


def test_a_second_fit_takes_the_answer_away() -> None:
    query = Select(X, (Atom(X, "born_in", "town"),))
    assert solve(query, FactBase([("d1", [BORN])])) == "pat"
    assert solve(query, FactBase([("d1", [BORN]), ("d2", [Fact("kim", "born_in", "town")])])) is None


def test_counting_needs_every_member_and_finds_none_in_nothing() -> None:
    kim = [Fact("kim", "born_in", "town"), Fact("kim", "trade", "miller")]
    base = FactBase([("d1", [BORN]), ("d2", [Fact("pat", "trade", "miller")]), ("d3", kim)])
    query = Count(X, (Atom(X, "trade", "miller"), Atom(X, "born_in", "town")))
    assert solve(query, base) == 2
    assert sorted(irreplaceable(query, base)) == ["d1", "d2", "d3"]
    assert solve(query, base, without="d3") == 1
    assert solve(Count(X, (Atom(X, "trade", "clerk"),)), base) is None


@pytest.mark.parametrize(("which", "winner"), [("least", "old"), ("most", "new")])
def test_comparison(which: str, winner: str) -> None:
    base = FactBase(
        [
            ("d1", [Fact("work1", "commissioner", "old")]),
            ("d2", [Fact("work2", "commissioner", "new")]),
            ("d3", [Fact("old", "company_founded", 1350)]),
            ("d4", [Fact("new", "company_founded", 1351)]),
        ]
    )
    first, second = (Select(X, (Atom(work, "commissioner", X),)) for work in ("work1", "work2"))
    query = Extreme(first, second, "company_founded", which)  # type: ignore[arg-type]
    assert solve(query, base) == winner
    assert sorted(irreplaceable(query, base)) == ["d1", "d2", "d3", "d4"]
    assert len(proof(query, base)) == 4
    assert solve(Extreme(first, first, "company_founded", "least"), base) is None  # one entity is not two


def test_a_condition_that_changes_nothing_is_found() -> None:
    base = FactBase([("d1", [BORN, EMPLOYS]), ("d2", [Fact("kim", "employer", "firm")])])
    both = Select(X, (Atom(X, "employer", "firm"), Atom(X, "born_in", "town")))
    assert solve(both, base) == "pat"
    assert not needs_every_atom(both, base)  # the birthplace alone is enough
    assert needs_every_atom(Select(X, (Atom(X, "born_in", "town"),)), base)
