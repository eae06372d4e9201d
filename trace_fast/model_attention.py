"""The attention function that transformers' ``AttentionInterface`` calls under the name ``ATTENTION_NAME``.

Part of the Hugging Face seam. What a pack looks like travels to it as the keyword ``trace_fast_pass`` of the decoder's
forward call, so there is no global state; scoring and training use it alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from trace_fast.errors import ModelError
from trace_fast.kernels.prefix_attention import AttentionPlan, prefix_attention

ATTENTION_NAME = "trace_fast"


@dataclass
class AttentionPass:
    """One forward pass of one pack, handed to every attention layer as a keyword argument."""

    plan: AttentionPlan
    windows: list[int | None] = field(default_factory=list)  # of the attention layers, in the order they ran


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    trace_fast_pass: AttentionPass | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,  # what transformers passes along for other implementations (dropout is 0 in eval mode)
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: (1, H, N, D) in, (1, N, H, D) out."""
    if trace_fast_pass is None:
        raise ModelError(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    if position_bias is not None or attention_mask is not None:
        raise ModelError(f"{type(module).__name__} adds a bias or mask of its own to its attention: not supported")
    trace_fast_pass.windows.append(sliding_window)
    out_NHD = prefix_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        trace_fast_pass.plan,
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
    )
    return out_NHD[None], None


AttentionInterface.register(ATTENTION_NAME, _attention)
