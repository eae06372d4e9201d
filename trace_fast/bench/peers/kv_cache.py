"""transformers with a key/value cache over the trunk: at each boundary one pass over the branch, then a crop.

The strong baseline of what people have without an engine. In float64 it is the truth of the benchmark.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from trace_fast.bench.peers.peer import ModulePeer, PeerSetup, branch, mean_logprob, on
from trace_fast.rollout import Rollout

WHAT = "transformers, trunk in a KV cache, one pass a branch"

Pass = Callable[[torch.Tensor, int, dict[str, Any]], torch.Tensor]


def why_not(setup: PeerSetup) -> str | None:
    return None


def open_peer(setup: PeerSetup) -> ModulePeer:
    return ModulePeer(setup.module, kv_cache_scores)


def kv_cache_scores(module: PreTrainedModel, rollout: Rollout) -> np.ndarray:
    """``(S,)``; the trunk runs a segment at a time."""

    def logits(ids: torch.Tensor, rows: int, cached: dict[str, Any]) -> torch.Tensor:
        found: torch.Tensor = module(ids, logits_to_keep=rows, **cached).logits[0]
        return found

    answer = rollout.answers[0]
    return np.array([mean_logprob(logits_AV, answer) for logits_AV in answer_rows(module, rollout, logits)])


def kv_cache_hidden(module: PreTrainedModel, rollout: Rollout) -> torch.Tensor:
    """``(S * A, H)`` final hidden rows that predict the answer's tokens, in the order of the states."""
    decoder = module.base_model

    def hidden(ids: torch.Tensor, rows: int, cached: dict[str, Any]) -> torch.Tensor:
        found: torch.Tensor = decoder(ids, **cached).last_hidden_state[0, -rows:]
        return found

    return torch.cat(list(answer_rows(module, rollout, hidden)))


def answer_rows(module: PreTrainedModel, rollout: Rollout, run: Pass) -> Iterator[torch.Tensor]:
    """What ``run(ids, rows, cache arguments)`` gives for the last ``rows`` tokens of each branch: those that predict
    the answer."""
    cache = DynamicCache() if _windows(module) else DynamicCache(config=module.config)
    # renamed in transformers 5.24; a name that it does not know is ignored without a word
    name = "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
    cached = {name: cache, "use_cache": True}
    done = 0
    for k in range(rollout.n_states):
        boundary = int(rollout.boundaries[k])
        if boundary > done:
            run(on(module, rollout.input_ids[done:boundary]), 1, cached)
            done = boundary
        ids = on(module, branch(rollout, k))
        yield run(ids, len(rollout.answers[0]), cached)
        cache.crop(-ids.shape[1])


def _windows(module: PreTrainedModel) -> bool:
    """Whether the config would make a cache that forgets what fell out of a window, and so cannot be cropped."""
    return getattr(module.config.get_text_config(), "sliding_window", None) is not None
