"""The numbers that methods are compared with: the KV-cache baseline on a float64 copy of the model.

A test ties it to one full float64 pass a state. Norms and rotary angles are float32 inside transformers whatever the
dtype, which moves a score by less than 1e-5 nats.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from trace_fast.bench.peers.kv_cache import kv_cache_scores
from trace_fast.rollout import Rollout


def double_precision(module: PreTrainedModel) -> PreTrainedModel:
    """A float64 copy with the very same weights."""
    twin = copy.deepcopy(module).double().eval()
    if getattr(twin.config.get_text_config(), "num_experts_per_tok", None):
        twin.set_experts_implementation("eager")  # the grouped kernels have no float64
    return twin


@torch.no_grad()
def true_scores(module: PreTrainedModel, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """``(S,)`` mean log-probabilities (nats) of each rollout's first gold answer, in float64."""
    twin = double_precision(module)
    return [kv_cache_scores(twin, rollout) for rollout in rollouts]
