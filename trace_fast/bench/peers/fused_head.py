"""The KV-cache baseline with another library's fused head and loss: shared by those peers.

The baseline's passes stop at the final hidden rows that predict the answers; one call of the loss then takes the rows
of all states, so that no logits of a pass are formed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from trace_fast.bench.peers.kv_cache import kv_cache_hidden
from trace_fast.bench.peers.peer import ModulePeer, PeerError, PeerSetup
from trace_fast.rollout import Rollout

FACTORS = ("logit_scale", "logits_scaling")  # config entries that multiply or divide logits


@dataclass(frozen=True)
class FusedHead:
    """What a loss over M rows of ``(M, H)`` needs of the model, and the answers: ``(V, H)``, ``(V,)``, ``(M,)``."""

    hidden_MH: torch.Tensor
    weight_VH: torch.Tensor
    targets_M: torch.Tensor
    bias_V: torch.Tensor | None
    softcap: float | None


Loss = Callable[[FusedHead], torch.Tensor]  # cross entropy (nats) of each row, (M,)


def why_not_fused(setup: PeerSetup, folder: str, package: str) -> str | None:
    """Why a loss of ``package``, imported as ``folder``, cannot score this model here."""
    if setup.device.type != "cuda":
        return f"its kernel runs on CUDA devices, and the model is on {setup.device}"
    if importlib.util.find_spec(folder) is None:
        return f"the package {package} is not installed"
    config = setup.module.config.get_text_config()
    for name in FACTORS:
        if getattr(config, name, None) not in (None, 1.0):
            return f"the model scales its logits ({name} {getattr(config, name)}), which the loss cannot"
    return None


def fused_peer(setup: PeerSetup, name: str, loss: Loss) -> ModulePeer:
    """Scores with ``loss`` in place of the model's head."""

    def scores(module: PreTrainedModel, rollout: Rollout) -> np.ndarray:
        hidden_MH = kv_cache_hidden(module, rollout)
        answer = torch.as_tensor(rollout.answers[0], device=hidden_MH.device)
        head = module.get_output_embeddings()
        nll_M = loss(
            FusedHead(
                hidden_MH=hidden_MH,
                weight_VH=head.weight,
                targets_M=answer.repeat(rollout.n_states),
                bias_V=getattr(head, "bias", None),
                softcap=getattr(module.config.get_text_config(), "final_logit_softcapping", None),
            )
        )
        if nll_M.shape != hidden_MH.shape[:1]:
            raise PeerError(f"{name}: expected a loss for each of {len(hidden_MH)} rows, got {tuple(nll_M.shape)}")
        return -nll_M.double().view(rollout.n_states, -1).mean(1).cpu().numpy()

    return ModulePeer(setup.module, scores)
