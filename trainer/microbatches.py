"""Packed micro-batches of whole rollouts, by a budget of tokens; any split gives the loss and gradient of the batch.

The denominators of the objective are the whole batch's, in every micro-batch. So the losses of all micro-batches (and
of all ranks) are *summed*: nothing is divided by their number, and ranks' gradients are added, not averaged.

The log-probability of token i of a rollout comes from the model's output at token i-1: ``rows_L`` are those places for
the L trained tokens, so that the head runs over trained tokens only and a rollout's first token is never scored from
the rollout before it in the pack.

Suffixes: N tokens, L trained tokens, R rollouts, R1 = R+1, of the micro-batch unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from trace_fast.backends import fastest
from trace_fast.errors import ConfigError, TraceFastError
from trace_fast.kernels.policy_loss import BatchCounts, PolicyLoss, PolicyLossConfig, policy_loss
from trace_fast.kernels.turn_credit.segments import offsets
from trace_fast.trainer.batch import TrainingBatch


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Some rollouts of a batch, packed. Tensors are on the batch's device until ``to``.

    Args:
        rollouts: their places in the batch; a filler (see ``microbatches``) repeats one, with no trained token.
        input_ids_N, positions_N: ``int64``; positions begin at 0 in each rollout.
        cu_tokens_R1: ``int32``. longest: tokens of the longest rollout.
        rows_L: ``int64`` places among the N tokens whose output predicts ``targets_L``, the trained tokens.
        old_logprobs_L, sampler_logprobs_L, advantages_L: of the trained tokens.
        cu_trained_R1: ``int32`` offsets of the rollouts among the trained tokens.
        counts: the whole batch's denominators.
        temperature: logits are divided by it before the log-softmax.
    """

    rollouts: tuple[int, ...]
    input_ids_N: Tensor
    positions_N: Tensor
    cu_tokens_R1: Tensor
    longest: int
    rows_L: Tensor
    targets_L: Tensor
    old_logprobs_L: Tensor
    sampler_logprobs_L: Tensor
    advantages_L: Tensor
    cu_trained_R1: Tensor
    counts: BatchCounts
    temperature: float

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch on ``device``."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device, non_blocking=True) for k, v in own.items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def loss(self, logprobs_L: Tensor, config: PolicyLossConfig, *, backend: str = "auto") -> PolicyLoss:
        """This micro-batch's share of the batch's loss, from the log-probabilities of ``targets_L``.

        ``backend`` is an implementation of ``policy_loss``, or the fastest that runs on their device.

        Raises:
            TraceFastError, ConfigError: as ``policy_loss``.
        """
        return policy_loss(
            logprobs_L,
            self.old_logprobs_L,
            self.advantages_L,
            torch.ones_like(self.targets_L, dtype=torch.bool),
            self.cu_trained_R1,
            config,
            sampler_logprobs_N=None if config.tis_cap is None else self.sampler_logprobs_L,
            counts=self.counts,
            backend=fastest("policy_loss", logprobs_L.device, logprobs_L.dtype) if backend == "auto" else backend,
        )


def microbatches(batch: TrainingBatch, budget: int, *, rank: int = 0, n_ranks: int = 1) -> list[MicroBatch]:
    """One rank's micro-batches, of at most ``budget`` tokens each. Give a batch on the CPU: packing reads its contents.

    All ranks get the same number, so that collectives in their forward passes meet: where rollouts are too few, a rank
    gets a filler, a rollout without trained tokens, whose loss and gradient are 0. Rollouts without trained tokens are
    left out; a batch that has none else gives no micro-batch, on all ranks alike.

    Raises:
        TraceFastError: the batch has no advantages yet.
        ConfigError: a rollout is longer than ``budget``, or rank and n_ranks do not fit.
    """
    if batch.advantages_N is None:
        raise TraceFastError("batch: expected advantages (trace_fast.trainer.algorithms.prepare), got none")
    if not 0 <= rank < n_ranks:
        raise ConfigError(f"rank: expected 0..{n_ranks - 1} of {n_ranks} ranks, got {rank}")
    trained_R = batch.trained_tokens_R.tolist()
    members = [r for r, count in enumerate(trained_R) if count]
    lengths = batch.cu_tokens_R1.diff().tolist()
    for r in members:
        if lengths[r] > budget:
            raise ConfigError(
                f"budget: expected at least {lengths[r]} tokens a micro-batch, the length of rollout {batch.ids[r]!r}, "
                f"which is not divided; got {budget}"
            )
    groups = batch.group_ids_R.tolist()
    packs = pack([lengths[r] for r in members], [groups[r] for r in members], budget, n_ranks)
    counts = BatchCounts(n_tokens=sum(trained_R), n_rollouts=len(members))
    shortest = min(members, key=lambda r: lengths[r], default=0)
    return [
        _gather(batch, [members[i] for i in chosen] or [shortest], counts, filler=not chosen)
        for chosen in packs[rank::n_ranks]
    ]


def pack(lengths: Sequence[int], groups: Sequence[int], budget: int, n_ranks: int = 1) -> list[tuple[int, ...]]:
    """Packs of rollouts (their places, ascending) within ``budget`` tokens; the number of packs divides by ``n_ranks``.

    Rollouts of a group stay together as far as the budget allows, so that a shared prompt can be computed once. Packs
    are filled largest unit first, each unit into the fullest pack it fits, and come ordered by size, largest first:
    dealt out in turn, the packs that ranks run at the same time are of like size. The result depends on the arguments
    only. Missing packs are made by halving the largest one, and are empty when none can be halved.
    """
    sizes: list[int] = []
    packs: list[list[int]] = []
    for unit in sorted(_units(lengths, groups, budget), key=lambda unit: (-sum(lengths[i] for i in unit), unit[0])):
        size = sum(lengths[i] for i in unit)
        fitting = [p for p, used in enumerate(sizes) if used + size <= budget]
        if fitting:
            p = max(fitting, key=lambda p: (sizes[p], -p))
            packs[p] += unit
            sizes[p] += size
        else:
            packs.append(list(unit))
            sizes.append(size)
    while len(packs) % n_ranks:
        divisible = [p for p, members in enumerate(packs) if len(members) > 1]
        if not divisible:
            packs.append([])
            continue
        largest = max(divisible, key=lambda p: (sum(lengths[i] for i in packs[p]), -p))
        packs += _halves(packs.pop(largest), lengths)
    ordered = sorted(packs, key=lambda members: (-sum(lengths[i] for i in members), members))
    return [tuple(sorted(members)) for members in ordered]


def _units(lengths: Sequence[int], groups: Sequence[int], budget: int) -> list[list[int]]:
    """The groups, each cut in order where the budget ends."""
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    units: list[list[int]] = []
    for group_members in members.values():
        room = 0
        for i in group_members:
            if lengths[i] > room:
                units.append([])
                room = budget
            units[-1].append(i)
            room -= lengths[i]
    return units


def _halves(members: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """Two packs, neither empty, the first with about half of the tokens."""
    total, used, cut = sum(lengths[i] for i in members), 0, 0
    while cut < len(members) - 1 and (cut == 0 or 2 * used < total):
        used += lengths[members[cut]]
        cut += 1
    return [members[:cut], members[cut:]]


def _gather(batch: TrainingBatch, rollouts: list[int], counts: BatchCounts, *, filler: bool) -> MicroBatch:
    part = batch.select(rollouts)
    assert part.advantages_N is not None
    if filler:
        part = part.with_advantages(part.advantages_N, kept_R=torch.zeros_like(part.group_ids_R, dtype=torch.bool))
    assert part.advantages_N is not None
    trained_L = part.loss_mask_N.nonzero().squeeze(1)
    place_N = torch.arange(part.input_ids_N.numel(), device=trained_L.device)
    return MicroBatch(
        rollouts=tuple(rollouts),
        input_ids_N=part.input_ids_N,
        positions_N=place_N - part.cu_tokens_R1[part.rollout_N],
        cu_tokens_R1=part.cu_tokens_R1,
        longest=int(part.cu_tokens_R1.diff().max()),
        rows_L=trained_L - 1,
        targets_L=part.input_ids_N[trained_L],
        old_logprobs_L=part.old_logprobs_N[trained_L],
        sampler_logprobs_L=part.sampler_logprobs_N[trained_L],
        advantages_L=part.advantages_N[trained_L],
        cu_trained_R1=offsets(part.trained_tokens_R),
        counts=counts,
        temperature=part.temperature,
    )
