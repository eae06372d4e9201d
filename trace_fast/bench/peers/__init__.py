"""The ways people score boundaries today, one file each; they share no code with the engine.

A peer module has ``WHAT`` (one line of description), ``why_not(setup)`` (``None``, or why it cannot run here) and
``open_peer(setup)``. All return the mean log-probability (nats) of the first gold answer at each state, ``(S,)``.
"""

from __future__ import annotations

from types import ModuleType

from trace_fast.bench.peers import (
    cut_cross_entropy,
    dense_mask,
    flash_attn,
    flex_attention,
    kv_cache,
    liger,
    llama_cpp,
    naive,
    sglang,
    vllm,
)
from trace_fast.bench.peers.peer import Peer, PeerError, PeerSetup
from trace_fast.errors import ConfigError

__all__ = ["BASELINE", "ENDPOINTS", "PEERS", "SLOW", "Peer", "PeerError", "PeerSetup", "peer_module"]

PEERS: dict[str, ModuleType] = {
    "kv_cache": kv_cache,
    "dense_mask": dense_mask,
    "flex_attention": flex_attention,
    "naive": naive,
    "flash_attn": flash_attn,
    "liger": liger,
    "cut_cross_entropy": cut_cross_entropy,
    "llama_cpp": llama_cpp,
    "sglang": sglang,
    "vllm": vllm,
}
BASELINE = "kv_cache"  # speed-ups are over this one, which always runs
SLOW = frozenset({"naive"})  # run when named only, and timed once
ENDPOINTS = frozenset({"sglang", "vllm"})  # run when a URL is given


def peer_module(name: str) -> ModuleType:
    """Raises ``ConfigError`` for a name outside ``PEERS``."""
    if name not in PEERS:
        raise ConfigError(f"peer: expected one of {', '.join(PEERS)}, got {name!r}")
    return PEERS[name]
