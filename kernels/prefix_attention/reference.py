"""Eager oracle of prefix_attention: one dense softmax a span, any device, differentiable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    ) -> torch.Tensor:
        return prefix_attention_reference(
            query_NHD, key_NKD, value_NKD, self.spans, scale=scale, window=window, softcap=softcap, sinks_H=sinks_H
        )

    def run_with_lse(
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
        return prefix_attention_reference_with_lse(
            query_NHD, key_NKD, value_NKD, self.spans, scale=scale, window=window, softcap=softcap, sinks_H=sinks_H
        )


def prefix_attention_reference(
    query_NHD: torch.Tensor,
    key_NKD: torch.Tensor,
    value_NKD: torch.Tensor,
    spans: SpanRanges,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """See ``prefix_attention``. Materialises (span, H, keys) scores: for checks, not for speed."""
    out = query_NHD.new_zeros(len(query_NHD), query_NHD.shape[1], value_NKD.shape[2])
    rows, pieces = [], []
    for span in _spans(query_NHD, key_NKD, value_NKD, spans, scale, window, softcap, sinks_H):
        rows.append(span.rows)
        pieces.append(span.out().to(out.dtype))
    return out.index_copy(0, torch.cat(rows), torch.cat(pieces)) if pieces else out


def prefix_attention_reference_with_lse(
    query_NHD: torch.Tensor,
    key_NKD: torch.Tensor,
    value_NKD: torch.Tensor,
    spans: SpanRanges,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and ``(N, H)`` log-sum-exp of each row's scores (nats), sink included; -inf in no span."""
    out = query_NHD.new_zeros(len(query_NHD), query_NHD.shape[1], value_NKD.shape[2])
    lse = query_NHD.new_full(query_NHD.shape[:2], float("-inf"), dtype=_accumulate(query_NHD))
    rows, pieces, sums = [], [], []
    for span in _spans(query_NHD, key_NKD, value_NKD, spans, scale, window, softcap, sinks_H):
        rows.append(span.rows)
        pieces.append(span.out().to(out.dtype))
        sums.append(torch.logsumexp(span.scores_HQS, -1).T)
    if not pieces:
        return out, lse
    at = torch.cat(rows)
    return out.index_copy(0, at, torch.cat(pieces)), lse.index_copy(0, at, torch.cat(sums))


@dataclass(frozen=True, slots=True)
class _Span:
    """``rows`` of the pack, their scores (hidden keys -inf, a sink's logit last) and the values of its S keys."""

    rows: torch.Tensor
    scores_HQS: torch.Tensor
    value_HSD: torch.Tensor

    def out(self) -> torch.Tensor:
        weights_HQS = torch.softmax(self.scores_HQS, -1)[..., : self.value_HSD.shape[1]]
        return (weights_HQS @ self.value_HSD).transpose(0, 1)


def _accumulate(query_NHD: torch.Tensor) -> torch.dtype:
    return torch.float64 if query_NHD.dtype == torch.float64 else torch.float32


def _spans(
    query_NHD: torch.Tensor,
    key_NKD: torch.Tensor,
    value_NKD: torch.Tensor,
    spans: SpanRanges,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> Iterator[_Span]:
    accumulate, device = _accumulate(query_NHD), query_NHD.device
    group = query_NHD.shape[1] // key_NKD.shape[1]
    for p in range(len(spans)):
        own = torch.arange(int(spans.starts[p]), int(spans.ends[p]), device=device)
        before = torch.as_tensor(rows_of(spans.ancestors(p)), device=device)
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
        yield _Span(own, scores_HQS, value_HSD)
