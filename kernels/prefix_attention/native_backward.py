"""Gradient of the native implementation, with torch's own matrix products: a run of query rows of one span at a time.

Everything is formed again from the log-sum-exp of the forward pass: with p = exp(s - lse),
delta_i = sum_d out_id dout_id - dlse_i and s = softcap(x), x = scale q k^T,

    dv = p^T dout;   ds = p (dout v^T - delta);   dx = ds (1 - (s/c)^2)
    dq = scale dx k;   dk = scale dx^T q;   dsink = -sum_i exp(sink - lse_i) delta_i

Sums are float32, in a fixed order. Extra memory: up to four float32 matrices of ``SCORES`` entries (one row of scores
at least), and q, k, v and their gradients in float32.

What is not finite stays on its path, as in the forward pass. The products run over pairs that are hidden from one
another too, with weight 0, and 0 * NaN is NaN: so a row or key that holds one takes part as zeros, and NaN is added to
its visible scores. The gradients of all others have the bits that they would have without it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from trace_fast.kernels.prefix_attention.native_plan import KEY_BLOCK

SCORES = 1 << 22  # scores held at once (float32)


class Gradients(NamedTuple):
    """In the dtype of what they belong to; ``sinks_H`` float32, ``None`` where there are no sinks."""

    query_NHD: torch.Tensor
    key_NKD: torch.Tensor
    value_NKD: torch.Tensor
    sinks_H: torch.Tensor | None


def prefix_attention_backward(
    grad_out_NHD: torch.Tensor,
    grad_lse_NH: torch.Tensor,
    query_NHD: torch.Tensor,
    key_NKD: torch.Tensor,
    value_NKD: torch.Tensor,
    out_NHD: torch.Tensor,
    lse_NH: torch.Tensor,
    block_rows: torch.Tensor,
    path_blocks: torch.Tensor,
    spans: torch.Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
    sinks_H: torch.Tensor | None,
) -> Gradients:
    """See the module; ``window`` and ``softcap`` 0 are off, the tables are those of ``native_plan``."""
    _, heads, dim = query_NHD.shape
    kv_heads = key_NKD.shape[1]
    group = heads // kv_heads
    query, key, value = query_NHD.float(), key_NKD.float(), value_NKD.float()
    grad_out = grad_out_NHD.float()
    delta_NH = (out_NHD.float() * grad_out).sum(-1) - grad_lse_NH.float()
    grad_query, grad_key, grad_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    row_taint_NH, key_taint_NK = _taint(query, grad_out), _taint(key)
    tainted = bool(row_taint_NH.isnan().any() or key_taint_NK.isnan().any())
    if tainted:
        query, grad_out = (t.masked_fill(row_taint_NH.isnan()[..., None], 0) for t in (query, grad_out))
        key = key.masked_fill(key_taint_NK.isnan()[..., None], 0)

    def folded(x_CHE: torch.Tensor) -> torch.Tensor:
        """(C, H, E) to (K, C * group, E): the query heads of one key head are rows of it."""
        return x_CHE.reshape(len(x_CHE), kv_heads, group, -1).transpose(0, 1).reshape(kv_heads, -1, x_CHE.shape[-1])

    for first, count, depth, start in spans.tolist():
        blocks = path_blocks[start : start + -(-(depth + count) // KEY_BLOCK)] if count else path_blocks[:0]
        path = block_rows[blocks].reshape(-1)[: depth + count]
        at = 0
        while at < count:
            high = depth + at
            step = min(max(SCORES // (heads * (high + count - at)), 1), count - at)
            low = max(high - window + 1, 0) if window else 0
            own = slice(first + at, first + at + step)
            keys = path[low : high + step]
            key_KSD, value_KSD = (t.index_select(0, keys).transpose(0, 1) for t in (key, value))
            query_KRD, grad_KRD = folded(query[own]), folded(grad_out[own])
            score = torch.bmm(query_KRD, key_KSD.transpose(1, 2)).mul_(scale)
            if softcap:
                score = score.div_(softcap).tanh_()
                slope = 1 - score.square()
                score = score.mul_(softcap)
            depth_R = torch.arange(high, high + step).repeat_interleave(group)[:, None]
            depth_S = torch.arange(low, high + step)[None, :]
            hidden = depth_S > depth_R
            if window:
                hidden |= depth_S <= depth_R - window
            if tainted:
                score = score.add_(folded(row_taint_NH[own, :, None])).add_(key_taint_NK[keys].T[:, None])
            weight = score.sub_(folded(lse_NH[own, :, None])).exp_().masked_fill_(hidden, 0)
            grad_value.index_add_(0, keys, torch.bmm(weight.transpose(1, 2), grad_KRD).transpose(0, 1))
            grad_score = torch.bmm(grad_KRD, value_KSD.transpose(1, 2))
            grad_score = grad_score.sub_(folded(delta_NH[own, :, None])).mul_(weight)
            if softcap:
                grad_score = grad_score.mul_(slope)
            grad_score = grad_score.masked_fill_(hidden, 0).mul_(scale)
            grad_key.index_add_(0, keys, torch.bmm(grad_score.transpose(1, 2), query_KRD).transpose(0, 1))
            grad_KRD = torch.bmm(grad_score, key_KSD).view(kv_heads, step, group, dim)
            grad_query[own] = grad_KRD.transpose(0, 1).reshape(step, heads, dim)
            at += step
    grad_sinks = None
    if sinks_H is not None:
        share_NH = torch.exp(sinks_H.float() - lse_NH).masked_fill(lse_NH == float("-inf"), 0)  # no span: no softmax
        grad_sinks = -(share_NH * delta_NH).sum(0)
    return Gradients(
        grad_query.to(query_NHD.dtype), grad_key.to(key_NKD.dtype), grad_value.to(value_NKD.dtype), grad_sinks
    )


def _taint(*tensors_NHE: torch.Tensor) -> torch.Tensor:
    """``(N, H)`` 0, or NaN where a tensor's entries of that row and head are not all finite."""
    return sum((t.mul(0).sum(-1) for t in tensors_NHE), start=tensors_NHE[0].new_zeros(()))


__all__ = ["Gradients", "prefix_attention_backward"]
