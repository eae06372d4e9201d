"""Learning curves on docworld: same base policy, data, reward and number of rollouts; the algorithm differs.

``make learning-curves`` runs it. Every run is ``trace-fast train configs/docworld.toml`` with changes, one thread, as
many at a time as ``--jobs``. Runs in the work folder that are finished, with these settings and from this base policy,
are not run again, so the experiment may be interrupted. At the end rows, table and plots are written
(``learning_tables``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from learning_tables import add_rows, write_results

from trace_fast.atomic_write import write_atomically
from trace_fast.bench.about import about
from trace_fast.bench.plots import why_no_plots
from trace_fast.bench.rows import read_rows
from trace_fast.trainer.checkpoint import latest_checkpoint, read_progress
from trace_fast.trainer.config import TrainConfig, read_config
from trace_fast.trainer.data import read_tasks

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "docworld.toml"
ABOUT = "about.json"  # in a run's folder: from where, on what and by which code it was trained
BY_HOPS = "validation/success/hops="
STEPS = 40


@dataclass(frozen=True, slots=True)
class Variant:
    """One line of the comparison.

    ``algorithm``: TOML of the section. ``figures``: the plots it belongs to. ``changes``: what else differs from the
    config.
    """

    name: str
    algorithm: str
    seeds: int
    figures: tuple[str, ...]
    changes: tuple[str, ...] = ()


def trace(**credit: object) -> str:
    settings = ", ".join(f"{key} = {json.dumps(value)}" for key, value in credit.items())
    return f'{{name = "trace", credit = {{{settings}}}}}'


# The paper's rule takes 0.05 of an answer token's weight, which is meant for long answers; here they are a few tokens.
WHOLE_ANSWERS = '{name = "trace", advantage = {answer_tail = "constant", answer_tail_scale = 1.0}}'
# With one update a step every ratio of new to old probability is 1, and GSPO's loss is GRPO's.
TWO_UPDATES = ("training.global_batch=64",)
VARIANTS = (
    Variant("GRPO", '{name = "grpo"}', 3, ("algorithms", "answers")),
    Variant("TRACE", trace(), 3, ("algorithms", "forms", "horizons", "answers")),
    Variant("GSPO", '{name = "gspo"}', 1, ("algorithms",)),
    Variant("GiGPO", '{name = "gigpo"}', 1, ("algorithms",)),
    Variant("TRACE raw", trace(form="raw"), 1, ("forms",)),
    Variant("TRACE linear", trace(form="linear"), 1, ("forms",)),
    Variant("TRACE K=0", trace(horizon=0), 1, ("horizons",)),
    Variant("TRACE K=1", trace(horizon=1), 1, ("horizons",)),
    Variant("TRACE K=8", trace(horizon=8), 1, ("horizons",)),
    Variant("TRACE, whole answers", WHOLE_ANSWERS, 3, ("answers",)),
    Variant("GRPO, 2 updates", '{name = "grpo"}', 1, ("updates",), TWO_UPDATES),
    Variant("GSPO, 2 updates", '{name = "gspo"}', 1, ("updates",), TWO_UPDATES),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One run. ``work``: the folder of base policy, world and runs."""

    variant: Variant
    seed: int
    work: Path
    steps: int

    @property
    def folder(self) -> Path:
        name = self.variant.name.lower().replace(" ", "-").replace("=", "").replace(",", "")
        return self.work / "runs" / f"{name}-seed{self.seed}"

    @property
    def changes(self) -> list[str]:
        world = self.work / "world"
        return [
            f"out={self.folder}",
            f"policy.path={self.work / 'base'}",
            f"data.train={world / 'questions.train.jsonl'}",
            f"data.validation={world / 'questions.validation.jsonl'}",
            f"search.index={world / 'index'}",
            f"search.corpus={world / 'corpus.jsonl'}",
            f"training.steps={self.steps}",
            f"training.seed={self.seed}",
            f"algorithm={self.variant.algorithm}",
            *self.variant.changes,
        ]

    def config(self) -> TrainConfig:
        return read_config(str(CONFIG), self.changes)

    def base(self) -> str:
        """The hash of the base policy's weights."""
        return str(json.loads((self.work / "base" / "validation.json").read_text())["weights"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder with the base policy; the runs go there too")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--only", nargs="+", choices=[v.name for v in VARIANTS], help="names of variants")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.jobs < 1:
        parser.error(f"--steps, --jobs: expected at least 1, got {options.steps} and {options.jobs}")
    if (reason := why_no_plots()) is not None:
        parser.error(reason)
    torch.set_num_threads(1)  # as in the runs, whose machine the rows name
    chosen = [v for v in VARIANTS if not options.only or v.name in options.only]
    # Seed by seed, the main comparison first: an interrupted experiment has whole pairs.
    most = max(variant.seeds for variant in chosen)
    jobs = [
        Job(variant, seed, options.work, options.steps)
        for seed in range(most)
        for variant in chosen
        if seed < variant.seeds
    ]
    jobs.sort(key=lambda job: "algorithms" not in job.variant.figures)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda job: run(job, options.jobs), jobs))
    add_rows([row_of(job) for job in jobs])
    write_results()
    return 0


def run(job: Job, n_jobs: int) -> None:
    """Trains, or continues what was interrupted."""
    if finished(job):
        return
    job.folder.mkdir(parents=True, exist_ok=True)
    sources = read_rows(job.folder / ABOUT) if (job.folder / ABOUT).exists() else []
    sources.append({**about(torch.device("cpu")), "base": job.base(), "jobs": n_jobs})
    write_atomically(job.folder / ABOUT, "".join(json.dumps(source) + "\n" for source in sources))
    command = [sys.executable, "-m", "trace_fast", "train", str(CONFIG), "--resume"]
    print(f"{job.folder.name} begins", flush=True)
    done = subprocess.run(
        [*command, *(part for change in job.changes for part in ("--set", change))],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{job.folder} failed with code {done.returncode}:\n{done.stderr[-2000:]}")
    print(f"{job.folder.name} done", flush=True)


def finished(job: Job) -> bool:
    """Whether the folder holds this very run to its end; one that holds another is refused."""
    path, checkpoint = job.folder / "metrics.jsonl", latest_checkpoint(job.folder / "checkpoints")
    if not path.exists() or checkpoint is None:
        return False
    last = read_rows(path)[-1]
    if last["step"] > job.steps:
        raise SystemExit(f"{job.folder}: holds a run of {last['step']} steps, expected {job.steps}; remove it")
    if read_progress(checkpoint).settings != job.config().deciding():
        raise SystemExit(f"{job.folder}: was trained with other settings than those of {CONFIG.name}; remove it")
    sources = read_rows(job.folder / ABOUT) if (job.folder / ABOUT).exists() else []
    if not sources or any(source["base"] != job.base() for source in sources):
        raise SystemExit(f"{job.folder}: was trained from another base policy than {job.work / 'base'}; remove it")
    return last["step"] == job.steps and "validation/success" in last


def row_of(job: Job) -> dict[str, Any]:
    """A finished run as one row: its evaluations and what its steps took."""
    records = read_rows(job.folder / "metrics.jsonl")
    sources = read_rows(job.folder / ABOUT)
    config = job.config()
    asked = read_tasks(str(config.data.validation))[: config.evaluation.questions]
    trained = [r for r in records if "reward" in r]
    validated = [r for r in records if "validation/success" in r]
    hops = sorted(key.removeprefix(BY_HOPS) for key in validated[0] if key.startswith(BY_HOPS))
    last = trained[-10:]
    phases = [key for key in last[0] if key.startswith("seconds/")]
    seconds = {key.removeprefix("seconds/"): statistics.median(r.get(key, 0.0) for r in trained) for key in phases}
    return {
        **sources[-1],
        "commit": ", ".join(dict.fromkeys(source["commit"] for source in sources)),
        "run": job.variant.name,
        "seed": job.seed,
        "steps": job.steps,
        "rollouts_a_step": config.training.prompts * config.training.samples,
        "rollouts_an_update": config.training.global_batch,
        "questions": len(asked),
        "questions_by_hops": dict(sorted(Counter(str(task.extra["hops"]) for task in asked).items())),
        "figures": list(job.variant.figures),
        "evaluated": [r["step"] for r in validated],
        "success": [r["validation/success"] for r in validated],
        "success_by_hops": {n: [r[BY_HOPS + n] for r in validated] for n in hops},
        "turns": [r["validation/turns"] for r in validated],
        "reward": [r["validation/reward"] for r in validated],
        "trained_reward": [r["reward"] for r in trained],
        "trained_turns": [r["turns"] for r in trained],
        "zero_std_groups": statistics.fmean(r["zero_std_groups"] for r in last),
        "entropy": statistics.fmean(r["entropy"] for r in last),
        "seconds": seconds,
        "scoring_share": seconds.get("score", 0.0) / seconds["step"],
    }


if __name__ == "__main__":
    sys.exit(main())
