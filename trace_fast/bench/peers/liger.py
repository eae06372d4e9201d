"""Liger's fused linear cross entropy (package liger-kernel) as the head of the KV-cache baseline."""

from __future__ import annotations

import importlib

import torch

from trace_fast.bench.peers.fused_head import FusedHead, fused_peer, why_not_fused
from trace_fast.bench.peers.peer import ModulePeer, PeerSetup

WHAT = "the KV cache, then Liger's fused linear cross entropy"


def why_not(setup: PeerSetup) -> str | None:
    return why_not_fused(setup, "liger_kernel", "liger-kernel")


def open_peer(setup: PeerSetup) -> ModulePeer:
    make_loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss

    def loss(head: FusedHead) -> torch.Tensor:
        found: torch.Tensor = make_loss(reduction="none", softcap=head.softcap)(
            head.weight_VH, head.hidden_MH, head.targets_M, head.bias_V
        )
        return found

    return fused_peer(setup, "liger", loss)
