"""The verifier: is the answer that the policy gave one of the gold answers, and was it given in the right form?

Reward = outcome_coefficient * exact match + format_score * well-formed answer block (TRACE, Section 4.1). The answer
is the last ``<answer>...</answer>`` that the policy wrote outside of its reasoning; what the prompt or an observation
says in such tags is never looked at.

Two normalisers make texts comparable:

- ``squad`` is what papers report: lower case, no ASCII punctuation, no articles, single spaces. It takes ``22.0`` for
  ``220`` and ``-5`` for ``5``, and leaves nothing of an answer such as ``A``.
- ``strict`` reads Unicode (compatibility forms, dashes, full-width digits, case folding), keeps signs, decimal points
  and symbols (``-5``, ``22.0``, ``C++``, ``50%``), removes thousands separators (``1,000``) and a leading article, and
  never leaves an empty text.

Where ``squad`` leaves nothing of one side, the pair is compared under ``strict``: nothing equals nothing otherwise.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from trace_fast.errors import ConfigError

OPEN, CLOSE = "<answer>", "</answer>"

_BLOCK = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_LEADING_ARTICLE = re.compile(r"^(?:a|an|the) (?=\S)")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MINUS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d"), "-")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_KEPT = frozenset("#%&@")  # punctuation by Unicode's table, but part of names and numbers


def answer_blocks(text: str) -> list[str]:
    """What stands in the answer blocks of the policy's text, in order, without the space around it."""
    return [block.strip() for block in _BLOCK.findall(text)]


def well_formed(text: str) -> bool:
    """Whether every answer tag is part of a block and the last block is not empty."""
    blocks = answer_blocks(text)
    return bool(blocks) and bool(blocks[-1]) and text.count(OPEN) == text.count(CLOSE) == len(blocks)


def normalise_squad(text: str) -> str:
    """SQuAD's normal form; may be empty."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def normalise_strict(text: str) -> str:
    """A normal form that loses no sign, point or symbol; empty for blank texts only."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).translate(_MINUS)
    folded = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), folded)
    kept = "".join(c if _is_kept(folded, i) else _replacement(c) for i, c in enumerate(folded))
    plain = " ".join(kept.split())
    return _LEADING_ARTICLE.sub("", plain) or " ".join(folded.split())


def _is_kept(text: str, at: int) -> bool:
    """Whether a character means something: anything but punctuation, and of that signs and decimal points."""
    character = text[at]
    if not unicodedata.category(character).startswith("P") or character in _KEPT:
        return True
    digit_follows = text[at + 1 : at + 2].isdecimal()
    before = text[at - 1 : at] if at else ""
    if character == "-":
        number_follows = digit_follows or (text[at + 1 : at + 2] == "." and text[at + 2 : at + 3].isdecimal())
        return number_follows and not before.isalnum()
    return character == "." and digit_follows and (before.isdecimal() or not before.isalnum())


def _replacement(character: str) -> str:
    """Apostrophes and inner points go, so that ``O'Hara`` and ``U.S.`` stay one word; the rest parts words."""
    return "" if character in "'\u2019." else " "


NORMALISERS: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {"squad": normalise_squad, "strict": normalise_strict}
)


def exact_match(prediction: str, golds: Sequence[str], normaliser: str) -> bool:
    """Whether the prediction is one of the gold answers; a blank one never is.

    Raises:
        ConfigError: an unknown normaliser, no gold answer, or a blank one.
    """
    if normaliser not in NORMALISERS:
        raise ConfigError(f"normaliser: expected one of {', '.join(NORMALISERS)}, got {normaliser!r}")
    if not golds or not all(gold.strip() for gold in golds):
        raise ConfigError(f"answers: expected at least one gold answer and none blank, got {list(golds)!r}")
    return any(_same(prediction, gold, normaliser) for gold in golds)


def _same(prediction: str, gold: str, normaliser: str) -> bool:
    normalise = NORMALISERS[normaliser]
    left, right = normalise(prediction), normalise(gold)
    if left and right:
        return left == right
    return normalise_strict(prediction) == normalise_strict(gold)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reward`` is what training sees; ``correct`` and ``format_valid`` are its two parts."""

    correct: bool
    format_valid: bool
    reward: float


def judge(
    prediction: str | None,
    format_valid: bool,
    golds: Sequence[str],
    *,
    normaliser: str,
    outcome_coefficient: float,
    format_score: float,
) -> Verdict:
    """The verdict on an answer; ``prediction`` is None where none was given.

    Raises:
        ConfigError: as ``exact_match``.
    """
    correct = exact_match(prediction or "", golds, normaliser)
    reward = outcome_coefficient * correct + format_score * format_valid
    return Verdict(correct, format_valid, float(reward))
