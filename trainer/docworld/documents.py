"""Spreads the facts of a world over documents and writes them.

Every entity has a page with some of the facts about it; the others are told elsewhere: in a note that may stand under
the object's name, or in a gazette of the land among unrelated news. A few links are told twice. Essays and stray
sentences name entities without stating anything of them. One sentence a line, so that a page can be read in windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trace_fast.trainer.docworld import grammar
from trace_fast.trainer.docworld.dice import Dice
from trace_fast.trainer.docworld.schema import RELATIONS, Entity, Fact, Kind

_VALUE_ON_PAGE = 0.6
_LINK_ON_PAGE = 0.35
_IN_NOTE = 0.5  # of what is not on the page; the rest goes into a gazette
_NOTE_UNDER_OBJECT = 0.3
_TOLD_TWICE = 0.1  # of links
_GAZETTE_FACTS = 3
_ESSAYS_PER_LAND = 12


@dataclass(frozen=True, slots=True)
class Document:
    """A document of the corpus; ``facts`` is what its text states, in its order."""

    docid: str
    url: str
    title: str
    text: str
    facts: tuple[Fact, ...]

    def to_record(self) -> dict[str, str]:
        return {"docid": self.docid, "url": self.url, "title": self.title, "text": self.text}


@dataclass(frozen=True, slots=True)
class _Draft:
    title: str
    lines: tuple[str, ...]
    facts: tuple[Fact, ...]


class DocumentWriter:
    """Writes the documents of all lands.

    Args:
        entities: by id, all of the world. land_of: land of each.
    """

    def __init__(self, dice: Dice, entities: Mapping[str, Entity], land_of: Mapping[str, str]) -> None:
        self._dice = dice
        self._entities = entities
        self._by_kind: dict[Kind, list[Entity]] = {}
        self._by_land: dict[str, list[Entity]] = {}
        for entity in entities.values():
            self._by_kind.setdefault(entity.kind, []).append(entity)
            self._by_land.setdefault(land_of[entity.id], []).append(entity)

    def write(self, facts: Sequence[Fact]) -> tuple[Document, ...]:
        """All documents, in an order that says nothing about their content."""
        about: dict[str, list[Fact]] = {}
        for fact in facts:
            about.setdefault(fact.subject, []).append(fact)
        drafts: list[_Draft] = []
        for land, members in self._by_land.items():
            news: list[Fact] = []
            for entity in members:
                drafts += self._about(entity, about.get(entity.id, []), news)
            drafts += self._gazettes(self._entities[land], news)
            drafts += [self._essay(self._dice.pick(members), members) for _ in range(_ESSAYS_PER_LAND)]
        digits = len(str(len(drafts)))
        return tuple(
            Document(
                docid := f"d{number:0{digits}d}",
                f"https://docworld.example/{docid}",
                draft.title,
                "\n".join(draft.lines),
                draft.facts,
            )
            for number, draft in enumerate(self._dice.shuffled(drafts))
        )

    def _about(self, entity: Entity, facts: Sequence[Fact], news: list[Fact]) -> list[_Draft]:
        """The page of ``entity`` and the notes on it; what remains is added to ``news``."""
        dice = self._dice
        page: list[Fact] = []
        notes: list[_Draft] = []
        for fact in dice.shuffled(facts):
            links = RELATIONS[fact.relation].links
            if not page or dice.chance(_LINK_ON_PAGE if links else _VALUE_ON_PAGE):
                page.append(fact)
            elif dice.chance(_IN_NOTE):
                notes.append(self._note(fact))
            else:
                news.append(fact)
            if links and fact not in news and dice.chance(_TOLD_TWICE):
                news.append(fact)
        return [self._page(entity, page), *notes]

    def _page(self, entity: Entity, facts: Sequence[Fact]) -> _Draft:
        dice = self._dice
        noun = grammar.NOUNS[entity.kind]
        opening = dice.pick(grammar.INTRODUCTIONS).format(s=grammar.mention(entity), noun=noun)
        lines = [grammar.sentence(opening)]
        for fact in facts:
            named = dice.chance(0.4)
            lines.append(self._tell(fact, grammar.mention(entity) if named else grammar.short_mention(entity)))
        return _Draft(entity.name, (*lines, *self._stray(entity, dice.between(1, 2))), tuple(facts))

    def _note(self, fact: Fact) -> _Draft:
        dice = self._dice
        entity = self._entities[fact.subject]
        under = entity
        if RELATIONS[fact.relation].links and dice.chance(_NOTE_UNDER_OBJECT):
            under = self._entities[str(fact.object)]
        title = grammar.sentence(dice.pick(grammar.NOTE_TITLES).format(name=grammar.mention(under)))
        before, after = self._stray(entity, dice.below(2)), self._stray(under, 1)
        return _Draft(title, (*before, self._tell(fact, grammar.mention(entity)), *after), (fact,))

    def _gazettes(self, land: Entity, news: Sequence[Fact]) -> list[_Draft]:
        order = self._dice.shuffled(news)
        drafts = []
        for number, start in enumerate(range(0, len(order), _GAZETTE_FACTS), 1):
            facts = order[start : start + _GAZETTE_FACTS]
            lines = [self._tell(fact, grammar.mention(self._entities[fact.subject])) for fact in facts]
            title = grammar.GAZETTE_TITLE.format(name=land.name, number=number)
            drafts.append(_Draft(title, (*lines, *self._stray(land, 1)), tuple(facts)))
        return drafts

    def _essay(self, entity: Entity, neighbours: Sequence[Entity]) -> _Draft:
        dice = self._dice
        title = dice.pick(grammar.ESSAY_TITLES).format(name=grammar.mention(entity))
        named = [entity, *dice.shuffled([other for other in neighbours if other is not entity])[: dice.between(2, 4)]]
        lines = [self._mention(first, second) for first, second in pairwise(named)]
        return _Draft(title, (*lines, *self._stray(entity, 1)), ())

    def _tell(self, fact: Fact, subject: str) -> str:
        links = RELATIONS[fact.relation].links
        object = grammar.mention(self._entities[str(fact.object)]) if links else str(fact.object)
        template = self._dice.pick(grammar.PHRASES[fact.relation].told)
        return grammar.sentence(template.format(s=subject, o=object))

    def _stray(self, entity: Entity, number: int) -> list[str]:
        """Sentences that state nothing; some of them name another entity of the same kind."""
        dice = self._dice
        lines = []
        for filler in dice.shuffled(grammar.FILLERS)[:number]:
            other = dice.pick(self._by_kind[entity.kind])
            lines.append(self._mention(entity, other) if other is not entity and dice.chance(0.4) else filler)
        return lines

    def _mention(self, first: Entity, second: Entity) -> str:
        template = self._dice.pick(grammar.MENTIONS)
        return grammar.sentence(template.format(a=grammar.mention(first), b=grammar.mention(second)))
