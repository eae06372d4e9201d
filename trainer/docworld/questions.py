"""Questions from the five templates of TRACE, Table 8, with the answers proved from the documents.

Candidates are drawn at random and kept only if all of this holds (A.4.3, without a language model):

- the documents determine one answer, and the question does not contain it;
- 2 to 6 documents are irreplaceable, and those alone determine the same answer: they are the support, and their number
  is the question's ``hops``;
- no condition can be left out;
- something is obfuscated, and not only by the noun of what is asked for;
- no answer is right for more than 40 % of a template's questions, so that guessing does not pay.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from trace_fast.errors import ConfigError
from trace_fast.trainer.docworld import grammar
from trace_fast.trainer.docworld.descriptions import Condition, Describer, Description, Obfuscation, merge, split_head
from trace_fast.trainer.docworld.dice import Dice
from trace_fast.trainer.docworld.schema import KINDS, RELATIONS, Fact, Kind, Split
from trace_fast.trainer.docworld.solver import (
    Atom,
    Count,
    Extreme,
    FactBase,
    Query,
    Select,
    Value,
    Var,
    irreplaceable,
    needs_every_atom,
    proof,
    solve,
)

Template = Literal["bridge_entity", "intersection", "filtered_count", "comparison", "reverse_lookup"]

HOPS = (2, 3, 4, 5, 6)
K = TypeVar("K")
_ANSWER = Var("answer")
_STALLED = 1000  # candidates in a row that brought the selection no further
_MOST_COUNTED = 9  # as many as have a word
_MOST_ALIKE = 0.4
# What a reverse lookup asks for: who or what an output comes from.
_SOURCES: Mapping[Kind, tuple[str, ...]] = {
    "work": ("creator", "commissioner"),
    "company": ("founder",),
    "prize": ("donor",),
}


@dataclass(frozen=True, slots=True)
class Question:
    """A question and what proves it.

    Args:
        answers: accepted spellings, the usual one first. support: ids of the irreplaceable documents, in the order in
            which the proof uses them. entities: names of all that the proof passes through. query: the logical form.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    template: Template
    hops: int
    support: tuple[str, ...]
    obfuscations: tuple[Obfuscation, ...]
    entities: tuple[str, ...]
    split: Split
    query: Query

    def to_record(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "question": self.question,
            "answers": list(self.answers),
            "template": self.template,
            "hops": self.hops,
            "support": list(self.support),
            "obfuscations": list(self.obfuscations),
            "entities": list(self.entities),
            "split": self.split,
        }


@dataclass(frozen=True, slots=True)
class _Candidate:
    text: str
    query: Query
    obfuscations: tuple[Obfuscation, ...]


@dataclass(slots=True)
class _Selection:
    """Chooses ``number`` of the questions offered: those with the hops ``wanted``, or others in their place."""

    number: int
    wanted: dict[int, int]
    taken: list[Question] = field(default_factory=list)
    spare: list[Question] = field(default_factory=list)
    alike: Counter[str] = field(default_factory=Counter)  # answers of those taken
    offered: Counter[str] = field(default_factory=Counter)  # answers of those taken and spare
    usable: int = 0  # of those taken and spare

    def complete(self) -> bool:
        return not any(self.wanted.values())

    def offer(self, question: Question) -> bool:
        """Whether the question was wanted, or may be needed in the place of one."""
        answer = question.answers[0]
        needed = self.offered[answer] < self._most_alike() and self.usable < self.number
        self.usable += self.offered[answer] < self._most_alike()
        self.offered[answer] += 1
        if self.wanted[question.hops] > 0 and self.alike[answer] < self._most_alike():
            self.wanted[question.hops] -= 1
            self._take(question)
            return True
        if self.offered[answer] <= 2 * self._most_alike():
            self.spare.append(question)
        return needed

    def result(self) -> list[Question]:
        for question in self.spare:
            if len(self.taken) < self.number and self.alike[question.answers[0]] < self._most_alike():
                self._take(question)
        return self.taken

    def _take(self, question: Question) -> None:
        self.taken.append(question)
        self.alike[question.answers[0]] += 1

    def _most_alike(self) -> int:
        return math.ceil(self.number * _MOST_ALIKE)


@dataclass(slots=True)
class QuestionMaker:
    """Makes the questions of one split."""

    dice: Dice
    describer: Describer
    split: Split
    _by_kind: dict[Kind, list[str]] = field(init=False)
    _asked: set[str] = field(init=False, default_factory=set)  # texts; asked for membership only

    def __post_init__(self) -> None:
        self._by_kind = {kind: [] for kind in KINDS}
        for entity in self.describer.entities.values():
            if entity.split == self.split:
                self._by_kind[entity.kind].append(entity.id)

    def make(self, number: int, hop_weights: Mapping[int, float]) -> tuple[Question, ...]:
        """``number`` questions, spread evenly over the templates, in random order.

        Args:
            hop_weights: wanted share of each number of hops; where a template cannot give it, others take its place.

        Raises:
            ConfigError: the world is too small for so many questions.
        """
        shares = _apportion(number, dict.fromkeys(self.templates(), 1.0))
        made = [question for template, share in shares.items() for question in self._of(template, share, hop_weights)]
        return tuple(replace(q, id=f"{self.split}-{i}") for i, q in enumerate(self.dice.shuffled(made)))

    def templates(self) -> dict[Template, Callable[[int], _Candidate | None]]:
        return {
            "bridge_entity": self._bridge_entity,
            "intersection": self._intersection,
            "filtered_count": self._filtered_count,
            "comparison": self._comparison,
            "reverse_lookup": self._reverse_lookup,
        }

    def _of(self, template: Template, number: int, hop_weights: Mapping[int, float]) -> list[Question]:
        draw = self.templates()[template]
        selection = _Selection(number, _apportion(number, hop_weights))
        stalled = 0
        while not selection.complete() and stalled < _STALLED:
            candidate = draw(self.dice.weighted(list(selection.wanted), list(selection.wanted.values())))
            stalled += 1
            if candidate is None or candidate.text in self._asked:
                continue
            question = self._proved(template, candidate)
            if question is not None:
                self._asked.add(question.question)
                if selection.offer(question):
                    stalled = 0
        taken = selection.result()
        if len(taken) < number:
            raise ConfigError(
                f"docworld size: expected a world with {number} {template} questions in split {self.split}, "
                f"found {len(taken)}; give the split more lands or ask for fewer questions"
            )
        return taken

    def _proved(self, template: Template, candidate: _Candidate) -> Question | None:
        """The question, if the documents prove it in the way the module asks for."""
        base, query = self.describer.base, candidate.query
        answer = solve(query, base)
        if answer is None or not candidate.obfuscations:
            return None
        answers = self._spellings(query, answer)
        if gives_away(candidate.text, answers):
            return None
        support = support_of(query, base)
        if support is None or not needs_every_atom(query, base):
            return None
        ids = dict.fromkeys(end for fact in proof(query, base) for end in (fact.subject, str(fact.object)))
        names = tuple(self.describer.entities[end].name for end in ids if end in self.describer.entities)
        return Question(
            "",  # numbered when all are there
            candidate.text,
            answers,
            template,
            len(support),
            support,
            candidate.obfuscations,
            names,
            self.split,
            query,
        )

    def _spellings(self, query: Query, answer: Value) -> tuple[str, ...]:
        if isinstance(query, Count):
            assert isinstance(answer, int), answer
            return (str(answer), grammar.NUMBER_WORDS[answer])
        if answer in self.describer.entities:
            name = self.describer.entities[str(answer)].name
            return (name, name.removeprefix("The ")) if name.startswith("The ") else (name,)
        thousands = isinstance(query, Select) and query.atoms[-1].relation == "population"
        return (str(answer), f"{answer} thousand") if thousands else (str(answer),)

    # The templates. Each draws one candidate that aims at ``hops`` documents, or gives up.

    def _bridge_entity(self, hops: int) -> _Candidate | None:
        entity = self._any(("city", "person", "company", "work", "prize"))
        fact = self.dice.pick(self.describer.about[entity])
        bridge = self.describer.describe(entity, hops - 1, frozenset([str(fact.object)]), fact.relation)
        return None if bridge is None else self._ask(fact, bridge)

    def _reverse_lookup(self, hops: int) -> _Candidate | None:
        entity = self._any(tuple(_SOURCES))
        kind = self.describer.entities[entity].kind
        sources = [fact for fact in self.describer.about[entity] if fact.relation in _SOURCES[kind]]
        if not sources:
            return None
        asked = self.dice.pick(sources)
        others = [fact for fact in self.describer.about[entity] if fact is not asked]
        conditions = self._conditions(entity, others, hops - 1, frozenset([str(asked.object)]))
        if conditions is None or not self.describer.unique(entity, conditions):
            return None
        output = Description(
            Var(entity),
            self.describer.phrase(kind, conditions),
            _atoms(conditions),
            obfuscations=merge(("name_mask",), *(condition.obfuscations for condition in conditions)),
        )
        return self._ask(asked, output)

    def _intersection(self, hops: int) -> _Candidate | None:
        entity = self._any(("city", "person", "company", "work"))
        conditions = self._conditions(entity, self.describer.about[entity], hops, frozenset())
        if conditions is None:
            return None
        noun, predicates = split_head(self.describer.entities[entity].kind, conditions, number=0)
        article = "Which" if len(predicates) == 1 or self.dice.chance(0.5) else "One"
        if article == "Which":
            text = f"Which {noun} {' and '.join(predicates)}?"
        else:
            rest = " ".join(f"The same {noun} {predicate}." for predicate in predicates[1:])
            text = f"One {noun} {predicates[0]}. {rest} Which {noun} is it?"
        return _conditioned(text, Select(Var(entity), _atoms(conditions)), conditions)

    def _filtered_count(self, hops: int) -> _Candidate | None:
        entity = self._any(("city", "person", "company", "work"))
        about = self.describer.about[entity]
        links = [fact for fact in about if RELATIONS[fact.relation].links]
        filters = [fact for fact in about if not RELATIONS[fact.relation].links]
        link, used = self.dice.pick(links), frozenset([entity])
        if self.dice.chance(0.35):
            member = self.describer.linked_to_some(link, self.dice.below(2), used)
        else:
            member = self.describer.linked(link, self.dice.below(2 if hops < 5 else 3), used)
        if member is None:
            return None
        conditions = [self.describer.valued(self.dice.pick(filters), wide=self.dice.chance(0.7)), member]
        query = Count(Var(entity), _atoms(conditions))
        number = solve(query, self.describer.base)
        if not isinstance(number, int) or not number <= _MOST_COUNTED:
            return None
        noun, predicates = split_head(self.describer.entities[entity].kind, conditions, number=1)
        return _conditioned(f"How many {noun} {' and '.join(predicates)}?", query, conditions)

    def _comparison(self, hops: int) -> _Candidate | None:
        relation = self.dice.pick(tuple(grammar.COMPARISONS))
        members = self._by_kind[RELATIONS[relation].subject]
        first, second = self.dice.pick(members), self.dice.pick(members)
        if first == second:
            return None
        depth = max(1, (hops - 1) // 2)
        one = self.describer.describe(first, depth, frozenset([second]), relation)
        if one is None:
            return None
        two = self.describer.describe(second, max(1, hops - 2 - depth), one.entities, relation)
        if two is None:
            return None
        which: Literal["least", "most"] = self.dice.pick(("least", "most"))
        wording = self.dice.pick(grammar.COMPARISONS[relation][0 if which == "least" else 1])
        query = Extreme(one.select(), two.select(), relation, which)
        return _Candidate(f"{wording}: {one.text}, or {two.text}?", query, merge(one.obfuscations, two.obfuscations))

    def _conditions(self, entity: str, facts: list[Fact], hops: int, used: frozenset[str]) -> list[Condition] | None:
        """Two or three conditions on ``entity``, short ones first; only the last one has described objects inside."""
        number = 2 if hops < 3 else self.dice.pick((2, 2, 3))
        chosen = self.dice.shuffled(facts)[:number]
        links = [fact for fact in chosen if RELATIONS[fact.relation].links]
        if len(chosen) < 2 or not links:
            return None
        conditions = [self.describer.valued(fact) for fact in chosen if not RELATIONS[fact.relation].links]
        used = used | {entity, *(str(fact.object) for fact in links)}
        for place, fact in enumerate(links, 1):
            depth = max(0, hops - number) if place == len(links) else 0
            condition = self.describer.linked(fact, depth, used)
            if condition is None:
                return None
            used = used | condition.entities
            conditions.append(condition)
        return conditions

    def _ask(self, fact: Fact, subject: Description) -> _Candidate:
        """Asks for the object of ``fact``, in one sentence or, for long descriptions, in two."""
        ask = self.dice.pick(grammar.PHRASES[fact.relation].ask)
        if subject.text.count(" ") > 8 or self.dice.chance(0.4):
            noun = grammar.NOUNS[RELATIONS[fact.relation].subject]
            text = f"{self.dice.pick(grammar.LEADS)} {subject.text}. {ask.format(s=f'this {noun}')}"
        else:
            text = ask.format(s=subject.text)
        atoms = (*subject.atoms, Atom(subject.term, fact.relation, _ANSWER))
        return _Candidate(text, Select(_ANSWER, atoms), subject.obfuscations)

    def _any(self, kinds: tuple[Kind, ...]) -> str:
        return self.dice.pick(self._by_kind[self.dice.pick(kinds)])


def gives_away(text: str, answers: tuple[str, ...]) -> bool:
    """Whether one of ``answers`` stands in ``text`` as whole words."""
    return any(re.search(rf"\b{re.escape(answer)}\b", text, re.IGNORECASE) for answer in answers)


def support_of(query: Query, base: FactBase) -> tuple[str, ...] | None:
    """The irreplaceable documents of an answerable ``query``; ``None`` unless they are 2 to 6 and do alone."""
    support = irreplaceable(query, base)
    enough = len(support) in HOPS and solve(query, base.only(support)) == solve(query, base)
    return tuple(support) if enough else None


def _apportion(number: int, weights: Mapping[K, float]) -> dict[K, int]:
    """Whole shares of ``number`` in proportion to ``weights`` (largest remainder; ties go to the first)."""
    total = sum(weights.values())
    exact = {key: number * weight / total for key, weight in weights.items()}
    shares = {key: int(share) for key, share in exact.items()}
    by_remainder = sorted(weights, key=lambda key: shares[key] - exact[key])
    for key in by_remainder[: number - sum(shares.values())]:
        shares[key] += 1
    return shares


def _atoms(conditions: list[Condition]) -> tuple[Atom, ...]:
    return tuple(atom for condition in conditions for atom in condition.atoms)


def _conditioned(text: str, query: Query, conditions: list[Condition]) -> _Candidate:
    """A question for what fulfils ``conditions``; that it calls it a miller masks no name."""
    masks = (condition.obfuscations for condition in conditions if condition.obfuscations != ("role",))
    return _Candidate(text, query, merge(*masks))
