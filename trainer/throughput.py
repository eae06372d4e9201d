"""Arithmetic of a model over rollouts, for rates and plans. A multiply-add is two operations."""

from __future__ import annotations

from collections.abc import Sequence

from trace_fast.model_spec import ModelSpec
from trace_fast.rollout import Rollout


def parameters(spec: ModelSpec) -> int:
    """Weights of the model, norms and biases left out."""
    head = spec.vocab_size * spec.hidden_size
    return spec.n_layers * _layer_weights(spec, experts=spec.n_experts or 1) + head * (1 if spec.tied_head else 2)


def forward_flops(spec: ModelSpec, tokens: int, *, depth: float, head_tokens: int) -> float:
    """One forward pass of ``tokens`` tokens that see ``depth`` keys on average, the head over ``head_tokens``."""
    weights = spec.n_layers * _layer_weights(spec, experts=spec.experts_per_token or 1)
    attention = 2 * spec.n_layers * spec.n_heads * spec.head_dim * depth  # scores and values
    return 2.0 * (tokens * (weights + attention) + head_tokens * spec.vocab_size * spec.hidden_size)


def step_flops(spec: ModelSpec, rollouts: Sequence[Rollout], *, passes: int) -> float:
    """``passes`` forward passes' worth over the rollouts (a backward pass is two), each rollout for itself."""
    total = 0.0
    for rollout in rollouts:
        tokens = len(rollout.input_ids)
        written = tokens if rollout.loss_mask is None else int(rollout.loss_mask.sum())
        total += forward_flops(spec, tokens, depth=tokens / 2, head_tokens=written)
    return passes * total


def _layer_weights(spec: ModelSpec, *, experts: int) -> int:
    attention = spec.hidden_size * spec.head_dim * 2 * (spec.n_heads + spec.n_kv_heads)
    return attention + 3 * spec.hidden_size * spec.intermediate_size * experts
