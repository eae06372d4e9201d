"""A TRACE step beside a GRPO step on the same rollouts, and the share of it that scoring takes.

``make bench-trace-step`` runs it. Both are ``trace-fast train configs/docworld.toml`` from the policy that
``make docworld-base`` makes, whole processes in turn, with a learning rate that moves no weight: so a step's rollouts
are the same for both, which is checked before a speed is printed. The first step of a run warms up and does not count.
A row goes to ``results/train.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from learning_curves import CONFIG, VARIANTS, Job

from trace_fast.bench.about import about
from trace_fast.bench.rows import append_json, read_rows

RESULTS = Path(__file__).parent / "results" / "train.jsonl"
SAME = ("reward", "turns", "tokens", "written_tokens")
Steps = list[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder with the base policy and its world")
    parser.add_argument("--steps", type=int, default=4, help="of a run, the first not counted")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.steps < 2 or options.rounds < 1:
        parser.error(f"--steps, --rounds: expected at least 2 and 1, got {options.steps} and {options.rounds}")
    jobs = {v.name: Job(v, 0, options.work, options.steps) for v in VARIANTS if v.name in ("GRPO", "TRACE")}
    found: dict[str, Steps] = {name: [] for name in jobs}
    for _ in range(options.rounds):
        for name, job in jobs.items():
            found[name] += run(job)[1:]
    if (reason := differ(found)) is not None:
        print(f"{reason}: no speed", file=sys.stderr)
        return 1
    row = {**about(torch.device("cpu")), "op": "trace_step", "rounds": options.rounds, **compared(found)}
    append_json(RESULTS, [json.dumps(row)])
    print(f"{row['case']}")
    for name, seconds in row["seconds"].items():
        print(f"  {name:6}" + "".join(f"  {phase} {s:.2f} s" for phase, s in seconds.items()))
    print(f"  TRACE over GRPO {row['trace_over_grpo']:.3f}, scoring {row['scoring_share']:.1%} of a TRACE step")
    return 0


def run(job: Job) -> Steps:
    """The metrics of the run's steps."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        changes = [*job.changes, f"out={out}", "optimizer.lr=1e-30", "evaluation.every=0"]
        command = [sys.executable, "-m", "trace_fast", "train", str(CONFIG)]
        command += [part for change in changes for part in ("--set", change)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{job.variant.name} failed with code {done.returncode}:\n{done.stderr[-2000:]}")
        return [record for record in read_rows(out / "metrics.jsonl") if "reward" in record]


def differ(found: dict[str, Steps]) -> str | None:
    """What shows that the two did not have the same rollouts; ``None`` where nothing does."""
    for grpo, trace in zip(found["GRPO"], found["TRACE"], strict=True):
        for key in ("step", *SAME):
            if grpo[key] != trace[key]:
                return f"step {grpo['step']}: {key} is {grpo[key]} for GRPO and {trace[key]} for TRACE"
    return None


def compared(found: dict[str, Steps]) -> dict[str, Any]:
    """Medians over steps, of each phase; the ratio of whole steps is that of their medians."""
    steps = found["TRACE"]
    seconds = {
        name: {
            key.removeprefix("seconds/"): statistics.median(record[key] for record in records)
            for key in records[0]
            if key.startswith("seconds/")
        }
        for name, records in found.items()
    }
    means = {key: statistics.fmean(record[key] for record in steps) for key in ("tokens", "turns")}
    return {
        "case": f"docworld, {means['tokens']:.0f} tokens and {means['turns']:.1f} turns a rollout, {len(steps)} steps",
        "seconds": seconds,
        "trace_over_grpo": seconds["TRACE"]["step"] / seconds["GRPO"]["step"],
        "scoring_share": statistics.median(record["seconds/score"] / record["seconds/step"] for record in steps),
    }


if __name__ == "__main__":
    sys.exit(main())
