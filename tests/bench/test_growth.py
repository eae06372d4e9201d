"""What more turns cost at the same tokens: shapes of equal work, the figure in the rows, and what is said of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tiny_models import VOCABULARY, tiny_model

from trace_fast.bench import run as bench_run
from trace_fast.bench.compare import Measured
from trace_fast.bench.rows import Row
from trace_fast.bench.run import Bench, PeerChoice
from trace_fast.bench.shapes import Shape, generate, parse_shapes
from trace_fast.bench.table import growth_lines
from trace_fast.errors import ConfigError
from trace_fast.layout import pack_layout
from trace_fast.scorer import Scorer

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("text", ["T=30/60,total=8420", "T=1/2/4,total=300,opener=3,answer=1", "T=0/7,total=150"])
def test_a_total_counts_trunk_and_branches(text: str) -> None:
    total = int(text.split("total=")[1].split(",")[0])
    for shape in parse_shapes(text):
        rollout = generate(shape, vocab_size=49152)
        assert len(pack_layout([rollout])) == total
        assert len(rollout.input_ids) == shape.tokens == total - shape.branch_tokens


def test_the_suite_measures_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    suite = importlib.import_module("bench_score")
    shapes = [shape for text in suite.SHAPES for shape in parse_shapes(text)]
    assert shapes == [Shape(30, 3820), Shape(30, 8030), Shape(30, 8048), Shape(60, 7688)]
    assert all(shape.tokens + shape.opener + shape.answer <= 8192 for shape in shapes)  # SmolLM2's positions
    half, whole = (len(pack_layout([generate(shape, vocab_size=49152)])) for shape in shapes[2:])
    assert half == whole


@pytest.mark.parametrize("text", ["T=3,total=20,tokens=9", "T=3,total=", "total=9", "T=3"])
def test_a_total_stands_in_place_of_the_trunk(text: str) -> None:
    with pytest.raises(ConfigError, match=r"shape: expected .*tokens=COUNT \(or total=COUNT, branches"):
        parse_shapes(text)
    with pytest.raises(ConfigError, match="at least a token a turn"):
        parse_shapes("T=60,total=700")  # its branches alone are 732


def test_rows_of_a_run_hold_what_doubling_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same method's row of half the turns and as many distinct tokens, when that came before."""
    scorer = Scorer.from_module(tiny_model("llama", num_hidden_layers=1), None, backend="torch")
    seconds = iter([2.0, 2.1, 4.0, 1.0, 1.5])

    def measured(rollout: Any, methods: Any, truth: Any, **_: Any) -> dict[str, Measured]:
        scores = scorer.score([rollout])[0].mean_logprobs
        return {name: Measured(scores_S=scores, runs=[next(seconds)], right=True) for name in ("trace_fast",)} | {
            "kv_cache": Measured(scores_S=scores, runs=[1.0], right=True),
            "dense_mask": Measured(scores_S=scores, runs=[1.0]),
        }

    monkeypatch.setattr(bench_run, "compare", measured)
    texts = ("T=3/6/12,total=400", "T=24,tokens=200", "T=6,total=399")
    rollouts = [generate(shape, VOCABULARY) for text in texts for shape in parse_shapes(text)]
    with Bench(scorer, "tiny", PeerChoice(("kv_cache",))) as bench:
        rows = [row for found in bench.rows(rollouts, rounds=1, say=lambda _: None) for row in found]
    ours = [row.added_by_doubled_turns for row in rows if row.method == "trace_fast"]
    assert ours == [None, pytest.approx(0.05), pytest.approx(4.0 / 2.1 - 1), None, None]
    assert [row.added_by_doubled_turns for row in rows if row.method == "kv_cache"] == [None, 0.0, 0.0, None, None]
    assert all(row.added_by_doubled_turns is None for row in rows if row.numbers != "right")


def test_the_figure_is_told_and_judged(row: Callable[..., Row]) -> None:
    rows = [
        row(turns=60, tokens_unique=8762, added_by_doubled_turns=0.034),
        row(turns=120, tokens_unique=8762, tokens_trunk=1, added_by_doubled_turns=0.1),
        row(turns=60, tokens_unique=8762, tokens_trunk=2, method="kv_cache", added_by_doubled_turns=0.7),
    ]
    assert growth_lines(rows) == [
        "trace_fast, float32, 8,762 tokens with branches: 30 -> 60 turns +3.4% time (target below +10%: met)",
        "trace_fast, float32, 8,762 tokens with branches: 60 -> 120 turns +10.0% time (target below +10%: MISSED)",
        "kv_cache, float32, 8,762 tokens with branches: 30 -> 60 turns +70.0% time",
    ]
    with pytest.raises(ValidationError, match="no speed may be reported"):
        row(numbers="differ", added_by_doubled_turns=0.01)
