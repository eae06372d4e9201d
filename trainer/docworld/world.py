"""The world: entities, documents and questions, all from a seed and a size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from trace_fast.errors import ConfigError
from trace_fast.trainer.docworld import grammar
from trace_fast.trainer.docworld.descriptions import Describer
from trace_fast.trainer.docworld.dice import Dice
from trace_fast.trainer.docworld.documents import Document, DocumentWriter
from trace_fast.trainer.docworld.lands import PERSONS_PER_LAND, Settled, settle
from trace_fast.trainer.docworld.names import NameMaker
from trace_fast.trainer.docworld.questions import HOPS, Question, QuestionMaker
from trace_fast.trainer.docworld.schema import KINDS, SPLITS, Entity, Fact, Kind, Split
from trace_fast.trainer.docworld.solver import FactBase


@dataclass(frozen=True, slots=True)
class WorldSize:
    """How large a world is.

    Args:
        lands: of train, validation, test; a land has about 115 documents. questions: of the three splits.
        hop_weights: wanted shares of questions with 2, 3, 4, 5 and 6 hops.

    Raises:
        ConfigError: a number is out of range.
    """

    lands: tuple[int, int, int]
    questions: tuple[int, int, int]
    hop_weights: tuple[float, float, float, float, float] = (0.35, 0.27, 0.19, 0.12, 0.07)

    def __post_init__(self) -> None:
        for name, minimum in (("lands", 1), ("questions", 0)):
            numbers = getattr(self, name)
            if len(numbers) != len(SPLITS) or min(numbers) < minimum:
                raise ConfigError(f"WorldSize.{name}: expected {len(SPLITS)} numbers >= {minimum}, got {numbers!r}")
        weights = self.hop_weights
        if len(weights) != len(HOPS) or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
            raise ConfigError(
                f"WorldSize.hop_weights: expected {len(HOPS)} weights >= 0 with a positive sum, got {weights!r}"
            )


SIZES: Mapping[str, WorldSize] = MappingProxyType(
    {
        "tiny": WorldSize((1, 1, 1), (50, 25, 25)),
        "small": WorldSize((10, 2, 2), (1000, 100, 100)),
        "medium": WorldSize((40, 6, 6), (5000, 500, 500)),
        "large": WorldSize((300, 30, 30), (20000, 1000, 1000)),
    }
)


@dataclass(frozen=True, slots=True)
class Lookup:
    """A question that one document answers, with everything named: material to teach reading, not searching."""

    question: str
    answers: tuple[str, ...]
    fact: Fact
    docids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class World:
    """A closed world.

    Args:
        entities: by id. documents: the corpus, of all splits. base: what the documents state, with their ids.
    """

    seed: int
    size: WorldSize
    entities: Mapping[str, Entity]
    documents: tuple[Document, ...]
    base: FactBase
    _questions: Mapping[Split, tuple[Question, ...]] = field(repr=False)

    def questions(self, split: Split) -> tuple[Question, ...]:
        """The questions of ``train``, ``validation`` or ``test``.

        Raises:
            ConfigError: another split.
        """
        _check_split(split)
        return self._questions[split]

    def lookups(self, split: Split) -> Iterator[Lookup]:
        """One question for every fact of the split.

        Raises:
            ConfigError: another split.
        """
        _check_split(split)
        dice = Dice(self.seed, "lookups", split)
        for document in self.documents:
            for fact in document.facts:
                subject, docids = self.entities[fact.subject], self.base.documents(fact)
                if subject.split != split or docids[0] != document.docid:
                    continue
                ask = dice.pick(grammar.PHRASES[fact.relation].ask)
                answer = str(fact.object)
                if answer in self.entities:
                    answer = self.entities[answer].name
                yield Lookup(grammar.sentence(ask.format(s=grammar.mention(subject))), (answer,), fact, docids)

    def summary(self) -> dict[str, Any]:
        """Statistics of plain JSON types. A word is what lies between spaces; titles count."""
        words = Counter(word for document in self.documents for word in f"{document.title} {document.text}".split())
        return {
            "seed": self.seed,
            "documents": len(self.documents),
            "documents_without_facts": sum(not document.facts for document in self.documents),
            "words": words.total(),
            "distinct_words": len(words),
            "facts": len({fact for document in self.documents for fact in document.facts}),
            "entities": {kind: sum(e.kind == kind for e in self.entities.values()) for kind in KINDS},
            "questions": {split: _statistics(self._questions[split]) for split in SPLITS},
        }


def make_world(seed: int, size: str | WorldSize = "small") -> World:
    """The world of ``seed`` and ``size``; the same on every machine, byte for byte.

    Args:
        size: a name of ``SIZES``, or numbers of one's own.

    Raises:
        ConfigError: unknown name; the size has too few lands for its questions, or too many for the names.
    """
    if isinstance(size, str):
        if size not in SIZES:
            raise ConfigError(f"docworld size: expected one of {', '.join(SIZES)}, got {size!r}")
        size = SIZES[size]
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"docworld seed: expected an integer, got {seed!r}")
    settled = _settle_all(seed, size)
    entities = {entity.id: entity for part in settled.values() for entity in part.entities}
    land_of = {entity: land for part in settled.values() for entity, land in part.land_of.items()}
    facts = [fact for part in settled.values() for fact in part.facts]
    documents = DocumentWriter(Dice(seed, "documents"), entities, land_of).write(facts)
    base = FactBase((document.docid, document.facts) for document in documents)
    hop_weights = dict(zip(HOPS, size.hop_weights, strict=True))
    questions: dict[Split, tuple[Question, ...]] = {}
    for split, number in zip(SPLITS, size.questions, strict=True):
        dice = Dice(seed, "questions", split)
        describer = Describer(dice, base, entities, settled[split].facts)
        questions[split] = QuestionMaker(dice, describer, split).make(number, hop_weights)
    return World(seed, size, MappingProxyType(entities), documents, base, MappingProxyType(questions))


def _settle_all(seed: int, size: WorldSize) -> dict[Split, Settled]:
    names = NameMaker(Dice(seed, "names"), persons=PERSONS_PER_LAND * sum(size.lands))
    counts: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    return {
        split: settle(Dice(seed, "lands", split), names, split, lands, counts)
        for split, lands in zip(SPLITS, size.lands, strict=True)
    }


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ConfigError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")


def _statistics(questions: tuple[Question, ...]) -> dict[str, Any]:
    return {
        "number": len(questions),
        "templates": dict(sorted(Counter(question.template for question in questions).items())),
        "hops": {str(hops): n for hops, n in sorted(Counter(question.hops for question in questions).items())},
        "obfuscations": dict(sorted(Counter(name for q in questions for name in q.obfuscations).items())),
    }
