"""All that the policy learns from, made of practice worlds: the tokenizer's text and the training examples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trace_fast.trainer.base_policy.drills import DrillMaker
from trace_fast.trainer.base_policy.examples import READ, Example, ExampleWriter
from trace_fast.trainer.base_policy.experiment import harness_config, questions_of
from trace_fast.trainer.base_policy.library import Library
from trace_fast.trainer.base_policy.reading import Reader
from trace_fast.trainer.base_policy.settings import BaseSize, practice_seeds
from trace_fast.trainer.base_policy.vocabulary import INSTRUCTIONS
from trace_fast.trainer.base_policy.wandering import Wanderer
from trace_fast.trainer.docworld import WorldSize, make_world
from trace_fast.trainer.docworld.dice import Dice
from trace_fast.trainer.harness import ChatFrame
from trace_fast.trainer.search.tools import FIND, OPEN, SEARCH, tool_schemas

_SEARCHES = 60  # of one naming world
_HOPS = 0.3  # of the readings: on questions of several hops
_LOOKUPS = 0.5  # of the transcripts: on a single named fact


@dataclass(frozen=True, slots=True)
class Corpus:
    """The practice worlds of a seed."""

    seed: int
    size: BaseSize

    def texts(self) -> Iterator[str]:
        """What the tokenizer is trained on."""
        names = " ".join(tool["function"]["name"] for tool in tool_schemas())
        for number in range(self.size.naming_worlds):
            questions = 40 if number < 4 else 0
            world = make_world(self._naming_seed(number), WorldSize((1, 1, 1), (questions, 0, 0)))
            library = Library(world)
            dice = Dice(self.seed, "texts", number)
            yield from (question.question for question in world.questions("train"))
            yield from (lookup.question for lookup in world.lookups("train"))
            browser = library.browser(200, lambda text: len(text) // 3)
            for _ in range(_SEARCHES):
                query = dice.pick(world.documents).title
                for tool, arguments in ((SEARCH, {"query": query}), (OPEN, {"id": 0}), (FIND, {"pattern": query})):
                    yield json.dumps({"name": tool, "arguments": arguments})
                    yield browser.call(tool, arguments).text
            for part in (f"system\n{INSTRUCTIONS} {names}", "user\n", "assistant\n", "tool\n", "\n"):
                yield from [part] * _SEARCHES

    def drills(self, frame: ChatFrame) -> Iterator[Example]:
        """What is learned first: of many small worlds, so that reading pays more than remembering."""
        first = self._naming_seed(self.size.naming_worlds)
        for seed in range(first, first + self.size.drill_worlds):
            library = Library(make_world(seed, self.size.drilled))
            yield from DrillMaker(library, frame, Dice(seed, "drills")).examples(self.size.drills)

    def examples(self, frame: ChatFrame) -> Iterator[Example]:
        """Documents, readings and transcripts of every practice world."""
        config = harness_config()
        for seed in practice_seeds(self.seed, self.size):
            world = make_world(seed, self.size.practice)
            library = Library(world)
            questions = questions_of(world, "train")
            yield from (_document(frame, document.title, document.text) for document in world.documents[::4])
            reader = Reader(library, frame, config, Dice(seed, "reading"))
            yield from reader.examples(questions, self.size.readings, _HOPS)
            wanderer = Wanderer(library, frame, config, Dice(seed, "wandering"))
            yield from wanderer.transcripts(questions, self.size.wanderings, _LOOKUPS)

    def _naming_seed(self, number: int) -> int:
        return practice_seeds(self.seed, self.size).stop + number


def _document(frame: ChatFrame, title: str, text: str) -> Example:
    writer = ExampleWriter(frame)
    writer.text(f"{title}\n{text}{frame.end_text}", READ)
    return writer.example()


def count_tokens(examples: Sequence[Example]) -> int:
    return sum(len(example.ids) for example in examples)
