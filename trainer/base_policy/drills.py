"""Drills: short texts that are told once and then needed again, before the policy reads longer ones.

A model of this size learns to copy, and to look an attribute up by its owner, within a few hundred steps where most of
the tokens call for it; among long texts it takes many times as many. Two kinds, over facts of practice worlds:

- repetition: some sentences, and the same ones in another order;
- questions: some sentences, and a question on each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trace_fast.trainer.base_policy.examples import READ, Example, ExampleWriter
from trace_fast.trainer.base_policy.library import Library
from trace_fast.trainer.docworld import Fact
from trace_fast.trainer.docworld.dice import Dice
from trace_fast.trainer.harness import ChatFrame

_FACTS = (2, 6)  # of one drill: fewest, most
_REPETITIONS = 0.4  # share of the first kind


@dataclass(slots=True)
class DrillMaker:
    """Makes drills in one world."""

    library: Library
    frame: ChatFrame
    dice: Dice

    def examples(self, number: int) -> Iterator[Example]:
        """``number`` drills; every relation is as frequent as any other."""
        by_relation: dict[str, list[Fact]] = {}
        for fact in self.library.lookups:
            by_relation.setdefault(fact.relation, []).append(fact)
        pools = list(by_relation.values())
        for _ in range(number):
            chosen = [self.dice.pick(self.dice.pick(pools)) for _ in range(self.dice.between(*_FACTS))]
            yield self._drill(list(dict.fromkeys(chosen)))

    def _drill(self, facts: list[Fact]) -> Example:
        writer = ExampleWriter(self.frame)
        told = {fact: self.library.told(fact, self.dice) for fact in facts}
        writer.text("\n".join(told.values()), READ)
        repeat = self.dice.chance(_REPETITIONS)
        for fact in self.dice.shuffled(facts):
            if repeat:
                writer.text("\n" + told[fact], 0.5)
            else:
                lookup = self.library.lookups[fact]
                writer.text(f"\n<|im_start|>user\n{lookup.question}<|im_end|>\n<|im_start|>assistant\n", 0.0)
                writer.written(f"<answer>{lookup.answers[0]}</answer>")
        return writer.example()
