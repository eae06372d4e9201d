"""A world with its BM25 index in memory, and what an observation of the browser shows of its facts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from trace_fast.trainer.docworld import Document as WorldDocument
from trace_fast.trainer.docworld import Fact, Lookup, World
from trace_fast.trainer.docworld.dice import Dice
from trace_fast.trainer.docworld.grammar import PHRASES, mention, sentence, short_mention
from trace_fast.trainer.docworld.schema import RELATIONS
from trace_fast.trainer.search.bm25 import Bm25Retriever
from trace_fast.trainer.search.browser import Browser, Observation
from trace_fast.trainer.search.corpus import Document
from trace_fast.trainer.search.index import SearchIndex
from trace_fast.trainer.search.pages import CountTokens
from trace_fast.trainer.search.retriever import indexed_text
from trace_fast.trainer.search.tools import OPEN, SEARCH

_NAME = re.compile(r"[A-Z][a-z]+(?: (?:(?:of|and) the )?[A-Z][a-z]+)*")
_LINE_NUMBER = re.compile(r"\n\d+: ")
_DOCID = re.compile(r"https://\S+/(\S+)")


@dataclass(frozen=True, slots=True)
class _Told:
    fact: Fact
    line: str


class Library:
    """A world, its index, and where its facts are written.

    ``lookups`` has a question for every fact of the split ``train``.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        documents = [Document(d.docid, d.url, d.title, d.text) for d in world.documents]
        self._documents = {document.docid: document for document in documents}
        self.index = SearchIndex(documents, Bm25Retriever.build(map(indexed_text, documents)))
        self.lookups: dict[Fact, Lookup] = {lookup.fact: lookup for lookup in world.lookups("train")}
        self._names = frozenset(entity.name for entity in world.entities.values())  # asked for membership only
        self._counted: dict[CountTokens, CountTokens] = {}
        self._told = {document.docid: tuple(self._lines(document)) for document in world.documents}

    def browser(self, observation_tokens: int, count_tokens: CountTokens) -> Browser:
        """A browser for one episode. Lines come up again and again, so their counts are kept, by ``count_tokens``."""
        counted = self._counted.setdefault(count_tokens, lru_cache(1 << 16)(count_tokens))
        return Browser(self.index, observation_tokens=observation_tokens, count_tokens=counted)

    def page(self, docid: str, browser: Browser) -> Observation:
        """What opening a document from its top shows; it is found by its own text."""
        document = self._documents[docid]
        query = indexed_text(document)
        place = [hit.document.docid for hit in self.index.search(query, 10)].index(docid)
        browser.call(SEARCH, {"query": query, "topn": place + 1})
        return browser.call(OPEN, {"id": place, "loc": 0})

    def spelled(self, value: str | int) -> str:
        """The subject or the object of a fact, as an answer writes it."""
        entity = self.world.entities.get(str(value))
        return str(value) if entity is None else entity.name

    def names(self, text: str) -> list[str]:
        """The full names of entities in a text, as often as they stand there."""
        return [name for name in _NAME.findall(text) if name in self._names]

    def shown(self, observation: Observation) -> list[Fact]:
        """The facts whose lines stand as a whole in an observation, by document."""
        text = _LINE_NUMBER.sub(" ", observation.text)  # long lines are wrapped
        docids: dict[str, None] = dict.fromkeys(_DOCID.findall(observation.text))
        if observation.docid is not None:
            docids[observation.docid] = None
        told = (told for docid in docids for told in self._told.get(docid, ()))
        return list(dict.fromkeys(each.fact for each in told if each.line in text))

    def told(self, fact: Fact, dice: Dice) -> str:
        """A sentence that states a fact, its subject named in full."""
        return dice.pick(self._wordings(fact)[::2])

    def _lines(self, document: WorldDocument) -> Iterator[_Told]:
        """The line of every fact: they are told in their order, between lines that state none."""
        lines = iter(document.text.split("\n"))
        for fact in document.facts:
            wordings = self._wordings(fact)
            line = next((line for line in lines if line in wordings), None)
            assert line is not None, (document.docid, fact)
            yield _Told(fact, line)

    def _wordings(self, fact: Fact) -> Sequence[str]:
        subject = self.world.entities[fact.subject]
        links = RELATIONS[fact.relation].links
        object = mention(self.world.entities[str(fact.object)]) if links else str(fact.object)
        return [
            sentence(template.format(s=name, o=object))
            for template in PHRASES[fact.relation].told
            for name in (mention(subject), short_mention(subject))
        ]
