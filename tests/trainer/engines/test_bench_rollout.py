"""The rollout benchmark: a row says what was measured, and there is none for ids that differ."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "benchmarks" / "bench_rollout.py"
SMALL = ["--groups", "1", "--samples", "2", "--turns", "2", "--rounds", "1"]


@pytest.fixture
def bench(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("bench_rollout", BENCH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_rollout", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "rollout.jsonl")
    monkeypatch.setattr(module, "about", lambda device: {"machine": str(device)})
    return module


def test_a_row(bench, capsys):
    assert bench.main(SMALL) == 0
    (row,) = map(json.loads, bench.RESULTS.read_text().splitlines())
    assert row["differ"] == []
    assert set(row["others"]) == {"generate", "generate_batch"}
    assert row["ratios"]["generate"] == row["others"]["generate"] / row["seconds"]
    written = bench.Episodes.draw(1, 2, 2).written
    assert row["tokens_per_second"]["hf"] == written / row["seconds"]
    assert f"{written} tokens written" in capsys.readouterr().out


def test_no_row_for_other_ids(bench, monkeypatch, capsys):
    right = bench.slots

    def wrong(engine):
        return lambda *args: [(ids + 1) % bench.VOCABULARY for ids in right(engine)(*args)]

    monkeypatch.setattr(bench, "slots", wrong)
    assert bench.main([*SMALL, "--turns", "1"]) == 1
    assert not bench.RESULTS.exists()
    assert "no speed" in capsys.readouterr().err
