"""Grounded question answering: observations of the browser, then questions that their lines answer.

Three kinds, all over practice worlds: what a search shows, what a page shows, and the pages that prove a question of
several hops, in any order and with another page among them. Behind the first two come searches for names that they
show, any of them: how a name is copied into a call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trace_fast.trainer.base_policy.examples import READ, Example, ExampleWriter
from trace_fast.trainer.base_policy.library import Library
from trace_fast.trainer.docworld import Fact, Question
from trace_fast.trainer.docworld.dice import Dice
from trace_fast.trainer.docworld.grammar import mention
from trace_fast.trainer.harness import ChatFrame, HarnessConfig
from trace_fast.trainer.search.browser import Observation
from trace_fast.trainer.search.tools import OPEN, SEARCH

_QUESTIONS, _QUERIES = 6, 4  # of one text


@dataclass(slots=True)
class Reader:
    """Makes examples of reading in one world."""

    library: Library
    frame: ChatFrame
    config: HarnessConfig
    dice: Dice

    def examples(self, questions: Sequence[Question], number: int, hops: float) -> Iterator[Example]:
        """``number`` examples, a share of them on questions of several hops; every kind of entity is as frequent."""
        by_kind: dict[str, dict[str, None]] = {}
        for fact in self.library.lookups:
            by_kind.setdefault(self.library.world.entities[fact.subject].kind, {})[fact.subject] = None
        pools = [list(entities) for entities in by_kind.values()]
        for _ in range(number):
            if self.dice.chance(hops):
                yield self.on_question(self.dice.pick(questions))
            else:
                yield self.on_entity(self.dice.pick(self.dice.pick(pools)))

    def on_entity(self, entity: str) -> Example:
        """A search for the entity, perhaps with one of the pages found, and questions on what they show."""
        browser = self.library.browser(self.config.observation_tokens, self.frame.count_tokens)
        seen = [browser.call(SEARCH, {"query": mention(self.library.world.entities[entity])})]
        if self.dice.chance(0.5):
            page = browser.call(OPEN, {"id": self.dice.below(3)})
            seen = [page] if self.dice.chance(0.5) else [*seen, page]
        shown = [fact for observation in seen for fact in self.library.shown(observation)]
        shown = [fact for fact in dict.fromkeys(shown) if fact in self.library.lookups]
        asked = [self._lookup(fact) for fact in self.dice.shuffled(shown)[:_QUESTIONS]]
        names = self.library.names("\n".join(observation.text for observation in seen))
        return self._example(seen, asked, self.dice.shuffled(names)[:_QUERIES])

    def on_question(self, question: Question) -> Example:
        """An episode that reads the pages which prove a question, and another one: only its answer is learned."""
        docids = [*question.support, self.dice.pick(self.library.world.documents).docid]
        browser = self.library.browser(self.config.observation_tokens, self.frame.count_tokens)
        writer = ExampleWriter(self.frame)
        writer.add(self.frame.prompt(question.question).ids, 0.0)
        for docid in self.dice.shuffled(list(dict.fromkeys(docids))):
            call = json.dumps({"name": OPEN, "arguments": {"id": self.dice.below(3)}})
            writer.text(f"<tool_call>{call}</tool_call>{self.frame.end_text}", 0.0)
            writer.add(self.frame.after_call(self.library.page(docid, browser).text, OPEN).ids, 0.0)
        writer.written(f"<answer>{question.answers[0]}</answer>")
        return writer.example()

    def _lookup(self, fact: Fact) -> tuple[str, str]:
        lookup = self.library.lookups[fact]
        return lookup.question, lookup.answers[0]

    def _example(
        self, seen: Sequence[Observation], asked: Sequence[tuple[str, str]], names: Sequence[str]
    ) -> Example:
        """Observations, questions with their answers, and searches for names that were seen, any of them."""
        writer = ExampleWriter(self.frame)
        text = "\n".join(self.frame.neutral(observation.text) for observation in seen)
        writer.text(text + "<|im_end|>\n", READ)
        for question, answer in asked:
            writer.text(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", 0.0)
            writer.written(f"<answer>{answer}</answer>")
            writer.text("\n", 0.0)
        for name in names:
            call = json.dumps({"name": SEARCH, "arguments": {"query": name}})
            writer.text("<|im_start|>assistant\n", 0.0)
            writer.written(f"<tool_call>{call}</tool_call>")
            writer.text("\n", 0.0)
        return writer.example()
