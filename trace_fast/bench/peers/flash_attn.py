"""The KV-cache baseline on flash-attn's kernels (package flash-attn, transformers' ``flash_attention_2``)."""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils.import_utils import is_flash_attn_2_available

from trace_fast.bench.peers.kv_cache import kv_cache_scores
from trace_fast.bench.peers.peer import ModulePeer, PeerSetup
from trace_fast.rollout import Rollout

WHAT = "the KV cache on flash-attn's kernels"
IMPLEMENTATION = "flash_attention_2"
DTYPES = (torch.float16, torch.bfloat16)


def why_not(setup: PeerSetup) -> str | None:
    if setup.device.type != "cuda":
        return f"flash-attn runs on CUDA devices, and the model is on {setup.device}"
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    if not is_flash_attn_2_available():
        return "transformers cannot use the package flash_attn that is installed (it wants flash-attn 2.3.3 or later)"
    if setup.module.dtype not in DTYPES:
        return f"flash-attn takes float16 or bfloat16, and the model is {setup.module.dtype}"
    if not getattr(setup.module, "_supports_flash_attn", False):
        return f"{type(setup.module).__name__} does not support it in transformers"
    return None


def open_peer(setup: PeerSetup) -> ModulePeer:
    return ModulePeer(setup.module, flash_attn_scores)


def flash_attn_scores(module: PreTrainedModel, rollout: Rollout) -> np.ndarray:
    """``(S,)``; the model's attention is switched for the call and back."""
    before = module.config._attn_implementation
    module.set_attn_implementation(IMPLEMENTATION)
    try:
        return kv_cache_scores(module, rollout)
    finally:
        module.set_attn_implementation(before)
