"""What the base policy can do: its numbers on questions and documents of the experiment's world, which it never saw.

Two parts: episodes of the harness (``rollout_numbers``) and reading (``reading_numbers``: a page and a question on one
line of it, answered greedily in one message). Shares are in 0..1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from trace_fast.formats.answers import encode
from trace_fast.rollout import Rollout
from trace_fast.trainer.base_policy.library import Library
from trace_fast.trainer.docworld import Split
from trace_fast.trainer.docworld.dice import Dice
from trace_fast.trainer.engines.engine import Engine, Request
from trace_fast.trainer.engines.hf import HfEngine
from trace_fast.trainer.harness import ChatFrame, Harness, HarnessConfig, Task, exact_match
from trace_fast.trainer.search.tools import FIND, OPEN, SEARCH

_SLOTS = 64


def engine_of(model: PreTrainedModel, config: HarnessConfig) -> HfEngine:
    """An engine for episodes of these limits."""
    return HfEngine(model, n_slots=_SLOTS, max_length=config.max_tokens, cache_tokens=_SLOTS * config.max_tokens)


def rollout_numbers(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Shares and means over rollouts; ``success_any``: of tasks, at least one sample of which is right."""
    extras = [rollout.extra for rollout in rollouts]
    calls = Counter(name for extra in extras for name, count in extra["calls"].items() for _ in range(count))
    failed = sum(sum(extra["failed_calls"].values()) for extra in extras)
    invalid = sum(sum(extra["invalid_turns"].values()) for extra in extras)
    by_group: dict[str, list[bool]] = {}
    for rollout in rollouts:
        by_group.setdefault(rollout.group, []).append(bool(rollout.extra["correct"]))
    turns = sum(rollout.n_turns for rollout in rollouts)
    return {
        "rollouts": len(rollouts),
        "success": _mean([extra["correct"] for extra in extras]),
        "success_any": _mean([any(group) for group in by_group.values()]),
        "samples": max(map(len, by_group.values()), default=0),
        "mixed_groups": _mean([any(group) and not all(group) for group in by_group.values()]),
        "success_by_template": _shares(extras, "template"),
        "success_by_hops": _shares(extras, "hops"),
        "format_valid": _mean([extra["format_valid"] for extra in extras]),
        "valid_turns": 1 - (failed + invalid) / max(turns, 1),
        "calls_a_rollout": {name: calls[name] / max(len(rollouts), 1) for name in (SEARCH, OPEN, FIND)},
        "repeated_queries": _mean([extra["repeated_queries"] for extra in extras]),
        "turns": _mean([rollout.n_turns for rollout in rollouts]),
        "tokens": _mean([len(rollout.input_ids) for rollout in rollouts]),
        "most_tokens": max((len(rollout.input_ids) for rollout in rollouts), default=0),
        "written_tokens": _mean([extra["written_tokens"] for extra in extras]),
        "stops": dict(sorted(Counter(extra["stop_reason"] for extra in extras).items())),
    }


def run_tasks(
    frame: ChatFrame,
    library: Library,
    engine: Engine,
    config: HarnessConfig,
    tasks: Sequence[Task],
    *,
    seed: int,
    samples: int = 1,
) -> list[Rollout]:
    """Episodes of the harness over the library's index."""
    return Harness(frame, library.index, config).run(tasks, engine, seed=seed, samples=samples)


def reading_numbers(
    frame: ChatFrame, library: Library, engine: Engine, config: HarnessConfig, *, split: Split, number: int, seed: int
) -> dict[str, Any]:
    """Exact match of greedy answers to questions that one page answers, the page being shown before."""
    dice = Dice(seed, "reading", split)
    lookups = dice.shuffled(list(library.world.lookups(split)))[:number]
    requests = []
    for lookup in lookups:
        browser = library.browser(config.observation_tokens, frame.count_tokens)
        page = library.page(lookup.docids[0], browser)
        text = f"{frame.neutral(page.text)}<|im_end|>\n<|im_start|>user\n{lookup.question}<|im_end|>\n"
        ids = encode(frame.tokenizer, text + "<|im_start|>assistant\n<answer>")
        requests.append(Request(ids, config.max_response_tokens, frame.stop_ids, temperature=0.0))
    right = []
    for lookup, generation in zip(lookups, engine.generate(requests), strict=True):
        answer = frame.written(generation.ids).partition("</answer>")[0]
        right.append(exact_match(answer, lookup.answers, config.normaliser))
    relations = [{"relation": lookup.fact.relation, "correct": ok} for lookup, ok in zip(lookups, right, strict=True)]
    return {"questions": len(lookups), "exact_match": _mean(right), "by_relation": _shares(relations, "relation")}


def _mean(values: Sequence[Any]) -> float:
    return float(np.mean(values)) if values else 0.0


def _shares(extras: Sequence[Mapping[str, Any]], key: str) -> dict[str, float]:
    """The share of correct ones by the value of ``key``."""
    groups: dict[str, list[bool]] = {}
    for extra in extras:
        groups.setdefault(str(extra[key]), []).append(bool(extra["correct"]))
    return {name: _mean(groups[name]) for name in sorted(groups)}
