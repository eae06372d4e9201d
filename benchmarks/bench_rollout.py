"""Rollout engine `hf` against `generate`: `make bench-rollout`, rows added to benchmarks/results/rollout.jsonl.

Groups of episodes share a system prompt and, within a group, a question; in every turn each writes some tokens and gets
an observation. All methods continue the same prompts greedily and must write the same ids before a speed is printed:

  hf               HfEngine: slots, keys and values kept from turn to turn
  generate         transformers' `generate`, one episode after the other, every turn from its whole prompt
  generate_batch   transformers' `generate` over all episodes of a turn at once, padded on the left

Tokens a second are tokens written. `generate` records no log-probabilities; `hf` does. The model is a random Qwen3 of
the demo's size; its weights are drawn wide enough that greedy continuations differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen3Config

from trace_fast.bench.about import about
from trace_fast.bench.measure import seconds_of
from trace_fast.bench.rows import append_json
from trace_fast.trainer.engines.engine import Request
from trace_fast.trainer.engines.hf import HfEngine

RESULTS = Path(__file__).resolve().parent / "results" / "rollout.jsonl"
VOCABULARY = 4096
Continue = Callable[[Sequence[np.ndarray], Sequence[int]], list[np.ndarray]]  # (prompts, new tokens) -> ids written


@dataclass(frozen=True)
class Episodes:
    """What is the same for all methods: first prompts, how much is written when, and what is observed."""

    prompts: list[np.ndarray]
    counts: np.ndarray  # (turns, episodes)
    observations: list[list[np.ndarray]]  # of the turns but the last

    @classmethod
    def draw(cls, groups: int, samples: int, turns: int, seed: int = 0) -> Episodes:
        rng = np.random.default_rng(seed)
        system = rng.integers(3, VOCABULARY, 300)
        questions = [np.concatenate([system, rng.integers(3, VOCABULARY, 40)]) for _ in range(groups)]
        n = groups * samples
        return cls(
            prompts=[question for question in questions for _ in range(samples)],
            counts=rng.integers(20, 60, (turns, n)),
            observations=[
                [rng.integers(3, VOCABULARY, rng.integers(50, 250)) for _ in range(n)] for _ in range(turns - 1)
            ],
        )

    @property
    def written(self) -> int:
        return int(self.counts.sum())

    @property
    def longest(self) -> int:
        observed = sum(np.array([len(o) for o in turn]) for turn in self.observations)
        return int((np.array([len(p) for p in self.prompts]) + self.counts.sum(axis=0) + observed).max())

    def run(self, method: Continue) -> list[np.ndarray]:
        """Everything that was written, turn by turn."""
        prompts, written = self.prompts, []
        for turn, counts in enumerate(self.counts):
            found = method(prompts, counts.tolist())
            written += found
            if turn < len(self.observations):
                parts = zip(prompts, found, self.observations[turn], strict=True)
                prompts = [np.concatenate(part) for part in parts]
        return written


def small_model(seed: int = 0) -> PreTrainedModel:
    """2.8 million weights."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return model


def slots(engine: HfEngine) -> Continue:
    def method(prompts: Sequence[np.ndarray], counts: Sequence[int]) -> list[np.ndarray]:
        requests = [Request(p, n, (), temperature=0.0) for p, n in zip(prompts, counts, strict=True)]
        return [generation.ids for generation in engine.generate(requests)]

    return method


def generate(module: PreTrainedModel, *, batch: bool) -> Continue:
    def one(prompts: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        settings = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
        with torch.no_grad():
            out = module.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        assert isinstance(out, torch.Tensor)
        return list(out[:, width:].numpy())

    def method(prompts: Sequence[np.ndarray], counts: Sequence[int]) -> list[np.ndarray]:
        if batch:
            return [ids[:n] for ids, n in zip(one(prompts, max(counts)), counts, strict=True)]
        return [one([prompt], n)[0] for prompt, n in zip(prompts, counts, strict=True)]

    return method


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--slots", type=int, help="default: one an episode")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    episodes = Episodes.draw(options.groups, options.samples, options.turns)
    n = len(episodes.prompts)
    module = small_model()
    engine = HfEngine(module, n_slots=options.slots or n, max_length=episodes.longest)
    methods = {
        "hf": slots(engine),
        "generate": generate(module, batch=False),
        "generate_batch": generate(module, batch=True),
    }
    found = {name: episodes.run(method) for name, method in methods.items()}
    right = {
        name: all(np.array_equal(a, b) for a, b in zip(ids, found["generate"], strict=True))
        for name, ids in found.items()
    }
    if not right["hf"]:
        print("hf writes other ids than generate: no speed", file=sys.stderr)
        return 1
    device = torch.device("cpu")
    times: dict[str, list[float]] = {name: [] for name, good in right.items() if good}
    for _ in range(options.rounds):
        for name in times:
            engine.update_weights([], 0)  # nothing is known from the round before
            times[name].append(seconds_of(lambda name=name: episodes.run(methods[name]), device))
    seconds = {name: statistics.median(runs) for name, runs in times.items()}
    case = f"{options.groups} groups x {options.samples}, {options.turns} turns, {episodes.written} tokens written"
    row = {**about(device), "op": "rollout", "case": case, "slots": options.slots or n, "rounds": options.rounds}
    row |= {"numbers": "right", "implementation": "hf", "seconds": seconds["hf"]}
    others = {name: s for name, s in seconds.items() if name != "hf"}
    row |= {"others": others, "ratios": {name: s / seconds["hf"] for name, s in others.items()}}
    row |= {"tokens_per_second": {name: episodes.written / s for name, s in seconds.items()}}
    row |= {"differ": sorted(name for name, good in right.items() if not good)}
    append_json(RESULTS, [json.dumps(row)])
    print(f"rollout, {case}")
    for name, s in seconds.items():
        print(f"  {name:15} {s:8.2f} s  {episodes.written / s:8.0f} tokens/s  {s / seconds['hf']:6.2f}x the time of hf")
    for name in row["differ"]:
        print(f"  {name:15} writes other ids: no speed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
