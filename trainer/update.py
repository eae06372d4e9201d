"""The update phase of a training step: log-probabilities, loss and gradient of micro-batches, optimiser steps.

A batch is cut into optimiser steps of ``global_batch`` rollouts, in order; each is cut into micro-batches by tokens.
Losses and gradients of micro-batches and ranks are summed: the denominators are the optimiser step's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch

from trace_fast.kernels.policy_loss import PolicyLossConfig, PolicyLossMetrics
from trace_fast.trainer.batch import TrainingBatch
from trace_fast.trainer.microbatches import MicroBatch, microbatches
from trace_fast.trainer.optimizer import Adam
from trace_fast.trainer.policy import NonFiniteError, Policy

LOWEST, HIGHEST = ("ratio_min",), ("ratio_max",)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What came of a batch.

    Args:
        metrics: by name: ``loss``, ``grad_norm`` (before scaling; both means over optimiser steps), ``entropy`` (nats,
            the mean of -log p over the trained tokens: an estimate, as they were sampled from the policy), those of
            ``PolicyLossMetrics`` (weighed by tokens; quantiles are means of the micro-batches' quantiles).
        optimizer_steps: how many. tokens: of the rollouts that were trained on, each counted for itself.
    """

    metrics: dict[str, float]
    optimizer_steps: int
    tokens: int


def optimizer_batches(batch: TrainingBatch, global_batch: int) -> list[TrainingBatch]:
    """Parts of at most ``global_batch`` rollouts that have trained tokens, for one optimiser step each."""
    trained = [r for r, count in enumerate(batch.trained_tokens_R.tolist()) if count]
    return [batch.select(trained[i : i + global_batch]) for i in range(0, len(trained), global_batch)]


def update_policy(
    policy: Policy, optimizer: Adam, batch: TrainingBatch, loss: PolicyLossConfig, *, global_batch: int, budget: int
) -> UpdateResult:
    """Trains on a batch that has its advantages. All processes of the policy's mesh call it with the same batch.

    Where the whole batch is one optimiser step, the log-probabilities of that step's own forward pass are the old ones;
    otherwise those of ``batch`` are used, which the caller has computed before (``Policy.batch_logprobs``).

    Args:
        global_batch: rollouts of an optimiser step. budget: tokens of a micro-batch, of one data rank.

    Raises:
        NonFiniteError: on all processes alike, before the optimiser step that it would have spoilt.
        ConfigError: a rollout is longer than ``budget``.
    """
    parts = optimizer_batches(batch, global_batch)
    tally = _Tally()
    losses, norms = [], []
    for part in parts:
        total = 0.0
        micros = microbatches(part, budget, rank=policy.mesh.data_rank, n_ranks=policy.mesh.n_data_ranks)
        for micro in micros:  # to the end, whatever comes out: the other ranks' passes wait for this one's
            total += _backward(policy, micro.to(policy.mesh.device), loss, tally, on_policy=len(parts) == 1)
        # Ranks may add the parts of the norm in other orders; copies of a parameter must be scaled by the same number.
        norm = policy.mesh.from_first(optimizer.grad_norm())
        (total,) = policy.mesh.sum_over_data([total])
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise NonFiniteError(f"expected a finite loss and gradient, got a loss of {total} and a norm of {norm}")
        optimizer.step(norm)
        losses.append(total)
        norms.append(norm)
    metrics = tally.merged(policy)
    metrics |= {"loss": _mean(losses), "grad_norm": _mean(norms)}
    return UpdateResult(metrics, len(parts), sum(part.input_ids_N.numel() for part in parts))


def _backward(policy: Policy, micro: MicroBatch, loss: PolicyLossConfig, tally: _Tally, *, on_policy: bool) -> float:
    """Adds a micro-batch's gradient; its loss, which is NaN where a log-probability of the policy is not finite."""
    logprobs_L = policy.logprobs(micro)
    if on_policy:
        micro = replace(micro, old_logprobs_L=logprobs_L.detach())
    if not bool(logprobs_L.detach().isfinite().all()):
        logprobs_L.sum().backward()
        return math.nan
    result = micro.loss(logprobs_L, loss)
    result.loss.backward()
    tally.add(result.metrics, float(-logprobs_L.detach().sum(dtype=torch.float64)))
    return float(result.loss.detach())


class _Tally:
    """Metrics of the micro-batches of one process."""

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []

    def add(self, metrics: PolicyLossMetrics, surprise: float) -> None:
        row = {f.name: float(getattr(metrics, f.name)) for f in fields(metrics)}
        if row["n_tokens"]:
            self._rows.append(row | {"entropy": surprise / row["n_tokens"]})

    def merged(self, policy: Policy) -> dict[str, float]:
        """Over all micro-batches of all data ranks; the same on every process."""
        everywhere = policy.mesh.gather_objects(self._rows)[:: policy.mesh.tensor.size()]
        rows = [row for rows in everywhere for row in rows]
        return dict(_merged(rows))


def _merged(rows: list[dict[str, float]]) -> Iterator[tuple[str, float]]:
    if not rows:
        return
    total = math.fsum(row["n_tokens"] for row in rows)
    yield "trained_tokens", total
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name in LOWEST:
            yield name, min(values)
        elif name in HIGHEST:
            yield name, max(values)
        elif name != "n_tokens":
            yield name, math.fsum(v * row["n_tokens"] for v, row in zip(values, rows, strict=True)) / total


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
