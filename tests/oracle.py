"""The naive truth: one full forward a state and alias, plain transformers, eager attention. Shares no code with
the engine: states are built from the rollout's fields by hand, log-probabilities from the model's own logits."""

from __future__ import annotations

import copy

import numpy as np
import torch

from trace_fast.rollout import Rollout


def double_precision(module: torch.nn.Module) -> torch.nn.Module:
    """A float64 copy with the very same weights, on eager attention."""
    twin = copy.deepcopy(module).double().eval()
    twin.set_attn_implementation("eager")
    if getattr(twin.config, "num_experts_per_tok", None):
        twin.set_experts_implementation("eager")  # the grouped kernels have no float64
    return twin


@torch.no_grad()
def sequence_logprobs(module: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """(L-1,) log p(ids[t+1] | ids[:t+1]) in the module's dtype, log-softmax in at least float32."""
    logits = module(input_ids=torch.as_tensor(ids)[None], use_cache=False).logits[0, :-1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = torch.log_softmax(logits, -1)
    return logprobs[torch.arange(len(ids) - 1), torch.as_tensor(ids[1:])].double().numpy()


def answer_logprobs(module: torch.nn.Module, rollout: Rollout) -> dict[tuple[int, int], np.ndarray]:
    """(state, alias) -> log-probabilities of that gold answer's tokens after that state."""
    found = {}
    for k in range(len(rollout.boundaries)):
        if rollout.state_prefixes is not None:
            prefix = rollout.state_prefixes[k]
        else:
            prefix = rollout.input_ids[: rollout.boundaries[k]]
        for a, answer in enumerate(rollout.answers):
            ids = np.concatenate([prefix, rollout.openers[k], answer])
            found[k, a] = sequence_logprobs(module, ids)[-len(answer) :]
    return found


def mean_logprobs(module: torch.nn.Module, rollout: Rollout) -> np.ndarray:
    """(S, A) mean log-probability of each alias at each state."""
    found = answer_logprobs(module, rollout)
    return np.array([[found[k, a].mean() for a in range(len(rollout.answers))] for k in range(len(rollout.boundaries))])
