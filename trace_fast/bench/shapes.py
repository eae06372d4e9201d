"""Rollouts of random tokens from a few sizes, written ``T=30,tokens=3820``.

``T=15/30/60,tokens=8030`` is a series: as many tokens cut into more turns, which shows what a turn costs, its branch
included. ``T=30/60,total=8420`` counts the tokens of the branches too (trunk and branches together), so that the longer
series member has the shorter trunk: it shows what cutting the same work into more branches costs. The prompt takes what
is left when at least a few hundred tokens are set aside and the rest is divided into equal turns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trace_fast.errors import ConfigError
from trace_fast.rollout import Rollout

DEFAULT_SHAPES = ("T=30,tokens=3820", "T=30/60,tokens=8030")
_EXPECTED = (
    "T=TURNS,tokens=COUNT (or total=COUNT, branches included), with opener=COUNT and answer=COUNT if wanted, and "
    "T=A/B/C for a series"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a generated rollout: T turns, tokens of the trunk, and of opener and answer at every state."""

    turns: int
    tokens: int
    opener: int = 5
    answer: int = 8

    def __str__(self) -> str:
        return f"{self.turns} turns, {self.tokens} tokens"

    @property
    def branch_tokens(self) -> int:
        """Tokens beside the trunk: a branch hangs after the prompt and after each turn, whose last answer token is read
        by nobody. (The last state is the one after the last turn: the generated rollout has no answer of its own.)"""
        return (self.turns + 1) * (self.opener + self.answer - 1)

    @property
    def turn_tokens(self) -> int:
        """Tokens of one turn; 0 turns have none."""
        return (self.tokens - min(200, self.tokens // 10)) // self.turns if self.turns else 0


def parse_shapes(text: str) -> list[Shape]:
    """One shape, or a series.

    Raises:
        ConfigError: not of this form, a number out of range, or more turns than tokens.
    """
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or key not in ("T", "tokens", "total", "opener", "answer") or key in values:
            raise ConfigError(f"shape: expected {_EXPECTED}, got {text!r}")
        values[key] = value
    if "T" not in values or ("tokens" in values) == ("total" in values):
        raise ConfigError(f"shape: expected {_EXPECTED}, got {text!r}")
    sizes = {key: _count(text, values[key]) for key in values if key != "T"}
    total = sizes.pop("total", None)
    shapes = [Shape(turns=_count(text, turns), **{"tokens": 0, **sizes}) for turns in values["T"].split("/")]
    if total is not None:
        shapes = [replace(shape, tokens=max(total - shape.branch_tokens, 0)) for shape in shapes]
    for shape in shapes:
        if shape.answer < 1 or shape.opener < 1 or shape.tokens < 2 or (shape.turns and shape.turn_tokens < 1):
            raise ConfigError(f"shape: expected at least a token a turn, an opener and an answer, got {text!r}")
    return shapes


def _count(text: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(f"shape: expected {_EXPECTED}, got {text!r}")
    return int(value)


def generate(shape: Shape, vocab_size: int) -> Rollout:
    """The rollout of a shape, always the same: random ids, equal turns, the same opener and answer at every state."""
    rng = np.random.default_rng([shape.turns, shape.tokens])
    first = min(100, vocab_size // 10)  # the lowest ids are special tokens in most vocabularies

    def draw(count: int) -> np.ndarray:
        return rng.integers(first, vocab_size, count)

    prompt = shape.tokens - shape.turns * shape.turn_tokens
    ends = [prompt + k * shape.turn_tokens for k in range(shape.turns + 1)]
    return Rollout(
        id=str(shape),
        group="generated",
        input_ids=draw(shape.tokens),
        boundaries=np.array([*ends, shape.tokens]),
        n_turns=shape.turns,
        answers=(draw(shape.answer),),
        openers=(draw(shape.opener),) * (shape.turns + 2),
    )
