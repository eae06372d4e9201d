"""One forward over trunk and branches with the visibility as one (rows, rows) mask, on torch's own attention."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from trace_fast.bench.peers.packed import TRUNK, pack, packed_scores
from trace_fast.bench.peers.peer import ModulePeer, PeerSetup, on
from trace_fast.rollout import Rollout

WHAT = "one packed forward with a dense mask (SDPA)"


def why_not(setup: PeerSetup) -> str | None:
    if setup.has_windows():
        return "the model has sliding windows, which a mask handed over from outside replaces"
    return None


def open_peer(setup: PeerSetup) -> ModulePeer:
    return ModulePeer(setup.module, dense_mask_scores)


def dense_mask_scores(module: PreTrainedModel, rollout: Rollout) -> np.ndarray:
    """``(S,)``; the mask takes N^2 bytes."""
    packed = pack(rollout)
    owner, reach = on(module, packed.owner_N)[0], on(module, packed.reach_N)[0]
    rows = torch.arange(len(owner), device=owner.device)
    visible = owner[:, None] == owner[None]
    visible &= rows[:, None] >= rows[None]
    visible |= (owner[None] == TRUNK) & (rows[None] < reach[:, None])
    return packed_scores(module, rollout, packed, visible[None, None])
