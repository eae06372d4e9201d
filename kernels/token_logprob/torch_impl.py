"""Chunked token_logprob: a block of rows times a chunk of the vocabulary at a time, in float32.

Row blocks have a fixed size (the last one is padded), so every product has the same shape and a row's bits do not
depend on how many others there are. Extra memory: one chunk of the head in float32 and one block of logits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROW_BLOCK = 256
VOCABULARY_CHUNK = 8192


def token_logprob_torch(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    bias_V: torch.Tensor | None,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
) -> torch.Tensor:
    """See ``token_logprob``. Forward only."""
    accumulate = torch.float64 if hidden_MH.dtype == torch.float64 else torch.float32
    rows = len(hidden_MH)
    pad = -rows % ROW_BLOCK
    hidden_MH = F.pad(hidden_MH.to(accumulate), (0, 0, 0, pad))
    targets_M = F.pad(targets_M, (0, pad))
    peak_M = hidden_MH.new_full((rows + pad,), float("-inf"))
    total_M = hidden_MH.new_zeros(rows + pad)
    target_M = hidden_MH.new_zeros(rows + pad)
    for low in range(0, len(weight_VH), VOCABULARY_CHUNK):
        chunk_CH = weight_VH[low : low + VOCABULARY_CHUNK].to(accumulate)
        bias_C = None if bias_V is None else bias_V[low : low + VOCABULARY_CHUNK].to(accumulate)
        for first in range(0, rows, ROW_BLOCK):
            block = slice(first, first + ROW_BLOCK)
            logits = F.linear(hidden_MH[block], chunk_CH, bias_C).mul_(logit_scale)
            if softcap is not None:
                logits = logits.div_(softcap).tanh().mul_(softcap)
            logits = logits.div_(temperature)
            inside = targets_M[block] - low
            hit = (inside >= 0) & (inside < len(chunk_CH))
            found = logits.gather(1, inside.clamp(0, len(chunk_CH) - 1)[:, None])[:, 0]
            target_M[block] = torch.where(hit, found, target_M[block])
            peak = torch.maximum(peak_M[block], logits.amax(1))
            kept = total_M[block] * (peak_M[block] - peak).exp()
            total_M[block] = kept + logits.sub_(peak[:, None]).exp().sum(1)
            peak_M[block] = peak
    return (target_M - peak_M - total_M.log()).clamp_(max=0)[:rows]
