"""Learning curves on docworld: same base policy, data, reward and budget; the algorithms differ and nothing else.

``make learning-curves`` runs it. Every run is ``trace-fast train configs/docworld.toml`` with changes; finished runs
are found in the work folder and not run again, so it may be interrupted. At the end it writes, under
``benchmarks/results/``: ``learning_curves.jsonl`` (a row a run), ``learning_curves.md`` (the table) and
``learning_curves_*.svg``.

Success is that of one sampled rollout a held-out question. ``steps_to_grpo`` is the first evaluation at which a run's
success reaches the mean final success of the GRPO runs; "final" is the mean of a run's last two evaluations.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trace_fast.bench.about import about
from trace_fast.bench.plots import SETTINGS
from trace_fast.bench.rows import append_json, read_rows

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "docworld.toml"
RESULTS = ROOT / "benchmarks" / "results"
ROWS, TABLES = RESULTS / "learning_curves.jsonl", RESULTS / "learning_curves.md"
COLUMNS = (
    "run",
    "seeds",
    "success before",
    "final success",
    "spread",
    "at 1 / 2 / 3 hops",
    "steps to GRPO's final",
    "turns before",
    "final turns",
    "step (s)",
    "scoring",
)
BY_HOPS = "validation/success/hops="
NEEDS_MATPLOTLIB = "learning curves need matplotlib: pip install 'trace-fast[bench]'"


@dataclass(frozen=True, slots=True)
class Variant:
    """One line of the comparison. ``algorithm``: TOML of the section. ``figure``: which plot it belongs to."""

    name: str
    algorithm: str
    seeds: int
    figures: tuple[str, ...]


def trace(**credit: object) -> str:
    settings = ", ".join(f"{key} = {json.dumps(value)}" for key, value in credit.items())
    return f'{{name = "trace", credit = {{{settings}}}}}'


VARIANTS = (
    Variant("GRPO", '{name = "grpo"}', 3, ("algorithms",)),
    Variant("TRACE", trace(), 3, ("algorithms", "forms", "horizons")),
    Variant("GSPO", '{name = "gspo"}', 1, ("algorithms",)),
    Variant("GiGPO", '{name = "gigpo"}', 1, ("algorithms",)),
    Variant("TRACE raw", trace(form="raw"), 1, ("forms",)),
    Variant("TRACE linear", trace(form="linear"), 1, ("forms",)),
    Variant("TRACE K=0", trace(horizon=0), 1, ("horizons",)),
    Variant("TRACE K=1", trace(horizon=1), 1, ("horizons",)),
    Variant("TRACE K=8", trace(horizon=8), 1, ("horizons",)),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One run."""

    variant: Variant
    seed: int

    @property
    def folder(self) -> str:
        return f"{self.variant.name.lower().replace(' ', '-').replace('=', '')}-seed{self.seed}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder with the base policy; the runs go there too")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--only", nargs="*", help="names of variants")
    options = parser.parse_args(arguments)
    chosen = [v for v in VARIANTS if not options.only or v.name in options.only]
    # Seed by seed, the main comparison first: an interrupted experiment has whole pairs.
    most = max(variant.seeds for variant in chosen)
    jobs = [Job(variant, seed) for seed in range(most) for variant in chosen if seed < variant.seeds]
    jobs.sort(key=lambda job: "algorithms" not in job.variant.figures)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda job: run(job, options.work, options.steps), jobs))
    rows = [row_of(job, options.work, options.steps) for job in jobs]
    ROWS.unlink(missing_ok=True)
    append_json(ROWS, (json.dumps(row) for row in rows))
    write_results()
    return 0


def run(job: Job, work: Path, steps: int) -> None:
    """Trains, or continues what was interrupted."""
    out = work / "runs" / job.folder
    if finished(out, steps):
        return
    world = work / "world"
    changes = [
        f"out={out}",
        f"policy.path={work / 'base'}",
        f"data.train={world / 'questions.train.jsonl'}",
        f"data.validation={world / 'questions.validation.jsonl'}",
        f"search.index={world / 'index'}",
        f"search.corpus={world / 'corpus.jsonl'}",
        f"training.steps={steps}",
        f"training.seed={job.seed}",
        f"algorithm={job.variant.algorithm}",
    ]
    command = [sys.executable, "-m", "trace_fast", "train", str(CONFIG), "--resume"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    print(f"{job.folder} begins", flush=True)
    done = subprocess.run(
        [*command, *(part for change in changes for part in ("--set", change))],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{job.folder} failed with code {done.returncode}:\n{done.stderr[-2000:]}")
    print(f"{job.folder} done", flush=True)


def finished(out: Path, steps: int) -> bool:
    path = out / "metrics.jsonl"
    return path.exists() and any(r["step"] == steps and "validation/success" in r for r in read_rows(path))


def row_of(job: Job, work: Path, steps: int) -> dict[str, Any]:
    """A run as one row: its evaluations and what its steps took."""
    records = read_rows(work / "runs" / job.folder / "metrics.jsonl")
    trained = [r for r in records if "reward" in r]
    validated = [r for r in records if "validation/success" in r]
    hops = sorted(key.removeprefix(BY_HOPS) for key in validated[0] if key.startswith(BY_HOPS))
    last = trained[-10:]
    phases = [key for key in last[0] if key.startswith("seconds/")]
    seconds = {key.removeprefix("seconds/"): statistics.median(r.get(key, 0.0) for r in trained) for key in phases}
    return {
        **about(torch.device("cpu")),
        "run": job.variant.name,
        "seed": job.seed,
        "steps": steps,
        "figures": list(job.variant.figures),
        "evaluated": [r["step"] for r in validated],
        "success": [r["validation/success"] for r in validated],
        "turns": [r["validation/turns"] for r in validated],
        "success_by_hops": {n: [r[BY_HOPS + n] for r in validated] for n in hops},
        "reward": [r["validation/reward"] for r in validated],
        "trained_reward": [r["reward"] for r in trained],
        "final_success": statistics.fmean(r["validation/success"] for r in validated[-2:]),
        "final_turns": statistics.fmean(r["validation/turns"] for r in validated[-2:]),
        "zero_std_groups": statistics.fmean(r["zero_std_groups"] for r in last),
        "entropy": statistics.fmean(r.get("entropy", 0.0) for r in last),
        "seconds": seconds,
        "scoring_share": seconds.get("score", 0.0) / seconds["step"],
    }


def write_results() -> None:
    """Tables and plots from the committed rows alone."""
    rows = read_rows(ROWS)
    grpo = [row["final_success"] for row in rows if row["run"] == "GRPO"]
    target = statistics.fmean(grpo) if grpo else None
    lines = [
        "# Learning curves on docworld",
        "",
        f"Printed by `make learning-curves` from `{ROWS.name}`: {rows[0]['date']}, {rows[0]['machine']}, commit "
        f"{rows[0]['commit']}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for name in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == name]
        hops = sorted(own[0]["success_by_hops"])
        finals = [row["final_success"] for row in own]
        spread = f"{min(finals):.3f}–{max(finals):.3f}" if len(own) > 1 else "–"
        reached = [steps_to(row, target) for row in own]
        cells = [
            name,
            str(len(own)),
            f"{statistics.fmean(row['success'][0] for row in own):.3f}",
            f"{statistics.fmean(finals):.3f}",
            spread,
            " / ".join(f"{final_at(own, n):.3f}" for n in hops),
            ", ".join("never" if r is None else str(r) for r in reached),
            f"{statistics.fmean(row['turns'][0] for row in own):.2f}",
            f"{statistics.fmean(row['final_turns'] for row in own):.2f}",
            f"{statistics.fmean(row['seconds']['step'] for row in own):.1f}",
            f"{statistics.fmean(row['scoring_share'] for row in own):.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    TABLES.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for figure in ("algorithms", "forms", "horizons"):
        plot([row for row in rows if figure in row["figures"]], figure)


def final_at(rows: Sequence[dict[str, Any]], hops: str) -> float:
    """Final success, over seeds, on the questions of so many hops."""
    return statistics.fmean(value for row in rows for value in row["success_by_hops"][hops][-2:])


def steps_to(row: dict[str, Any], target: float | None) -> int | None:
    if target is None:
        return None
    reached = [step for step, success in zip(row["evaluated"], row["success"], strict=True) if success >= target]
    return reached[0] if reached else None


def plot(rows: list[dict[str, Any]], figure: str) -> None:
    """Success and turns against steps: the mean over seeds, and their range as a band."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(NEEDS_MATPLOTLIB) from error
    with rc_context(SETTINGS):
        canvas = Figure(figsize=(9, 3.4), layout="constrained")
        axes = canvas.subplots(1, 2)
        for name in dict.fromkeys(row["run"] for row in rows):
            own = [row for row in rows if row["run"] == name]
            for axis, key in zip(axes, ("success", "turns"), strict=True):
                columns = list(zip(*(row[key] for row in own), strict=True))
                steps = own[0]["evaluated"]
                (line,) = axis.plot(steps, [statistics.fmean(c) for c in columns], label=f"{name} ({len(own)})")
                low, high = [min(c) for c in columns], [max(c) for c in columns]
                axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.15)
        for axis, label in zip(axes, ("success on held-out questions", "tool turns a rollout"), strict=True):
            axis.set(xlabel="training steps", ylabel=label)
        axes[0].legend(frameon=False)
        canvas.savefig(RESULTS / f"learning_curves_{figure}.svg", metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
