"""Describes entities without their names: "the firm that employs the miller who was born at Velaburg".

The obfuscations of the paper (A.4.2) are made here, and each leaves its name behind:

- ``name_mask``: an entity is described by its relations instead of being named;
- ``role``: a person is named by trade, a work by form, a firm by product;
- ``time_blur``: a year becomes a decade, a part of a century, or all years before or after a round one;
- ``qualitative``: a number of people becomes a size.

Every definite description fits exactly one entity of the world; a detail is added only where it is needed for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trace_fast.trainer.docworld import grammar
from trace_fast.trainer.docworld.dice import Dice
from trace_fast.trainer.docworld.schema import BANDS, RELATIONS, Entity, Fact, Kind
from trace_fast.trainer.docworld.solver import Atom, FactBase, Select, Span, Var, values

Obfuscation = Literal["name_mask", "role", "time_blur", "qualitative"]

_TRIES = 3  # neighbours tried at each step of a chain
_MOST_DETAILS = 2
_END_OF_TIME = 9999


@dataclass(frozen=True, slots=True)
class Description:
    """A noun phrase for one entity. ``term`` is its id when it is named, else the variable that ``atoms`` pin down."""

    term: str | Var
    text: str
    atoms: tuple[Atom, ...] = ()
    entities: frozenset[str] = frozenset()  # asked for membership only
    obfuscations: tuple[Obfuscation, ...] = ()

    def select(self) -> Select:
        """The described entity as a query; not for a named one."""
        assert isinstance(self.term, Var), self
        return Select(self.term, self.atoms)


@dataclass(frozen=True, slots=True)
class Condition:
    """Something true of an entity, which stands as a variable. Either a noun (``head``) or a predicate.

    ``head`` and ``predicate`` hold the singular and the plural.
    """

    atoms: tuple[Atom, ...]
    head: tuple[str, str] | None = None
    predicate: tuple[str, str] | None = None
    entities: frozenset[str] = frozenset()
    obfuscations: tuple[Obfuscation, ...] = ()


@dataclass(slots=True)
class Describer:
    """Describes entities of one split.

    Args:
        base: what all documents of the world state, of every split: descriptions are unique in the whole world.
        entities: by id. facts: of this split.
    """

    dice: Dice
    base: FactBase
    entities: Mapping[str, Entity]
    facts: Sequence[Fact]
    about: dict[str, list[Fact]] = field(init=False)
    links_to: dict[str, list[Fact]] = field(init=False)

    def __post_init__(self) -> None:
        self.about, self.links_to = {}, {}
        for fact in self.facts:
            self.about.setdefault(fact.subject, []).append(fact)
            if RELATIONS[fact.relation].links:
                self.links_to.setdefault(str(fact.object), []).append(fact)

    def describe(self, entity: str, depth: int, used: frozenset[str], unsaid: str = "") -> Description | None:
        """A phrase for ``entity`` that is ``depth`` links away from a name; ``None`` when the tries found none.

        Args:
            depth: 0 names the entity. used: entities that must not take part. unsaid: a relation of the entity that the
                phrase must not use, because it is asked for.
        """
        if depth == 0:
            return Description(entity, grammar.mention(self.entities[entity]), entities=frozenset([entity]))
        used = used | {entity}
        links = [f for f in self.about.get(entity, []) if RELATIONS[f.relation].links] + self.links_to.get(entity, [])
        links = [fact for fact in links if _other_end(fact, entity) not in used and fact.relation != unsaid]
        for fact in self.dice.shuffled(links)[:_TRIES]:
            neighbour = self.describe(_other_end(fact, entity), depth - 1, used)
            if neighbour is None:
                continue
            if fact.subject == entity:
                found = self._by_object(entity, fact, neighbour, unsaid)
            else:
                found = self._by_subject(entity, fact, neighbour)
            if found is not None:
                return found
        return None

    def _by_subject(self, entity: str, fact: Fact, neighbour: Description) -> Description:
        """``entity`` as the object of ``fact``: unique, because relations are functional."""
        phrases = grammar.PHRASES[fact.relation].object_np
        template = phrases[-1] if neighbour.atoms else self.dice.pick(phrases)
        var = Var(entity)
        return Description(
            var,
            template.format(s=neighbour.text),
            (*neighbour.atoms, Atom(neighbour.term, fact.relation, var)),
            neighbour.entities | {entity},
            merge(neighbour.obfuscations, ("name_mask",)),
        )

    def _by_object(self, entity: str, fact: Fact, neighbour: Description, unsaid: str) -> Description | None:
        """``entity`` as the subject of ``fact``, with details until nothing else fits; ``None`` if they do not do."""
        conditions = [self._linked(fact, neighbour)]
        details = [f for f in self.about[entity] if not RELATIONS[f.relation].links and f.relation != unsaid]
        for detail in [None, *self.dice.shuffled(details)[:_MOST_DETAILS]]:
            if detail is not None:
                conditions.insert(0, self.valued(detail))
            if self.unique(entity, conditions):
                return Description(
                    Var(entity),
                    self.phrase(self.entities[entity].kind, conditions),
                    tuple(atom for condition in conditions for atom in condition.atoms),
                    neighbour.entities | {entity},
                    merge(("name_mask",), *(condition.obfuscations for condition in conditions)),
                )
        return None

    def unique(self, entity: str, conditions: Iterable[Condition]) -> bool:
        """Whether ``entity`` alone fulfils all ``conditions`` on it."""
        atoms = tuple(atom for condition in conditions for atom in condition.atoms)
        return values(Select(Var(entity), atoms), self.base, limit=2) == [entity]

    def someone(self, entity: str, depth: int, used: frozenset[str]) -> Description | None:
        """An indefinite phrase that fits ``entity`` and perhaps others: "a firm that is run from Velaburg"."""
        links = [f for f in self.about.get(entity, []) if RELATIONS[f.relation].links and f.object not in used]
        if not links:
            return None
        condition = self.linked(self.dice.pick(links), depth, used | {entity})
        if condition is None:
            return None
        assert condition.predicate is not None
        kind = self.entities[entity].kind
        noun = "someone" if kind == "person" else f"a {grammar.NOUNS[kind]}"
        text = f"{noun} {grammar.who(kind)} {condition.predicate[0]}"
        made = merge(("name_mask",), condition.obfuscations)
        return Description(Var(entity), text, condition.atoms, condition.entities | {entity}, made)

    def linked(self, fact: Fact, depth: int, used: frozenset[str]) -> Condition | None:
        """The condition that ``fact`` puts on its subject, its object described from ``depth`` links away."""
        neighbour = self.describe(str(fact.object), depth, used | {fact.subject})
        return None if neighbour is None else self._linked(fact, neighbour)

    def linked_to_some(self, fact: Fact, depth: int, used: frozenset[str]) -> Condition | None:
        """As ``linked``, with an indefinite object."""
        neighbour = self.someone(str(fact.object), depth, used | {fact.subject})
        return None if neighbour is None else self._linked(fact, neighbour)

    def _linked(self, fact: Fact, neighbour: Description) -> Condition:
        template = self.dice.pick(grammar.PHRASES[fact.relation].predicate)
        return Condition(
            (Atom(Var(fact.subject), fact.relation, neighbour.term), *neighbour.atoms),
            predicate=(template.format(o=neighbour.text), grammar.plural(template).format(o=neighbour.text)),
            entities=neighbour.entities,
            obfuscations=neighbour.obfuscations,
        )

    def valued(self, fact: Fact, *, wide: bool = False) -> Condition:
        """The condition that ``fact``, whose object is a plain value, puts on its subject; numbers are blurred.

        Args:
            wide: a year becomes "before" or "after" a round one, which fits many.
        """
        relation = RELATIONS[fact.relation]
        subject = Var(fact.subject)
        if fact.relation in grammar.HEADS:
            singular, several = grammar.HEADS[fact.relation]
            head = (singular.format(o=fact.object), several.format(o=fact.object))
            return Condition((Atom(subject, fact.relation, fact.object),), head=head, obfuscations=("role",))
        if relation.object == "thousands":
            band = next(band for band in BANDS if band.low <= int(fact.object) <= band.high)
            span = Span(band.low, band.high)
            atoms = (Atom(subject, fact.relation, span),)
            return Condition(atoms, head=(band.noun, band.plural), obfuscations=("qualitative",))
        template = self.dice.pick(grammar.PHRASES[fact.relation].predicate)
        if relation.object == "year":
            year = int(fact.object)
            span, text = self._before_or_after(year) if wide else self._blurred(year)
            atoms = (Atom(subject, fact.relation, span),)
        else:
            atoms, text = (Atom(subject, fact.relation, fact.object),), str(fact.object)
        return Condition(
            atoms,
            predicate=(template.format(o=text), grammar.plural(template).format(o=text)),
            obfuscations=("time_blur",) if relation.object == "year" else (),
        )

    def _blurred(self, year: int) -> tuple[Span, str]:
        decade, century = year // 10 * 10, year // 100 * 100
        if decade != century and self.dice.chance(0.5):  # "the 1400s" are a century
            return Span(decade, decade + 9), f"in the {decade}s"
        third = min((year - century) // 33, 2)
        words = ("early in the {}s", "in the middle of the {}s", "late in the {}s")[third]
        low = century + 33 * third
        return Span(low, low + 32 if third < 2 else century + 99), words.format(century)

    def _before_or_after(self, year: int) -> tuple[Span, str]:
        round_year = year // 50 * 50
        if year == round_year or self.dice.chance(0.5):
            return Span(0, round_year + 49), f"before {round_year + 50}"
        return Span(round_year + 1, _END_OF_TIME), f"after {round_year}"

    def phrase(self, kind: Kind, conditions: Sequence[Condition]) -> str:
        """A definite noun phrase of ``conditions``; the last of them may be long."""
        head, predicates = split_head(kind, conditions, number=0)
        relative = grammar.who(kind)
        clauses = " and ".join(f"{relative} {predicate}" for predicate in predicates)
        return f"the {head} {clauses}".strip()


def split_head(kind: Kind, conditions: Sequence[Condition], *, number: Literal[0, 1]) -> tuple[str, list[str]]:
    """The noun for an entity of ``kind`` under ``conditions``, and the predicates (0 singular, 1 plural).

    At most one condition has a head.
    """
    heads = [condition.head[number] for condition in conditions if condition.head is not None]
    assert len(heads) <= 1, heads
    noun = heads[0] if heads else (grammar.NOUNS, grammar.PLURAL_NOUNS)[number][kind]
    return noun, [condition.predicate[number] for condition in conditions if condition.predicate is not None]


def merge(*groups: tuple[Obfuscation, ...]) -> tuple[Obfuscation, ...]:
    """Each name once, in the order of first mention."""
    return tuple(dict.fromkeys(name for group in groups for name in group))


def _other_end(fact: Fact, entity: str) -> str:
    return str(fact.object) if fact.subject == entity else fact.subject
