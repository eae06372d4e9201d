"""transformers with a key/value cache over the trunk: at each boundary one pass over the branch, then a crop.

The strong baseline of what people have without an engine. In float64 it is the truth of the benchmark.
"""

from __future__ import annotations

import inspect

import numpy as np
from transformers import DynamicCache, PreTrainedModel

from trace_fast.bench.peers.peer import ModulePeer, PeerSetup, branch, mean_logprob, on
from trace_fast.rollout import Rollout

WHAT = "transformers, trunk in a KV cache, one pass a branch"


def why_not(setup: PeerSetup) -> str | None:
    return None


def open_peer(setup: PeerSetup) -> ModulePeer:
    return ModulePeer(setup.module, kv_cache_scores)


def kv_cache_scores(module: PreTrainedModel, rollout: Rollout) -> np.ndarray:
    """``(S,)``; the trunk runs a segment at a time."""
    cache = DynamicCache() if _windows(module) else DynamicCache(config=module.config)
    # renamed in transformers 5.24; a name that it does not know is ignored without a word
    name = "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
    cached = {name: cache, "use_cache": True}
    answer = rollout.answers[0]
    found, done = [], 0
    for k in range(rollout.n_states):
        boundary = int(rollout.boundaries[k])
        if boundary > done:
            segment = on(module, rollout.input_ids[done:boundary])
            module(segment, logits_to_keep=1, **cached)
            done = boundary
        ids = on(module, branch(rollout, k))
        logits = module(ids, logits_to_keep=len(answer), **cached).logits[0]
        found.append(mean_logprob(logits, answer))
        cache.crop(-ids.shape[1])
    return np.array(found)


def _windows(module: PreTrainedModel) -> bool:
    """Whether the config would make a cache that forgets what fell out of a window, and so cannot be cropped."""
    return getattr(module.config.get_text_config(), "sliding_window", None) is not None
