"""The profile of a scoring pass: kinds of operations, and which of them would be worth fusing."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from tiny_models import tiny_model

from trace_fast.bench.shapes import Shape, generate
from trace_fast.scorer import Scorer

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def profiling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("profile_score")


def test_operations_are_summed_by_kind(profiling: ModuleType) -> None:
    found = {
        "aten::mm": 30.0,
        "aten::addmm": 20.0,
        "trace_fast::prefix_attention_native": 25.0,
        "aten::silu": 5.0,
        "aten::mul": 20.0,
    }
    assert profiling.shares(found) == {
        "matrix products": 0.5,
        "attention": 0.25,
        "aten::mul": 0.2,
        "aten::silu": 0.05,
    }


def test_a_pass_has_products_and_attention(profiling: ModuleType) -> None:
    scorer = Scorer.from_module(tiny_model("llama"), None)
    found, seconds = profiling.measure(scorer, generate(Shape(3, 60), scorer.model.vocab_size))
    shares = profiling.shares(found)
    assert {"matrix products", "attention"} <= shares.keys()
    assert sum(shares.values()) == pytest.approx(1)
    assert sum(found.values()) / 1e6 == pytest.approx(seconds, rel=0.9)
