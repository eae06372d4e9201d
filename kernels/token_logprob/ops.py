"""The custom ops of token_logprob, defined once for every implementation that has its own gradient.

With x the logits, m the row's maximum, S = sum_v e^(x_v - m), p_v = e^(x_v - m) / S, every output's gradient is

    d loss / d x_v = e^(x_v - m) (slope + curve (x_v - m)) + spike [v = target]

with three numbers a row:

- log-probability x_t - m - log S:  slope = -g / S, spike = g
- entropy E = log S - sum_v p_v (x_v - m):  curve = -g / S, slope = -g (E - log S) / S
- parts (S, x_t) of a shard:  slope = g_S, spike = g_t. The maximum is taken as a constant: whatever is computed from
  parts through m + log S does not depend on it, so what the two paths through it give cancels.

So one backward serves all: it forms logits again, a chunk at a time, and never holds more than a chunk of them.
Shapes: M rows, H hidden, V vocabulary, S segments. Row numbers are float32 (float64 for float64 rows).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from trace_fast.kernels.common.derivatives import first_order_only, refuse_tangents
from trace_fast.kernels.token_logprob.problem import Problem, RowSums, Scored, accumulation_dtype, safe_offsets


class Ops(NamedTuple):
    """The registered ops of one implementation."""

    name: str
    score: Any
    parts: Any
    backward: Any

    def refuse_tangents(self, problem: Problem) -> None:
        hidden, weight, _, bias = problem[:4]
        refuse_tangents("token_logprob", self.name, hidden=hidden, weight=weight, bias=bias)


def define_ops(name: str, score: Callable[..., Any], parts: Callable[..., Any], backward: Callable[..., Any]) -> Ops:
    """Registers ``trace_fast::token_logprob_{name}``, ``..._parts_{name}`` and ``..._backward_{name}``.

    Args:
        score: (*Problem, starts_S, ignore_index, entropy) -> logprob (M,), entropy (M,) or (0,), mean (S,) or (0,) in
            float64, maximum (M,), sum (M,).
        parts: (*Problem, vocabulary_start) -> maximum, sum, target's logit, each (M,).
        backward: (*Problem, maximum, slope, curve, spike, vocabulary_start, want_hidden, want_weight, want_bias) ->
            gradients in the dtypes of their tensors, (0,) for those not wanted; curve is (0,) when it is zero.
    """

    def op(kind: str, function: Callable[..., Any]) -> Any:
        return torch.library.custom_op(f"trace_fast::token_logprob{kind}_{name}", function, mutates_args=())

    ops = Ops(name, op("", score), op("_parts", parts), op("_backward", backward))
    ops.score.register_fake(_fake_score)
    ops.parts.register_fake(_fake_parts)
    ops.backward.register_fake(_fake_backward)

    def gradients(
        ctx: Any,
        tensors: tuple[Any, ...],
        peak_M: torch.Tensor,
        factors: Factors,
        first: int,
        upstream: tuple[torch.Tensor, ...],
    ) -> Any:
        wanted = [ctx.needs_input_grad[place] for place in (0, 1, 3)]
        grads = ops.backward(*tensors, *ctx.settings, peak_M, *factors, first, *wanted)
        kept = [grad if want else None for grad, want in zip(grads, wanted, strict=True)]
        hidden, weight, bias = first_order_only("token_logprob", name, (*tensors, *upstream), kept)
        return hidden, weight, None, bias, None, None, None

    def score_backward(ctx: Any, grad_M: Any, grad_entropy_M: Any, grad_mean_S: Any, *_: Any) -> Any:
        hidden, weight, targets, bias, starts, peak, total, entropy = ctx.saved_tensors
        scored_M = _scored(targets, ctx.ignore_index)
        if ctx.ignore_index is not None:  # a NaN in an ignored row, times 0, would still reach the weight
            hidden = hidden.masked_fill(~scored_M[:, None], 0)
        if starts is not None:
            grad_M = grad_M + _spread_mean(grad_mean_S, starts, scored_M).to(grad_M.dtype)
        unknown_M = scored_M & ((targets < 0) | (targets >= len(weight)))
        factors = _score_factors(grad_M, grad_entropy_M, scored_M, unknown_M, total, entropy)
        upstream = (grad_M, grad_entropy_M)
        return *gradients(ctx, (hidden, weight, targets, bias), peak, factors, 0, upstream), None, None, None

    def parts_backward(ctx: Any, _: Any, grad_sum_M: Any, grad_target_M: Any) -> Any:
        *tensors, peak = ctx.saved_tensors
        factors = Factors(grad_sum_M, peak.new_empty(0), grad_target_M)
        upstream = (grad_sum_M, grad_target_M)
        return *gradients(ctx, tuple(tensors), peak, factors, ctx.vocabulary_start, upstream), None

    ops.score.register_autograd(score_backward, setup_context=_keep_score)
    ops.parts.register_autograd(parts_backward, setup_context=_keep_parts)
    return ops


class Factors(NamedTuple):
    """The three numbers a row of the module's formula; ``curve_M`` is (0,) when it is zero."""

    slope_M: torch.Tensor
    curve_M: torch.Tensor
    spike_M: torch.Tensor


def _scored(targets_M: torch.Tensor, ignore_index: int | None) -> torch.Tensor:
    return torch.ones_like(targets_M, dtype=torch.bool) if ignore_index is None else targets_M != ignore_index


def _score_factors(
    grad_M: torch.Tensor,
    grad_entropy_M: torch.Tensor,
    scored_M: torch.Tensor,
    unknown_M: torch.Tensor,
    total_M: torch.Tensor,
    entropy_M: torch.Tensor,
) -> Factors:
    grad_M = grad_M.masked_fill(~scored_M, 0)
    slope_M, curve_M = -grad_M / total_M, total_M.new_empty(0)
    if entropy_M.numel():
        curve_M = -grad_entropy_M.masked_fill(~scored_M, 0) / total_M
        slope_M = slope_M + curve_M * (entropy_M - total_M.log())
    slope_M = slope_M.masked_fill(~scored_M, 0).masked_fill(unknown_M, float("nan"))  # as the log-probability is
    return Factors(slope_M, curve_M.masked_fill(~scored_M, 0) if curve_M.numel() else curve_M, grad_M)


def _spread_mean(grad_mean_S: torch.Tensor, starts_S: torch.Tensor, scored_M: torch.Tensor) -> torch.Tensor:
    """(M,) what every row's log-probability gets from its segment's mean; rows of no segment get 0."""
    starts_S = safe_offsets(starts_S, len(scored_M))
    before = torch.cat([scored_M.new_zeros(1, dtype=torch.int64), scored_M.cumsum(0)])
    count_S = before[starts_S[1:]] - before[starts_S[:-1]]
    row_M = torch.arange(len(scored_M), device=scored_M.device)
    segment_M = torch.searchsorted(starts_S, row_M, right=True) - 1
    inside_M = (segment_M >= 0) & (segment_M < len(count_S))
    share_S = grad_mean_S / count_S
    return share_S[segment_M.clamp(0, len(count_S) - 1)].masked_fill(~inside_M, 0)


def _keep_score(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    problem, (starts, ignore_index, _) = Problem(*inputs[:7]), inputs[7:]
    _, entropy, _, peak, total = output
    ctx.save_for_backward(*problem[:4], starts, peak, total, entropy)
    ctx.settings, ctx.ignore_index = problem[4:], ignore_index


def _keep_parts(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    problem = Problem(*inputs[:7])
    ctx.save_for_backward(*problem[:4], output[0])
    ctx.settings, ctx.vocabulary_start = problem[4:], inputs[7]


def _fake_score(*inputs: Any) -> tuple[torch.Tensor, ...]:
    hidden, starts, entropy = inputs[0], inputs[7], inputs[9]
    rows = hidden.shape[0]
    segments = 0 if starts is None else starts.shape[0] - 1
    dtype = accumulation_dtype(hidden)
    logprob, entropy_M, peak, total = (hidden.new_empty(n, dtype=dtype) for n in (rows, rows * entropy, rows, rows))
    return logprob, entropy_M, hidden.new_empty(segments, dtype=torch.float64), peak, total


def _fake_parts(*inputs: Any) -> tuple[torch.Tensor, ...]:
    hidden = inputs[0]
    return tuple(hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden)) for _ in range(3))


def _fake_backward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    hidden, weight, bias, wanted = inputs[0], inputs[1], inputs[3], inputs[12:]
    tensors = (hidden, weight, hidden if bias is None else bias)
    return tuple(t.new_empty(t.shape if want else 0) for t, want in zip(tensors, wanted, strict=True))


def run_score(
    ops: Ops, problem: Problem, *, starts_S: torch.Tensor | None, ignore_index: int | None, entropy: bool
) -> Scored:
    ops.refuse_tangents(problem)
    logprob, entropy_M, mean_S, _, _ = ops.score(*problem, starts_S, ignore_index, entropy)
    return Scored(logprob, entropy_M if entropy else None, None if starts_S is None else mean_S)


def run_parts(ops: Ops, problem: Problem, *, vocabulary_start: int) -> RowSums:
    ops.refuse_tangents(problem)
    sums: RowSums = ops.parts(*problem, vocabulary_start)
    return sums
