"""Tool transcripts without a strategy: what an undirected reader does with the browser, and what it then answers.

Searches are for words of the question and for names in it or in what was read last, in any combination; results are
opened by chance; lines are looked for that may not be there; after a random number of calls an answer is given. Nothing
in a choice of tool depends on the solution. The answer is one that a careful reader could give: the right one as far as
the lines seen prove it, else what was seen last of the right kind. The calls are carried out by the real browser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trace_fast.trainer.base_policy.examples import READ, Example, ExampleWriter
from trace_fast.trainer.base_policy.library import Library
from trace_fast.trainer.docworld import Fact, Question
from trace_fast.trainer.docworld.dice import Dice
from trace_fast.trainer.docworld.schema import RELATIONS
from trace_fast.trainer.docworld.solver import Count, Extreme, Select, Var, proof
from trace_fast.trainer.harness import ChatFrame, HarnessConfig
from trace_fast.trainer.search.browser import Observation
from trace_fast.trainer.search.tools import FIND, OPEN, SEARCH

_RESULT = re.compile(r"^\[\d\] ", re.MULTILINE)
_LENGTHS = ((1, 2, 3, 4, 5, 6), (4, 5, 4, 3, 2, 1))  # calls before the answer, and their weights


@dataclass(slots=True)
class Wanderer:
    """Makes transcripts in one world."""

    library: Library
    frame: ChatFrame
    config: HarnessConfig
    dice: Dice
    _results: int = field(init=False, default=0)  # shown by the last search
    _page_open: bool = field(init=False, default=False)
    _names: list[str] = field(init=False, default_factory=list)

    def transcripts(self, questions: Sequence[Question], number: int, lookups: float) -> Iterator[Example]:
        """``number`` transcripts of random questions, a share of them on a single named fact."""
        facts = list(self.library.lookups)
        for _ in range(number):
            if self.dice.chance(lookups):
                yield self.on_fact(self.dice.pick(facts))
            else:
                yield self.on_question(self.dice.pick(questions))

    def on_fact(self, fact: Fact) -> Example:
        lookup = self.library.lookups[fact]
        return self._transcript(lookup.question, lookup.answers[0], [fact], fact.relation, about=False)

    def on_question(self, question: Question) -> Example:
        relation, about = asked_for(question)
        needed = proof(question.query, self.library.world.base)
        return self._transcript(question.question, question.answers[0], needed, relation, about=about)

    def _transcript(self, question: str, gold: str, needed: Sequence[Fact], relation: str, *, about: bool) -> Example:
        """One episode; ``relation`` and ``about`` as in ``asked_for``."""
        writer = ExampleWriter(self.frame)
        writer.add(self.frame.prompt(question).ids, 0.0)
        browser = self.library.browser(self.config.observation_tokens, self.frame.count_tokens)
        self._results, self._page_open, self._names = 0, False, []
        seen: dict[Fact, None] = {}
        for _ in range(self.dice.weighted(*_LENGTHS)):
            name, arguments = self._call(question)
            call = json.dumps({"name": name, "arguments": arguments})
            observation = browser.call(name, arguments)
            piece = self.frame.after_call(observation.text, name)
            if len(writer) + len(call) + len(piece.ids) > self.config.max_tokens - self.config.max_response_tokens:
                break
            writer.written(f"<tool_call>{call}</tool_call>")
            writer.add(piece.ids, READ)
            for fact in self.library.shown(observation):
                seen.pop(fact, None)  # seen last
                seen[fact] = None
            self._notice(name, observation)
        answer = gold if self._reads(gold, needed, seen) else self._guess(list(seen), relation, about)
        writer.written(f"<answer>{answer}</answer>")
        return writer.example()

    # --- choices ------------------------------------------------------------------------------------------------

    def _call(self, question: str) -> tuple[str, dict[str, str | int]]:
        kind = self.dice.weighted((SEARCH, OPEN, FIND), (12, 3 if self._results else 0, 1 if self._page_open else 0))
        if kind == SEARCH:
            return SEARCH, {"query": self._query(question)}
        if kind == OPEN:
            return OPEN, {"id": self.dice.below(self._results)}
        return FIND, {"pattern": self.dice.pick(question.rstrip("?.").split())}

    def _query(self, question: str) -> str:
        """Some words of the question, a name that stands in it or was seen, or both."""
        words = re.sub(r"[?.:,]", "", question).split()
        length = self.dice.between(3, min(9, len(words)))
        start = self.dice.below(len(words) - length + 1)
        some = " ".join(words[start : start + length])
        asked = self.library.names(question)
        names = asked if asked and (not self._names or self.dice.chance(0.3)) else self._names
        if not names or self.dice.chance(0.05):
            return some
        name = self.dice.pick(names)
        return name if self.dice.chance(0.5) else f"{name} {some}"

    def _reads(self, gold: str, needed: Sequence[Fact], seen: Mapping[Fact, None]) -> bool:
        """Whether the answer is the right one: by the share of its proof that was seen, if it was seen itself."""
        shown = [fact for fact in needed if fact in seen]
        spelled = self.library.spelled
        if not any(gold in (spelled(fact.subject), spelled(fact.object)) for fact in shown):
            return False
        return self.dice.chance(len(shown) / len(needed))

    def _guess(self, seen: Sequence[Fact], relation: str, about: bool) -> str:
        """What fits the question and was seen last: by its relation, else by its kind, else any name."""
        spelled = self.library.spelled
        kind = RELATIONS[relation].subject if about else RELATIONS[relation].object
        for fact in reversed(seen):
            if fact.relation == relation:
                return spelled(fact.subject if about else fact.object)
        for fact in reversed(seen):
            if RELATIONS[fact.relation].object == kind:
                return spelled(fact.object)
            if RELATIONS[fact.relation].subject == kind:
                return spelled(fact.subject)
        return self._names[-1] if self._names else "nothing"

    def _notice(self, tool: str, observation: Observation) -> None:
        self._page_open |= tool != SEARCH and not observation.error
        text = observation.text
        if tool == SEARCH:
            results = _RESULT.split(text)[1:]
            self._results = len(results)
            text = self.dice.weighted(results[:3], (4, 1, 1)[: len(results)]) if results else ""
        self._names = list(dict.fromkeys(self.library.names(text))) or self._names


def asked_for(question: Question) -> tuple[str, bool]:
    """``(relation, about)``: the answer is the object, or with ``about`` the subject, of a fact of this relation."""
    query = question.query
    if isinstance(query, Extreme):
        return query.relation, True
    assert not isinstance(query, Count), question.id
    assert isinstance(query, Select)
    target: Var = query.target
    last = next(atom for atom in reversed(query.atoms) if target in (atom.subject, atom.object))
    return last.relation, last.subject == target
