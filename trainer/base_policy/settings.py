"""How large the base policy is, how long it trains, and how large the world is that it is made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trace_fast.trainer.docworld import Template, WorldSize


@dataclass(frozen=True, slots=True)
class BaseSize:
    """Numbers of one size.

    Args:
        hidden, layers, heads, mlp: of the Qwen3 architecture; heads have 64 channels, keys and values a head each.
        vocabulary: ids of the tokenizer.
        naming_worlds: small ones that the tokenizer is trained on; many, so that no single name becomes a token.
        drill_worlds: worlds of the drills. drilled: size of each. drills: of one of them.
        worlds: practice worlds; their seeds are never that of the experiment. practice: size of each.
        readings, wanderings: examples of grounded question answering and of tool transcripts, of one practice world.
        drill_steps, steps: of the optimiser, on drills and on everything else.
        batch: tokens of a step. rate: highest learning rate.
        experiment: the world that the policy is to learn in. tasks: validation questions that are run.
    """

    hidden: int
    layers: int
    heads: int
    mlp: int
    vocabulary: int
    naming_worlds: int
    drill_worlds: int
    drilled: WorldSize
    drills: int
    worlds: int
    practice: WorldSize
    readings: int
    wanderings: int
    drill_steps: int
    steps: int
    batch: int
    rate: float
    experiment: WorldSize
    tasks: int


HEAD_DIM = 64
MAX_POSITIONS = 2048
ROPE_THETA = 1e6  # half of a head's channels hardly rotate within an episode, so tokens match at any distance
SIZES: Mapping[str, BaseSize] = MappingProxyType(
    {
        "tiny": BaseSize(
            hidden=128,
            layers=2,
            heads=1,
            mlp=128,
            vocabulary=640,
            naming_worlds=5,
            drill_worlds=2,
            drilled=WorldSize((1, 1, 1), (0, 0, 0)),
            drills=75,
            worlds=1,
            practice=WorldSize((1, 1, 1), (40, 0, 0)),
            readings=80,
            wanderings=20,
            drill_steps=20,
            steps=40,
            batch=2048,
            rate=5e-3,
            experiment=WorldSize((1, 1, 1), (40, 20, 20), (0.6, 0.4, 0, 0, 0)),
            tasks=8,
        ),
        "small": BaseSize(
            hidden=128,
            layers=3,
            heads=4,
            mlp=448,
            vocabulary=1408,
            naming_worlds=40,
            drill_worlds=160,
            drilled=WorldSize((2, 1, 1), (0, 0, 0)),
            drills=100,
            worlds=12,
            practice=WorldSize((3, 1, 1), (60, 0, 0), (0.6, 0.4, 0, 0, 0)),
            readings=160,
            wanderings=270,
            drill_steps=1100,
            steps=650,
            batch=3072,
            rate=6e-3,
            experiment=WorldSize((12, 4, 4), (1500, 300, 300), (0.6, 0.4, 0, 0, 0)),
            tasks=200,
        ),
    }
)
# Counts are left out: a third of them has the answer 1, so guessing would pay more than searching.
TEMPLATES: tuple[Template, ...] = ("bridge_entity", "reverse_lookup", "intersection", "comparison")


def practice_seeds(seed: int, size: BaseSize) -> range:
    """Seeds of the practice worlds; none of them equals any ``seed`` below 100,000."""
    start = 100_000 * (seed + 1)
    return range(start, start + size.worlds)
