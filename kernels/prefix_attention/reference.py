"""Eager oracle of prefix_attention: one dense softmax a span, any device, differentiable."""

from __future__ import annotations

import torch

from trace_fast.layout import SpanRanges, rows_of


class ReferencePlan:
    """Needs no planning."""

    def __init__(self, spans: SpanRanges) -> None:
        self.spans = spans

    def run(
        self,
        query_NHD: torch.Tensor,
        key_NKD: torch.Tensor,
        value_NKD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_H: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp. Materialises (span, H, keys) scores: for checks, not for speed."""
        accumulate = torch.float64 if query_NHD.dtype == torch.float64 else torch.float32
        device, heads = query_NHD.device, query_NHD.shape[1]
        group = heads // key_NKD.shape[1]
        rows, pieces, sums = [], [], []
        for p in range(len(self.spans)):
            own = torch.arange(int(self.spans.starts[p]), int(self.spans.ends[p]), device=device)
            before = torch.as_tensor(rows_of(self.spans.ancestors(p)), device=device)
            keys = torch.cat([before, own])
            query_HQD = query_NHD[own].to(accumulate).transpose(0, 1)
            key_HSD = key_NKD[keys].to(accumulate).transpose(0, 1).repeat_interleave(group, 0)
            value_HSD = value_NKD[keys].to(accumulate).transpose(0, 1).repeat_interleave(group, 0)
            scores_HQS = query_HQD @ key_HSD.transpose(1, 2) * scale
            if softcap is not None:
                scores_HQS = softcap * torch.tanh(scores_HQS / softcap)
            query_depth = torch.arange(len(before), len(keys), device=device)[:, None]
            key_depth = torch.arange(len(keys), device=device)[None, :]
            hidden = key_depth > query_depth
            if window is not None:
                hidden |= key_depth <= query_depth - window
            scores_HQS = scores_HQS.masked_fill(hidden, float("-inf"))
            if sinks_H is not None:
                sink = sinks_H.to(accumulate)[:, None, None].expand(-1, len(own), 1)
                scores_HQS = torch.cat([scores_HQS, sink], -1)
            weights_HQS = torch.softmax(scores_HQS, -1)[..., : len(keys)]
            rows.append(own)
            pieces.append((weights_HQS @ value_HSD).transpose(0, 1).to(query_NHD.dtype))
            sums.append(torch.logsumexp(scores_HQS, -1).T)
        out = query_NHD.new_zeros(len(query_NHD), heads, value_NKD.shape[2])
        lse = query_NHD.new_full(query_NHD.shape[:2], float("-inf"), dtype=accumulate)
        if not rows:
            return out, lse
        at = torch.cat(rows)
        return out.index_copy(0, at, torch.cat(pieces)), lse.index_copy(0, at, torch.cat(sums))
