"""Answers questions in logical form from the facts that documents state, and says which documents it cannot do without.

A question is a conjunction of atoms (subject, relation, object) over variables; ``Span`` as an object accepts a range
of numbers. Three forms: the one value of a variable (``Select``), the number of its values (``Count``), and the
entity with the smaller or larger number of two (``Extreme``). The world is closed: what no document states is false.

A document is *irreplaceable* for a question when the answer from all other documents is not the same. Atoms are
positive, so taking documents away can only take solutions away; hence only documents that state a fact of some
solution can be irreplaceable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trace_fast.trainer.docworld.schema import Fact


@dataclass(frozen=True, slots=True)
class Var:
    """Stands for whatever makes all atoms true."""

    name: str


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers from ``low`` to ``high``, inclusive."""

    low: int
    high: int


Value = str | int
Bindings = dict[Var, Value]


@dataclass(frozen=True, slots=True)
class Atom:
    subject: str | Var
    relation: str
    object: Value | Var | Span


@dataclass(frozen=True, slots=True)
class Select:
    """The value of ``target``; has an answer when exactly one value makes all atoms true."""

    target: Var
    atoms: tuple[Atom, ...]


@dataclass(frozen=True, slots=True)
class Count:
    """How many values of ``target`` make all atoms true; has no answer when none does."""

    target: Var
    atoms: tuple[Atom, ...]


@dataclass(frozen=True, slots=True)
class Extreme:
    """The one of two entities whose number ``relation`` is smaller (``least``) or larger (``most``)."""

    first: Select
    second: Select
    relation: str
    which: Literal["least", "most"]


Query = Select | Count | Extreme


class FactBase:
    """Facts with the documents that state them, indexed for matching atoms.

    Args:
        stated: ``(docid, facts)`` of each document.
    """

    def __init__(self, stated: Iterable[tuple[str, Iterable[Fact]]]) -> None:
        self._stated = {docid: tuple(facts) for docid, facts in stated}
        self._documents: dict[Fact, tuple[str, ...]] = {}
        for docid, told in self._stated.items():
            for fact in told:
                self._documents[fact] = (*self._documents.get(fact, ()), docid)
        self._by_relation: dict[str, list[Fact]] = {}
        self._by_subject: dict[tuple[str, Value], list[Fact]] = {}
        self._by_object: dict[tuple[str, Value], list[Fact]] = {}
        for fact in self._documents:
            self._by_relation.setdefault(fact.relation, []).append(fact)
            self._by_subject.setdefault((fact.relation, fact.subject), []).append(fact)
            self._by_object.setdefault((fact.relation, fact.object), []).append(fact)

    def documents(self, fact: Fact) -> tuple[str, ...]:
        """Ids of the documents that state ``fact``."""
        return self._documents.get(fact, ())

    def only(self, docids: Sequence[str]) -> FactBase:
        """What is known from these documents alone."""
        return FactBase((docid, self._stated[docid]) for docid in docids)

    def about(self, relation: str, subject: Value) -> list[Fact]:
        """The facts of ``relation`` whose subject this is: at most one in a docworld; none for a number."""
        return self._by_subject.get((relation, subject), [])

    def candidates(self, atom: Atom, bindings: Mapping[Var, Value]) -> list[Fact]:
        """Facts that may match ``atom``: the shortest list that its known end gives."""
        subject = bindings.get(atom.subject) if isinstance(atom.subject, Var) else atom.subject
        if subject is not None:
            return self.about(atom.relation, subject)
        object = bindings.get(atom.object) if isinstance(atom.object, Var) else atom.object
        if object is None or isinstance(object, Span):
            return self._by_relation.get(atom.relation, [])
        return self._by_object.get((atom.relation, object), [])


def solutions(atoms: tuple[Atom, ...], facts: FactBase, without: str | None = None) -> Iterator[Bindings]:
    """Every way to bind the variables of ``atoms`` so that all are stated by a document other than ``without``."""
    yield from _extend(atoms, {}, facts, without)


def _extend(atoms: tuple[Atom, ...], bindings: Bindings, facts: FactBase, without: str | None) -> Iterator[Bindings]:
    if not atoms:
        yield bindings
        return
    chosen, fewest = 0, facts.candidates(atoms[0], bindings)
    for i in range(1, len(atoms)):  # the most selective atom first
        if len(fewest) < 2:
            break
        candidates = facts.candidates(atoms[i], bindings)
        if len(candidates) < len(fewest):
            chosen, fewest = i, candidates
    rest = atoms[:chosen] + atoms[chosen + 1 :]
    for fact in fewest:
        if without is not None and facts.documents(fact) == (without,):
            continue
        extended = _match(atoms[chosen], fact, bindings)
        if extended is not None:
            yield from _extend(rest, extended, facts, without)


def _match(atom: Atom, fact: Fact, bindings: Bindings) -> Bindings | None:
    extended = dict(bindings)
    terms: tuple[tuple[Value | Var | Span, Value], ...] = ((atom.subject, fact.subject), (atom.object, fact.object))
    for term, value in terms:
        if isinstance(term, Span):
            if not (isinstance(value, int) and term.low <= value <= term.high):
                return None
        elif isinstance(term, Var):
            if extended.setdefault(term, value) != value:
                return None
        elif term != value:
            return None
    return extended


def values(
    query: Select | Count, facts: FactBase, *, limit: int | None = None, without: str | None = None
) -> list[Value]:
    """Different values of the target, in the order found; at most ``limit``."""
    found: dict[Value, None] = {}
    for bindings in solutions(query.atoms, facts, without):
        found[bindings[query.target]] = None
        if len(found) == limit:
            break
    return list(found)


def solve(query: Query, facts: FactBase, *, without: str | None = None) -> Value | None:
    """The answer (an entity id, a word or a number), or ``None`` when there is not exactly one."""
    if isinstance(query, Count):
        return len(values(query, facts, without=without)) or None
    if isinstance(query, Select):
        found = values(query, facts, limit=2, without=without)
        return found[0] if len(found) == 1 else None
    first, second = (solve(select, facts, without=without) for select in (query.first, query.second))
    if first is None or second is None or first == second:
        return None
    numbers = [_number(query.relation, entity, facts, without) for entity in (first, second)]
    if None in numbers or numbers[0] == numbers[1]:
        return None
    first_wins = (numbers[0] < numbers[1]) == (query.which == "least")  # type: ignore[operator]
    return first if first_wins else second


def _number(relation: str, subject: Value, facts: FactBase, without: str | None) -> int | None:
    query = Select(Var("number"), (Atom(str(subject), relation, Var("number")),))
    value = solve(query, facts, without=without)
    assert value is None or isinstance(value, int), value
    return value


def proof(query: Query, facts: FactBase) -> list[Fact]:
    """All facts of all solutions, each once, in the order of the atoms."""
    if isinstance(query, Extreme):
        found = proof(query.first, facts) + proof(query.second, facts)
        for select in (query.first, query.second):
            entity = solve(select, facts)
            found += facts.about(query.relation, str(entity)) if entity is not None else []
        return list(dict.fromkeys(found))
    used: dict[Fact, None] = {}
    for bindings in solutions(query.atoms, facts):
        for atom in query.atoms:
            used.update(dict.fromkeys(f for f in facts.candidates(atom, bindings) if _match(atom, f, bindings)))
    return list(used)


def irreplaceable(query: Query, facts: FactBase) -> list[str]:
    """Ids of the documents without which the answer is lost, in the order of the proof."""
    answer = solve(query, facts)
    assert answer is not None, query
    sources = dict.fromkeys(docid for fact in proof(query, facts) for docid in facts.documents(fact))
    return [docid for docid in sources if solve(query, facts, without=docid) != answer]


def needs_every_atom(query: Query, facts: FactBase) -> bool:
    """Whether no condition can be left out: without any one atom, the answer is another one or not unique."""
    if isinstance(query, Extreme):
        return needs_every_atom(query.first, facts) and needs_every_atom(query.second, facts)
    answer = solve(query, facts)
    for left_out in query.atoms:
        atoms = _connected(query.target, tuple(atom for atom in query.atoms if atom is not left_out))
        if atoms and solve(replace(query, atoms=atoms), facts) == answer:
            return False
    return True


def _connected(target: Var, atoms: tuple[Atom, ...]) -> tuple[Atom, ...]:
    """The atoms that share variables with ``target``, directly or through others; the rest says nothing about it."""
    reached = {target}
    kept: list[Atom] = []
    rest = list(atoms)
    while True:
        linked = [atom for atom in rest if not reached.isdisjoint((atom.subject, atom.object))]
        if not linked:
            return tuple(atom for atom in atoms if atom in kept)
        kept += linked
        rest = [atom for atom in rest if atom not in linked]
        reached |= {term for atom in linked for term in (atom.subject, atom.object) if isinstance(term, Var)}
