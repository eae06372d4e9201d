"""What there is in a docworld: kinds of entities, relations between them, and the closed sets of plain values.

A fact is (subject, relation, object). Every relation is functional: a subject has at most one object of it. The object
is an entity, a year, a number of thousands of people, or a word of a closed set; only entities carry names, and only
they are kept apart by the splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Kind = Literal["land", "city", "person", "company", "work", "prize"]
Split = Literal["train", "validation", "test"]

KINDS: tuple[Kind, ...] = ("land", "city", "person", "company", "work", "prize")
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

TRADES = ("baker", "clerk", "doctor", "farmer", "gardener", "lawyer", "mason", "miller", "sailor", "weaver")
CRAFTS = ("bells", "boats", "cheese", "copper", "glass", "honey", "lace", "paper", "salt", "silk")
GOODS = ("barrels", "candles", "clocks", "gloves", "knives", "lamps", "ropes", "shoes", "tiles", "wheels")
FORMS = ("mural", "novel", "painting", "play", "poem", "song", "statue")


@dataclass(frozen=True, slots=True)
class Entity:
    """A named thing. ``id`` is its kind and a number (``city12``); ``name`` is unique in the world."""

    id: str
    kind: Kind
    name: str
    split: Split


@dataclass(frozen=True, slots=True, order=True)
class Fact:
    """``object`` is an entity id, a word of the relation's closed set, or an int (year, thousands of people)."""

    subject: str
    relation: str
    object: str | int


@dataclass(frozen=True, slots=True)
class Relation:
    """``object`` is a kind, or ``year``, ``thousands`` or ``word`` for plain values."""

    name: str
    subject: Kind
    object: Kind | Literal["year", "thousands", "word"]
    words: tuple[str, ...] = ()

    @property
    def links(self) -> bool:
        """Whether the object is an entity."""
        return self.object in KINDS


def _relations(*relations: Relation) -> Mapping[str, Relation]:
    return MappingProxyType({relation.name: relation for relation in relations})


RELATIONS: Mapping[str, Relation] = _relations(
    Relation("capital", "land", "city"),
    Relation("in_land", "city", "land"),
    Relation("city_founded", "city", "year"),
    Relation("population", "city", "thousands"),
    Relation("known_for", "city", "word", CRAFTS),
    Relation("mayor", "city", "person"),
    Relation("born_in", "person", "city"),
    Relation("born_year", "person", "year"),
    Relation("trade", "person", "word", TRADES),
    Relation("employer", "person", "company"),
    Relation("teacher", "person", "person"),
    Relation("based_in", "company", "city"),
    Relation("founder", "company", "person"),
    Relation("company_founded", "company", "year"),
    Relation("makes", "company", "word", GOODS),
    Relation("creator", "work", "person"),
    Relation("form", "work", "word", FORMS),
    Relation("finished", "work", "year"),
    Relation("depicts", "work", "city"),
    Relation("commissioner", "work", "company"),
    Relation("won", "work", "prize"),
    Relation("given_in", "prize", "city"),
    Relation("donor", "prize", "person"),
    Relation("first_given", "prize", "year"),
)


@dataclass(frozen=True, slots=True)
class Band:
    """A qualitative noun for cities of ``low`` to ``high`` thousand people (inclusive)."""

    noun: str
    plural: str
    low: int
    high: int


# The bands leave gaps, so that no city is on the edge of a word.
BANDS = (
    Band("small city", "small cities", 3, 9),
    Band("city of middle size", "cities of middle size", 20, 60),
    Band("great city", "great cities", 120, 400),
)
