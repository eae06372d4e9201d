"""One forward over trunk and branches on torch's FlexAttention, compiled, with the visibility as a block mask.

The block mask is made anew for every rollout, as a scorer would have to; compilation happens in the first call, which
is not timed.
"""

from __future__ import annotations

import importlib.util
import shutil

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import PreTrainedModel

from trace_fast.bench.peers.packed import TRUNK, pack, packed_scores
from trace_fast.bench.peers.peer import ModulePeer, PeerSetup, on
from trace_fast.rollout import Rollout

WHAT = "one packed forward on FlexAttention (torch.compile)"


def why_not(setup: PeerSetup) -> str | None:
    if setup.has_windows():
        return "the model has sliding windows, which a mask handed over from outside replaces"
    if not getattr(setup.module, "_supports_flex_attn", True):
        return f"{type(setup.module).__name__} does not support it in transformers"
    if setup.device.type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        return "torch.compile needs a C++ compiler on the CPU (g++ or clang++), and there is none"
    if setup.device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton on CUDA, and it is not installed"
    return None


def open_peer(setup: PeerSetup) -> ModulePeer:
    return ModulePeer(setup.module, flex_attention_scores)


def flex_attention_scores(module: PreTrainedModel, rollout: Rollout) -> np.ndarray:
    """``(S,)``; the model's attention is switched for the call and back."""
    packed = pack(rollout)
    owner, reach = on(module, packed.owner_N)[0], on(module, packed.reach_N)[0]

    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        own = (owner[q] == owner[k]) & (q >= k)
        return own | ((owner[k] == TRUNK) & (k < reach[q]))

    rows, device = len(owner), owner.device
    # uncompiled, the mask is formed element by element in N^2 bytes: too much for a long rollout on a GPU
    mask = create_block_mask(visible, None, None, rows, rows, device=device, _compile=device.type == "cuda")
    before = module.config._attn_implementation
    module.set_attn_implementation("flex_attention")
    try:
        return packed_scores(module, rollout, packed, mask)
    finally:
        module.set_attn_implementation(before)
