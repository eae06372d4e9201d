"""Settles the lands of one split: its entities, and the facts that hold between them.

Lands of different splits know nothing of one another, so whatever a question of one split names or passes through never
occurs in a question of another. Within a split, most links stay in their land and some cross its borders. Years fit
together: a pupil is younger than the teacher, a work is made by an adult, a prize is won after it was first given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trace_fast.trainer.docworld.dice import Dice
from trace_fast.trainer.docworld.names import NameMaker
from trace_fast.trainer.docworld.schema import BANDS, RELATIONS, Entity, Fact, Kind, Split

_STAY_IN_LAND = 0.75
_PER_LAND: tuple[tuple[Kind, int], ...] = (("city", 4), ("company", 5), ("prize", 2), ("person", 18), ("work", 15))
PERSONS_PER_LAND = 18


@dataclass(frozen=True, slots=True)
class Settled:
    entities: tuple[Entity, ...]
    facts: tuple[Fact, ...]
    land_of: dict[str, str]  # entity id -> land id


@dataclass(slots=True)
class _Draft:
    """What is known so far of one split."""

    dice: Dice
    entities: list[Entity] = field(default_factory=list)
    by_kind: dict[Kind, list[str]] = field(default_factory=dict)
    land_of: dict[str, str] = field(default_factory=dict)
    objects: dict[tuple[str, str], str | int] = field(default_factory=dict)  # (subject, relation) -> object

    def add(self, subject: str, relation: str, object: str | int) -> None:
        assert (subject, relation) not in self.objects, (subject, relation)
        self.objects[subject, relation] = object

    def number(self, subject: str, relation: str) -> int:
        value = self.objects[subject, relation]
        assert isinstance(value, int), (subject, relation, value)
        return value

    def link(self, subject: str, relation: str, among: Iterable[str], chance: float = 1.0) -> None:
        """Links ``subject`` to one of ``among``, by choice to one of its own land; to none if there is none."""
        if not self.dice.chance(chance):
            return
        candidates = [other for other in among if other != subject]
        near = [other for other in candidates if self.land_of[other] == self.land_of[subject]]
        if near and self.dice.chance(_STAY_IN_LAND):
            candidates = near
        if candidates:
            self.add(subject, relation, self.dice.pick(candidates))

    def word(self, subject: str, relation: str) -> None:
        self.add(subject, relation, self.dice.pick(RELATIONS[relation].words))


def settle(dice: Dice, names: NameMaker, split: Split, lands: int, counts: dict[Kind, int]) -> Settled:
    """All entities of ``split`` and all facts about them.

    Args:
        lands: how many. counts: entities of each kind so far; raised here, so that ids are unique in the world.
    """
    draft = _Draft(dice)
    for _ in range(lands):
        land = _found(draft, names, split, "land", counts)
        draft.land_of[land] = land
        for kind, number in _PER_LAND:
            for _ in range(number):
                draft.land_of[_found(draft, names, split, kind, counts)] = land
    _cities(draft)
    _persons(draft)
    _companies(draft)
    _prizes(draft)
    _posts(draft)
    _works(draft)
    facts = (Fact(subject, relation, object) for (subject, relation), object in draft.objects.items())
    return Settled(tuple(draft.entities), tuple(facts), draft.land_of)


def _found(draft: _Draft, names: NameMaker, split: Split, kind: Kind, counts: dict[Kind, int]) -> str:
    counts[kind] += 1
    entity = Entity(f"{kind}{counts[kind]}", kind, names.make(kind), split)
    draft.entities.append(entity)
    draft.by_kind.setdefault(kind, []).append(entity.id)
    return entity.id


def _cities(draft: _Draft) -> None:
    for city in draft.by_kind["city"]:
        band = draft.dice.weighted(BANDS, (2, 2, 1))
        draft.add(city, "in_land", draft.land_of[city])
        draft.add(city, "city_founded", draft.dice.between(1000, 1249))
        draft.add(city, "population", draft.dice.between(band.low, band.high))
        draft.word(city, "known_for")
    for land in draft.by_kind["land"]:
        draft.add(land, "capital", draft.dice.pick([c for c in draft.by_kind["city"] if draft.land_of[c] == land]))


def _persons(draft: _Draft) -> None:
    persons = draft.by_kind["person"]
    for person in persons:
        draft.add(person, "born_year", draft.dice.between(1300, 1449))
        draft.link(person, "born_in", draft.by_kind["city"])
        draft.word(person, "trade")
    for person in persons:
        born = draft.number(person, "born_year")
        elders = [p for p in persons if 15 <= born - draft.number(p, "born_year") <= 50]
        draft.link(person, "teacher", elders, 0.7)


def _companies(draft: _Draft) -> None:
    for company in draft.by_kind["company"]:
        founders = _least_used(draft, draft.by_kind["person"], "founder", company)
        draft.link(company, "founder", founders)
        founder = draft.objects[company, "founder"]
        assert isinstance(founder, str), founder
        draft.add(company, "company_founded", draft.number(founder, "born_year") + draft.dice.between(20, 50))
        draft.link(company, "based_in", draft.by_kind["city"])
        draft.word(company, "makes")


def _prizes(draft: _Draft) -> None:
    for prize in draft.by_kind["prize"]:
        draft.add(prize, "first_given", draft.dice.between(1345, 1400))
        draft.link(prize, "given_in", draft.by_kind["city"])
        year = draft.number(prize, "first_given")
        donors = [p for p in draft.by_kind["person"] if 20 <= year - draft.number(p, "born_year") <= 70]
        draft.link(prize, "donor", donors)


def _posts(draft: _Draft) -> None:
    """Employers and mayors; nobody is mayor twice."""
    for person in draft.by_kind["person"]:
        born = draft.number(person, "born_year")
        firms = [c for c in draft.by_kind["company"] if draft.number(c, "company_founded") <= born + 50]
        firms = [c for c in firms if draft.objects[c, "founder"] != person]
        draft.link(person, "employer", firms, 0.8)
    for city in draft.by_kind["city"]:
        draft.link(city, "mayor", _least_used(draft, draft.by_kind["person"], "mayor", city), 0.9)


def _works(draft: _Draft) -> None:
    for work in draft.by_kind["work"]:
        draft.link(work, "creator", draft.by_kind["person"])
        creator = draft.objects[work, "creator"]
        assert isinstance(creator, str), creator
        finished = draft.number(creator, "born_year") + draft.dice.between(20, 60)
        draft.add(work, "finished", finished)
        draft.word(work, "form")
        draft.link(work, "depicts", draft.by_kind["city"], 0.9)
        firms = [c for c in draft.by_kind["company"] if draft.number(c, "company_founded") <= finished]
        draft.link(work, "commissioner", firms, 0.6)
        prizes = [p for p in draft.by_kind["prize"] if draft.number(p, "first_given") <= finished]
        draft.link(work, "won", prizes, 0.5)


def _least_used(draft: _Draft, persons: Sequence[str], relation: str, subject: str) -> list[str]:
    """Those of ``persons`` that are not yet the object of ``relation`` (all, when everyone is)."""
    used = {object for (_, name), object in draft.objects.items() if name == relation}
    return [person for person in persons if person not in used] or list(persons)
