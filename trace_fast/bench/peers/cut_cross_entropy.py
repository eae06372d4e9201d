"""cut-cross-entropy's fused linear cross entropy (package cut-cross-entropy) as the head of the KV-cache baseline."""

from __future__ import annotations

import importlib

import torch

from trace_fast.bench.peers.fused_head import FusedHead, fused_peer, why_not_fused
from trace_fast.bench.peers.peer import ModulePeer, PeerSetup

WHAT = "the KV cache, then cut-cross-entropy"


def why_not(setup: PeerSetup) -> str | None:
    return why_not_fused(setup, "cut_cross_entropy", "cut-cross-entropy")


def open_peer(setup: PeerSetup) -> ModulePeer:
    linear_cross_entropy = importlib.import_module("cut_cross_entropy").linear_cross_entropy

    def loss(head: FusedHead) -> torch.Tensor:
        found: torch.Tensor = linear_cross_entropy(
            head.hidden_MH,
            head.weight_VH,
            head.targets_M,
            bias=head.bias_V,
            softcap=head.softcap,
            reduction="none",
        )
        return found

    return fused_peer(setup, "cut_cross_entropy", loss)
