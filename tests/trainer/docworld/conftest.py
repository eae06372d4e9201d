"""Worlds to test on, and a reader that gets the facts back from the texts alone."""

from __future__ import annotations

import re

import pytest

from trace_fast.trainer.docworld import Document, Fact, World, make_world
from trace_fast.trainer.docworld.grammar import NOUNS, PHRASES
from trace_fast.trainer.docworld.schema import KINDS, RELATIONS
from trace_fast.trainer.docworld.solver import FactBase

_PATTERNS = [
    (relation, re.compile(re.escape(told).replace(r"\{s\}", "(?P<s>.+)").replace(r"\{o\}", "(?P<o>.+)"), re.IGNORECASE))
    for relation, phrases in PHRASES.items()
    for told in phrases.told
]


class Reader:
    """Reads documents sentence by sentence. It knows names, kinds and sentence patterns, and nothing else."""

    def __init__(self, world: World) -> None:
        self._by_name = {entity.name.lower(): entity for entity in world.entities.values()}

    def read(self, document: Document) -> list[Fact]:
        facts = []
        for line in document.text.split("\n"):
            found = {fact for fact in (self._match(line, *pattern, document.title) for pattern in _PATTERNS) if fact}
            assert len(found) <= 1, f"{document.docid}: {line!r} reads as {found}"
            facts += found
        return facts

    def _match(self, line: str, relation: str, pattern: re.Pattern[str], title: str) -> Fact | None:
        match = pattern.fullmatch(line)
        if match is None:
            return None
        subject = self._entity(match["s"], RELATIONS[relation].subject, title)
        object = self._object(match["o"], relation, title)
        return None if subject is None or object is None else Fact(subject, relation, object)

    def _object(self, text: str, relation: str, title: str) -> str | int | None:
        kind = RELATIONS[relation].object
        if kind in KINDS:
            return self._entity(text, kind, title)
        if kind == "word":
            return text if text in RELATIONS[relation].words else None
        return int(text) if re.fullmatch(r"\d+", text) else None

    def _entity(self, text: str, kind: str, title: str) -> str | None:
        page = self._by_name.get(title.lower())
        if page is not None and page.kind == kind:
            short = page.name.split()[-1] if kind == "person" else f"the {NOUNS[page.kind]}"
            if text.lower() == short.lower():
                return page.id
        named = self._by_name.get(text.lower()) or self._by_name.get(text.lower().removeprefix("the "))
        return named.id if named is not None and named.kind == kind else None


@pytest.fixture(scope="session")
def world() -> World:
    return make_world(0, "tiny")


@pytest.fixture(scope="session")
def other_world() -> World:
    return make_world(1, "tiny")


@pytest.fixture(scope="session")
def small_world() -> World:
    return make_world(1, "small")


@pytest.fixture(scope="session")
def reader(world: World) -> Reader:
    return Reader(world)


@pytest.fixture(scope="session")
def read_base(world: World, reader: Reader) -> FactBase:
    """What the texts state, as read from them."""
    return FactBase((document.docid, reader.read(document)) for document in world.documents)
