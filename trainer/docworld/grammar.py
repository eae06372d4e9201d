"""Wording: how a fact is told in a document, and how it is used and asked for in a question.

Templates hold ``{s}`` (subject) and ``{o}`` (object). The sentences of ``told`` can be told apart, so a reader who
knows the names gets exactly the facts back that were written; tests do that. The vocabulary is kept small on purpose:
a policy of a few million parameters learns it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trace_fast.trainer.docworld.schema import Entity, Kind

NOUNS: Mapping[Kind, str] = MappingProxyType(
    {"land": "land", "city": "city", "person": "person", "company": "firm", "work": "work", "prize": "prize"}
)
PLURAL_NOUNS: Mapping[Kind, str] = MappingProxyType(
    {"land": "lands", "city": "cities", "person": "people", "company": "firms", "work": "works", "prize": "prizes"}
)
_PLURAL_VERBS = {"was": "were", "is": "are", "has": "have", "works": "work", "depicts": "depict", "lies": "lie"}
# Relations whose object makes the noun of its subject: "the miller who ...". Populations do too, by their bands.
HEADS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"trade": ("{o}", "{o}s"), "form": ("{o}", "{o}s"), "makes": ("maker of {o}", "makers of {o}")}
)
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True, slots=True)
class Phrases:
    """Wording of one relation.

    Args:
        told: sentences of documents. ask: questions for the object. predicate: what the object says of the subject,
            beginning with its verb; empty where the object makes a noun instead (``HEADS``). object_np: noun phrases
            for the object, where it is an entity; the last one ends with ``{s}``, so that long subjects stay readable.
    """

    told: tuple[str, ...]
    ask: tuple[str, ...]
    predicate: tuple[str, ...] = ()
    object_np: tuple[str, ...] = ()


PHRASES: Mapping[str, Phrases] = MappingProxyType(
    {
        "capital": Phrases(
            ("The capital of {s} is {o}.", "{s} is ruled from {o}."),
            ("What is the capital of {s}?",),
            ("is ruled from {o}",),
            ("the city from which {s} is ruled", "the capital of {s}"),
        ),
        "in_land": Phrases(
            ("{s} lies in {o}.", "{s} is a city of {o}.", "{s} belongs to {o}."),
            ("In which land does {s} lie?", "Which land does {s} belong to?"),
            ("lies in {o}",),
            ("the land where {s} lies", "the land around {s}"),
        ),
        "city_founded": Phrases(
            ("{s} was founded in {o}.", "The first wall of {s} was built in {o}.", "{s} dates back to {o}."),
            ("In which year was {s} founded?",),
            ("was founded {o}",),
        ),
        "population": Phrases(
            ("About {o} thousand people live in {s}.", "{s} has some {o} thousand people."),
            ("How many thousand people live in {s}?",),
        ),
        "known_for": Phrases(
            ("{s} is known for its {o}.", "Traders come to {s} for its {o}.", "The pride of {s} is its {o}."),
            ("What is {s} known for?",),
            ("is known for its {o}",),
        ),
        "mayor": Phrases(
            ("The mayor of {s} is {o}.", "{o} is the mayor of {s}.", "{s} chose {o} as its mayor."),
            ("Who is the mayor of {s}?",),
            ("has {o} as its mayor",),
            ("the mayor of {s}",),
        ),
        "born_in": Phrases(
            ("{s} was born at {o}.", "{s} comes from {o}.", "The birthplace of {s} is {o}."),
            ("In which city was {s} born?", "Where was {s} born?"),
            ("was born at {o}",),
            ("the city where {s} was born", "the birthplace of {s}"),
        ),
        "born_year": Phrases(
            ("{s} was born in {o}.", "The year of birth of {s} is {o}.", "The life of {s} began in {o}."),
            ("In which year was {s} born?",),
            ("was born {o}",),
        ),
        "trade": Phrases(
            ("{s} is a {o} by trade.", "By trade {s} is a {o}.", "{s} learned the trade of a {o}."),
            ("What is the trade of {s}?",),
        ),
        "employer": Phrases(
            ("{s} works for {o}.", "{s} has a post at {o}.", "{o} employs {s}."),
            ("For which firm does {s} work?", "Which firm employs {s}?"),
            ("works for {o}", "has a post at {o}"),
            ("the firm where {s} works", "the firm that employs {s}"),
        ),
        "teacher": Phrases(
            ("{s} studied under {o}.", "{s} was a pupil of {o}.", "{o} taught {s}."),
            ("Who taught {s}?", "Under whom did {s} study?"),
            ("studied under {o}", "was a pupil of {o}"),
            ("the teacher of {s}", "the person who taught {s}"),
        ),
        "based_in": Phrases(
            ("{s} has its seat in {o}.", "The seat of {s} is in {o}.", "{s} is run from {o}."),
            ("In which city does {s} have its seat?", "From which city is {s} run?"),
            ("is run from {o}", "has its seat in {o}"),
            ("the city where {s} has its seat", "the home city of {s}"),
        ),
        "founder": Phrases(
            ("{o} founded {s}.", "{s} was started by {o}.", "The founder of {s} is {o}."),
            ("Who founded {s}?", "Who started {s}?"),
            ("was started by {o}",),
            ("the founder of {s}", "the person who started {s}"),
        ),
        "company_founded": Phrases(
            ("{s} was founded in {o}.", "{s} opened its doors in {o}.", "The books of {s} begin in {o}."),
            ("In which year was {s} founded?",),
            ("was founded {o}",),
        ),
        "makes": Phrases(
            ("{s} makes {o}.", "{s} is a maker of {o}.", "The main product of {s} is {o}."),
            ("What does {s} make?",),
        ),
        "creator": Phrases(
            ("{s} was made by {o}.", "{o} made {s}.", "The creator of {s} is {o}."),
            ("Who made {s}?",),
            ("was made by {o}",),
            ("the person who made {s}", "the creator of {s}"),
        ),
        "form": Phrases(
            ("In form {s} is a {o}.", "{s} took the form of a {o}."),
            ("What kind of work is {s}?",),
        ),
        "finished": Phrases(
            ("{s} was finished in {o}.", "{s} was first shown in {o}.", "The date on {s} is {o}."),
            ("In which year was {s} finished?",),
            ("was finished {o}",),
        ),
        "depicts": Phrases(
            ("{s} depicts {o}.", "The city in {s} is {o}.", "{s} shows the streets of {o}."),
            ("Which city does {s} depict?",),
            ("depicts {o}",),
            ("the city that {s} depicts", "the city seen in {s}"),
        ),
        "commissioner": Phrases(
            ("{s} was ordered by {o}.", "{o} paid for {s}.", "{s} was made for {o}."),
            ("Which firm ordered {s}?", "Which firm paid for {s}?"),
            ("was ordered by {o}", "was made for {o}"),
            ("the firm that ordered {s}", "the firm that paid for {s}"),
        ),
        "won": Phrases(
            ("{s} won {o}.", "{o} went to {s}.", "The judges gave {o} to {s}."),
            ("Which prize did {s} win?",),
            ("won {o}",),
            ("the prize that {s} won", "the prize given to {s}"),
        ),
        "given_in": Phrases(
            ("{s} is given in {o}.", "The judges of {s} meet in {o}."),
            ("In which city is {s} given?",),
            ("is given in {o}",),
            ("the city where {s} is given", "the city that hosts {s}"),
        ),
        "donor": Phrases(
            ("{s} was endowed by {o}.", "{o} gave the money for {s}."),
            ("Who endowed {s}?", "Who gave the money for {s}?"),
            ("was endowed by {o}",),
            ("the person who endowed {s}",),
        ),
        "first_given": Phrases(
            ("{s} was first given in {o}.", "The first year of {s} was {o}."),
            ("In which year was {s} first given?",),
            ("was first given {o}",),
        ),
    }
)

# Of two entities: the smaller number, the larger number.
COMPARISONS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "city_founded": (("Which city is older",), ("Which city is younger",)),
        "population": (("In which city do fewer people live",), ("In which city do more people live",)),
        "born_year": (("Who was born earlier",), ("Who was born later",)),
        "company_founded": (("Which firm was founded earlier",), ("Which firm was founded later",)),
        "finished": (("Which work was finished earlier",), ("Which work was finished later",)),
        "first_given": (("Which prize was first given earlier",), ("Which prize was first given later",)),
    }
)

LEADS = ("Consider", "Look for", "Take")  # of a question in two sentences

INTRODUCTIONS = (
    "This page is about {s}, a {noun}.",
    "Here is what the archive holds on {s}, a {noun}.",
    "The {noun} of this page is {s}.",
)
NOTE_TITLES = ("Note on {name}", "Letter about {name}", "{name} in the records", "Report on {name}")
GAZETTE_TITLE = "{name} gazette, number {number}"
ESSAY_TITLES = ("A day with {name}", "Thoughts on {name}", "Questions about {name}")

# Sentences that state no fact. Those of MENTIONS name entities all the same: they draw searches, and answer nothing.
FILLERS = (
    "The archive has nothing more on this.",
    "The page was last checked in the spring.",
    "Some of the old papers were lost in a fire.",
    "A drawing is kept with the page.",
    "Readers may send letters to the archive.",
    "The hand of the first writer is hard to read.",
    "Much has been said about this, and little of it is true.",
    "The rest of the sheet is empty.",
)
MENTIONS = (
    "Do not mistake {a} for {b}.",
    "Letters about {a} are often sent to the page on {b}.",
    "Many readers ask about {a} and {b}.",
    "An old song names {a} and {b} in one line.",
    "We know of no tie between {a} and {b}.",
)


def mention(entity: Entity) -> str:
    """How a text names ``entity`` inside a sentence."""
    return f"the {entity.name}" if entity.kind == "prize" else entity.name


def short_mention(entity: Entity) -> str:
    """How the page about ``entity`` names it after the first time: the family name, or "the" and its noun."""
    return entity.name.split()[-1] if entity.kind == "person" else f"the {NOUNS[entity.kind]}"


def sentence(text: str) -> str:
    """``text`` with a capital at its start."""
    return text[0].upper() + text[1:]


def who(noun_kind: Kind) -> str:
    return "who" if noun_kind == "person" else "that"


def plural(predicate: str) -> str:
    """A predicate (template) for several subjects: "was born" becomes "were born"."""
    verb, _, rest = predicate.partition(" ")
    words = f"{_PLURAL_VERBS.get(verb, verb)} {rest}"
    return words.replace(" its ", " their ").replace(" a pupil ", " pupils ")
