"""Drills: short texts that are told once and then needed again, before the policy reads longer ones.

A model of this size learns to look an attribute up by its owner and to copy it where most of the tokens call for it;
among long texts it takes many times as many. Three kinds, over practice worlds:

- repetition: some sentences, and the same ones in another order;
- questions behind: some sentences, and a question on each;
- questions in front: episodes in miniature, one behind another: a question, a search, a few sentences, the answer. It
  is the form of an episode, also of one that is scored, and much the hardest of the three.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trace_fast.trainer.base_policy.examples import READ, Example, ExampleWriter
from trace_fast.trainer.base_policy.library import Library
from trace_fast.trainer.docworld import Fact
from trace_fast.trainer.docworld.dice import Dice
from trace_fast.trainer.harness import ChatFrame
from trace_fast.trainer.search.tools import SEARCH

_SENTENCES = (2, 7)  # fewest, most
_EPISODES = (2, 5)
_ALIKE = (0, 2)  # sentences of the same relation, of the same owner, and of neither, beside the one that answers
_KINDS = (("repetition", "behind", "in front"), (1, 1, 18))


@dataclass(slots=True)
class DrillMaker:
    """Makes drills in one world. Every relation is as frequent as any other."""

    library: Library
    frame: ChatFrame
    dice: Dice
    _by_relation: dict[str, list[Fact]] = field(init=False, default_factory=dict)
    _by_owner: dict[str, list[Fact]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for fact in self.library.lookups:
            self._by_relation.setdefault(fact.relation, []).append(fact)
            self._by_owner.setdefault(fact.subject, []).append(fact)

    def examples(self, number: int) -> Iterator[Example]:
        """``number`` drills."""
        for _ in range(number):
            kind = self.dice.weighted(*_KINDS)
            if kind == "in front":
                yield self._in_front()
            else:
                facts = self._some(self.dice.between(*_SENTENCES))
                told = [self.library.told(fact, self.dice) for fact in facts]
                yield self._repeated(told) if kind == "repetition" else self._behind(told, facts)

    def _some(self, number: int) -> list[Fact]:
        pools = list(self._by_relation.values())
        return list(dict.fromkeys(self.dice.pick(self.dice.pick(pools)) for _ in range(number)))

    def _repeated(self, told: Sequence[str]) -> Example:
        writer = ExampleWriter(self.frame)
        writer.text("\n".join(told), READ)
        writer.text("".join(f"\n{line}" for line in self.dice.shuffled(told)), 0.5)
        return writer.example()

    def _behind(self, told: Sequence[str], facts: Sequence[Fact]) -> Example:
        writer = ExampleWriter(self.frame)
        writer.text("\n".join(told), READ)
        for fact in self.dice.shuffled(facts):
            lookup = self.library.lookups[fact]
            writer.text(f"<|im_end|>\n<|im_start|>user\n{lookup.question}<|im_end|>\n<|im_start|>assistant\n", 0.0)
            writer.written(f"<answer>{lookup.answers[0]}</answer>")
        return writer.example()

    def _in_front(self) -> Example:
        writer = ExampleWriter(self.frame)
        for _ in range(self.dice.between(*_EPISODES)):
            (fact,) = self._some(1)
            lookup = self.library.lookups[fact]
            call = json.dumps({"name": SEARCH, "arguments": {"query": self._query(lookup.question)}})
            told = " ".join(self.library.told(each, self.dice) for each in self._among_others(fact))
            writer.text(f"<|im_start|>user\n{lookup.question}<|im_end|>\n<|im_start|>assistant\n", 0.0)
            writer.written(f"<tool_call>{call}</tool_call>")
            writer.text("\n<|im_start|>tool\n", 0.0)
            writer.text(told, READ)
            writer.text("<|im_end|>\n<|im_start|>assistant\n", 0.0)
            writer.written(f"<answer>{lookup.answers[0]}</answer>")
            writer.text("\n", 0.0)
        return writer.example()

    def _query(self, question: str) -> str:
        """A name of the question, with some of its words or without."""
        words = question.rstrip("?").split()
        names = self.library.names(question)
        start = self.dice.below(len(words))
        some = words[start : start + 4] if self.dice.chance(0.5) or not names else []
        return " ".join([*([self.dice.pick(names)] if names else []), *some])

    def _among_others(self, fact: Fact) -> list[Fact]:
        """A fact among some that are like it; none of them answers the same question."""
        same_relation = [
            other
            for other in self._by_relation[fact.relation]
            if other.subject != fact.subject and other.object != fact.object
        ]
        same_owner = [other for other in self._by_owner[fact.subject] if other.relation != fact.relation]
        others = [
            self.dice.pick(pool)
            for pool in (same_relation, same_owner)
            for _ in range(self.dice.between(*_ALIKE))
            if pool
        ]
        others += [other for other in self._some(self.dice.between(*_ALIKE)) if not self._same_question(other, fact)]
        return self.dice.shuffled(list(dict.fromkeys([fact, *others])))

    @staticmethod
    def _same_question(first: Fact, second: Fact) -> bool:
        return (first.subject, first.relation) == (second.subject, second.relation)
