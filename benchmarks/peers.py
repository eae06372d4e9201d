"""The ways people score boundaries today, each as a function of (module, rollout) -> (S,) mean log-probabilities.

They share no code with the engine. All use transformers' own attention and compute logits for answer rows only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from trace_fast.rollout import Rollout

Method = Callable[[PreTrainedModel, Rollout], np.ndarray]


def _mean_logprob(logits: torch.Tensor, answer: torch.Tensor) -> float:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return float(torch.log_softmax(logits, -1).gather(1, answer[:, None]).double().mean())


@torch.no_grad()
def naive(module: PreTrainedModel, rollout: Rollout) -> np.ndarray:
    """One full forward a state."""
    found = []
    for k in range(rollout.n_states):
        answer = torch.as_tensor(rollout.answers[0])
        ids = np.concatenate([rollout.prefix(k), rollout.openers[k], rollout.answers[0][:-1]])
        logits = module(input_ids=torch.as_tensor(ids)[None], use_cache=False, logits_to_keep=len(answer)).logits[0]
        found.append(_mean_logprob(logits, answer))
    return np.array(found)


@torch.no_grad()
def kv_cache(module: PreTrainedModel, rollout: Rollout) -> np.ndarray:
    """One cache over the trunk, a segment at a time; at each boundary one pass over the branch, then crop."""
    cache = DynamicCache(config=module.config)
    answer = torch.as_tensor(rollout.answers[0])
    found, done = [], 0
    for k in range(rollout.n_states):
        boundary = int(rollout.boundaries[k])
        if boundary > done:
            segment = torch.as_tensor(rollout.input_ids[done:boundary])[None]
            module(input_ids=segment, past_key_values=cache, use_cache=True, logits_to_keep=1)
            done = boundary
        branch = torch.as_tensor(np.concatenate([rollout.openers[k], rollout.answers[0][:-1]]))[None]
        logits = module(input_ids=branch, past_key_values=cache, use_cache=True, logits_to_keep=len(answer)).logits[0]
        found.append(_mean_logprob(logits, answer))
        cache.crop(-branch.shape[1])
    return np.array(found)


@torch.no_grad()
def dense_mask(module: PreTrainedModel, rollout: Rollout) -> np.ndarray:
    """Trunk and all branches in one forward, visibility as one (rows, rows) mask."""
    trunk = len(rollout.input_ids)
    branch = np.concatenate([rollout.openers[0], rollout.answers[0][:-1]])
    size, states = len(branch), rollout.n_states
    ids = np.concatenate([rollout.input_ids, *[branch] * states])
    positions = np.concatenate([np.arange(trunk), *[b + np.arange(size) for b in rollout.boundaries]])
    visible = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    visible[:trunk, :trunk] = torch.ones(trunk, trunk, dtype=torch.bool).tril_()
    for k, boundary in enumerate(rollout.boundaries):
        rows = slice(trunk + k * size, trunk + (k + 1) * size)
        visible[rows, :boundary] = True
        visible[rows, rows] = torch.ones(size, size, dtype=torch.bool).tril_()
    answer = torch.as_tensor(rollout.answers[0])
    first = torch.arange(states)[:, None] * size + size - len(answer)
    keep = (trunk + first + torch.arange(len(answer))).reshape(-1)
    logits = module(
        input_ids=torch.as_tensor(ids)[None],
        position_ids=torch.as_tensor(positions)[None],
        attention_mask=visible[None, None],
        use_cache=False,
        logits_to_keep=keep,
    ).logits[0]
    return np.array([_mean_logprob(part, answer) for part in logits.split(len(answer))])


PEERS: dict[str, Method] = {"kv_cache": kv_cache, "dense_mask": dense_mask, "naive": naive}
