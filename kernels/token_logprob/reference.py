"""Eager oracle of token_logprob: all logits at once, any device, differentiable."""

from __future__ import annotations

import torch


def token_logprob_reference(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    bias_V: torch.Tensor | None,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
) -> torch.Tensor:
    """See ``token_logprob``. Materialises (M, V) logits: for checks, not for speed."""
    accumulate = torch.float64 if hidden_MH.dtype == torch.float64 else torch.float32
    logits_MV = hidden_MH.to(accumulate) @ weight_VH.to(accumulate).T
    if bias_V is not None:
        logits_MV = logits_MV + bias_V.to(accumulate)
    logits_MV = logits_MV * logit_scale
    if softcap is not None:
        logits_MV = softcap * torch.tanh(logits_MV / softcap)
    return torch.log_softmax(logits_MV / temperature, -1).gather(1, targets_M[:, None])[:, 0]
