"""Scoring on random weights of Qwen3-4B's shape: 48,000 tokens, 60 turns, branches of 60 rows.

Targets: at most 1.10 times one plain forward over the trunk by the best attention that transformers has here, and 20
times faster than one forward a state. The latter is extrapolated from a few states (its rows say so): the time of a
forward is a quadratic of its length, fitted to them and summed over all states.

Numbers: the first 16 states against float64, one in the middle and the last against float32 (whose error is thousands
of times below bfloat16's); the yardstick is the naive pass in bfloat16 on the same states.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import statistics
from functools import partial

import numpy as np
import torch
from gpu_common import Call, GpuRun, interleaved_seconds, kernel_failures
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from trace_fast.bench import rule
from trace_fast.bench.measure import peak_extra_bytes, seconds_of
from trace_fast.bench.peers.naive import naive_state
from trace_fast.bench.shapes import Shape, generate
from trace_fast.bench.truth import true_scores
from trace_fast.layout import pack_layout
from trace_fast.plan import layout_flops
from trace_fast.rollout import Rollout
from trace_fast.scorer import Scorer

OP, DTYPE = "scoring", torch.bfloat16
SHAPE = Shape(turns=60, tokens=48_000, opener=53, answer=8)
QWEN3_4B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=65_536,
    tie_word_embeddings=True,
)
SHORT_STATES, LONG_STATES = 16, (30, 61)
TIMED_EVERY = 5  # of the states with short prefixes


@torch.no_grad()
def run(run: GpuRun, config: Qwen3Config = QWEN3_4B, shape: Shape = SHAPE) -> None:
    torch.manual_seed(0)
    with run.device:
        module = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    rollout = generate(shape, config.vocab_size)
    case = f"Qwen3-4B shape, {shape}, branches of {shape.opener + shape.answer - 1} rows"
    scorer = Scorer.from_module(module, None)
    first = min(SHORT_STATES, rollout.n_turns + 1)
    states = [*range(first), *(k for k in LONG_STATES if first <= k < rollout.n_states)]
    scores = scorer.score([rollout])[0].mean_logprobs[states]
    naive_scores = np.array([naive_state(module, rollout, k) for k in states])
    truth = np.concatenate([_float64(module, rollout, first), _float32(module, rollout, states[first:])])
    name = f"trace_fast ({scorer.model.backends.prefix_attention}, {scorer.model.backends.token_logprob})"
    errors, yardstick = np.abs(scores - truth), np.abs(naive_scores - truth)
    if not run.check(OP, case, name, float(errors.mean()), rule.allowed_mean_error(yardstick)):
        return
    calls: dict[str, Call] = {name: lambda: scorer.score([rollout])}
    calls |= {engine: lambda e=engine: _trunk_forward(module, rollout, e) for engine in _engines(run, module, case)}
    layout = pack_layout([rollout])
    flops = layout_flops(scorer.model.spec, layout)
    times = interleaved_seconds(calls, run.device, rounds=3)
    extra = peak_extra_bytes(calls[name], run.device)
    ours = run.speed(OP, case, name, times.pop(name), DTYPE, flops=flops, peak_extra_bytes=extra)
    trunks = {engine: run.speed(OP, case, f"trunk forward, {engine}", runs, DTYPE) for engine, runs in times.items()}
    best = min(trunks, key=trunks.__getitem__)
    run.target(OP, case, f"1.10 trunk forwards ({best}) over our time", 1.10 * trunks[best] / ours, 1.0)
    timed = [k for k in states if k % TIMED_EVERY == 0 or k in LONG_STATES]
    _extrapolate(run, case, module, rollout, timed, ours)


def _float64(module: PreTrainedModel, rollout: Rollout, count: int) -> np.ndarray:
    """The truth of the first states: those of the rollout cut off there."""
    cut = dataclasses.replace(
        rollout,
        input_ids=rollout.input_ids[: rollout.boundaries[count - 1]],
        boundaries=rollout.boundaries[:count],
        n_turns=count - 1,
        openers=rollout.openers[:count],
    )
    return true_scores(module, [cut])[0]


def _float32(module: PreTrainedModel, rollout: Rollout, states: list[int]) -> np.ndarray:
    """States whose prefixes are too long for float64 in the time there is."""
    twin = copy.deepcopy(module).float() if states else module
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return np.array([naive_state(twin, rollout, k) for k in states])
    finally:
        torch.set_float32_matmul_precision(precision)


def _engines(run: GpuRun, module: PreTrainedModel, case: str) -> list[str]:
    """Attention implementations of transformers that run the trunk here."""
    found = []
    for engine in ("sdpa", "flash_attention_2", "flash_attention_3"):
        package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}.get(engine)
        if package is not None and importlib.util.find_spec(package) is None:
            run.refuse(OP, case, f"trunk forward, {engine}", "absent", f"the package {package} is not installed")
            continue
        try:
            module.set_attn_implementation(engine)
        except (ImportError, *kernel_failures()) as error:
            run.refuse(OP, case, f"trunk forward, {engine}", "absent", " ".join(str(error).split())[:300])
        else:
            found.append(engine)
    module.set_attn_implementation("sdpa")
    return found


def _trunk_forward(module: PreTrainedModel, rollout: Rollout, engine: str) -> object:
    """One plain causal forward over the rollout's own tokens, logits of the last row only."""
    if module.config._attn_implementation != engine:
        module.set_attn_implementation(engine)
    ids = torch.as_tensor(rollout.input_ids, device=module.device)[None]
    return module(ids, use_cache=False, logits_to_keep=1)


def _extrapolate(
    run: GpuRun, case: str, module: PreTrainedModel, rollout: Rollout, states: list[int], ours: float
) -> None:
    """The naive pass over all states from some of them, each the median of 3."""
    calls = [partial(naive_state, module, rollout, k) for k in states]
    times = [statistics.median(seconds_of(call, run.device) for _ in range(3)) for call in calls]
    branch = len(rollout.openers[0]) + len(rollout.answers[0]) - 1
    lengths = rollout.boundaries + branch
    fit = np.polyfit(lengths[states], times, deg=2)
    total = float(np.polyval(fit, lengths).sum())
    seen = {str(lengths[k]): round(t, 4) for k, t in zip(states, times, strict=True)}
    run.speed(OP, case, "naive, extrapolated", [total], DTYPE, extrapolated_from=seen)
    run.target(OP, case, "time of the naive pass (extrapolated) over ours", total / ours, 20.0)
