"""One full forward a state: what a trainer's ``compute_log_prob`` does when it is called once a turn."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedModel

from trace_fast.bench.peers.peer import ModulePeer, PeerSetup, branch, mean_logprob, on
from trace_fast.rollout import Rollout

WHAT = "one full forward a state"


def why_not(setup: PeerSetup) -> str | None:
    return None


def open_peer(setup: PeerSetup) -> ModulePeer:
    return ModulePeer(setup.module, naive_scores)


def naive_scores(module: PreTrainedModel, rollout: Rollout) -> np.ndarray:
    """``(S,)``; logits of the answer's rows only."""
    return np.array([naive_state(module, rollout, k) for k in range(rollout.n_states)])


def naive_state(module: PreTrainedModel, rollout: Rollout, state: int) -> float:
    """The score of one state."""
    answer = rollout.answers[0]
    ids = np.concatenate([rollout.prefix(state), branch(rollout, state)])
    return mean_logprob(module(on(module, ids), use_cache=False, logits_to_keep=len(answer)).logits[0], answer)
