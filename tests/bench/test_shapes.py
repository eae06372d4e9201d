"""Generated rollouts: sizes are those asked for, and the same at every run."""

from __future__ import annotations

import numpy as np
import pytest

from trace_fast.bench.shapes import DEFAULT_SHAPES, Shape, generate, parse_shapes
from trace_fast.errors import ConfigError


def test_a_series_and_its_defaults() -> None:
    assert parse_shapes("T=15/30,tokens=8030") == [Shape(15, 8030), Shape(30, 8030)]
    assert parse_shapes(" tokens=100, T=3,opener=1,answer=1") == [Shape(3, 100, opener=1, answer=1)]
    assert [shape for text in DEFAULT_SHAPES for shape in parse_shapes(text)] == [
        Shape(30, 3820),
        Shape(30, 8030),
        Shape(60, 8030),
    ]


@pytest.mark.parametrize(
    "text",
    ["", "30", "T=3", "T=3 tokens=9", "T=3,tokens=9,tokens=8", "T=-1,tokens=9", "T=,tokens=9", "T=3,tokens=9,size=2"],
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="shape: expected T=TURNS,tokens=COUNT"):
        parse_shapes(text)


@pytest.mark.parametrize("text", ["T=50,tokens=40", "T=0,tokens=1", "T=1,tokens=9,answer=0", "T=1,tokens=9,opener=0"])
def test_sizes_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="at least a token a turn"):
        parse_shapes(text)


@pytest.mark.parametrize(("turns", "tokens", "turn"), [(30, 3820, 120), (60, 8030, 130), (3, 40, 12), (0, 7, 0)])
def test_the_rollout_has_the_sizes(turns: int, tokens: int, turn: int) -> None:
    rollout = generate(Shape(turns, tokens), vocab_size=211)
    assert (rollout.n_turns, rollout.n_states, len(rollout.input_ids)) == (turns, turns + 2, tokens)
    assert set(np.diff(rollout.boundaries[:-1])) <= {turn}
    assert rollout.boundaries[-2] == rollout.boundaries[-1] == tokens
    assert (len(rollout.openers[0]), len(rollout.answers[0])) == (5, 8)
    assert rollout.input_ids.min() >= 21
    assert rollout.input_ids.max() < 211
    again = generate(Shape(turns, tokens), vocab_size=211)
    np.testing.assert_array_equal(rollout.input_ids, again.input_ids)
    np.testing.assert_array_equal(rollout.answers[0], again.answers[0])
