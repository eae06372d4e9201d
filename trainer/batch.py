"""The rollouts of one training step as flat tensors: what the algorithms, the micro-batches and the loss read.

All rollouts lie one behind the other; ``cu_`` tensors hold R+1 int32 offsets. A rollout of T tool turns has T+1
*actions*: what the policy wrote in turn 0..T-1, then its answer (or whatever a cut-off rollout wrote after its last
observation; that action may be empty). Log-probabilities are in nats; entry i is that of token i given all tokens
before it in its rollout.

A token is trained where the policy wrote it, by the rollout's ``loss_mask``, and where it lies behind the prompt:
earlier assistant turns that are part of a prompt are history and never trained. Everywhere else log-probabilities and
advantages are exactly 0.

Suffixes: N tokens, R rollouts, R1 = R+1, S states (T+1 or T+2 a rollout), A actions (T+1 a rollout), all of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trace_fast.errors import ConfigError, RolloutError, TraceFastError
from trace_fast.kernels.turn_credit.segments import offsets, segment_index
from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """The rollouts of whole prompt groups; made by ``training_batch``. Floats have one dtype, float32 or float64.

    Args:
        ids: R names of the rollouts, for messages and dumps.
        input_ids_N: ``int64``.
        loss_mask_N: ``bool`` tokens that are trained.
        sampler_logprobs_N: of the engine that sampled the tokens, under the distribution it sampled from.
        old_logprobs_N: under the policy as it was when the batch began.
        token_turns_N: ``int64`` -1 prompt, k turn k, T answer.
        cu_tokens_R1, cu_states_R1: ``int32``.
        boundaries_S: ``int64`` token counts within the rollout.
        n_turns_R: ``int64`` T.
        rewards_R: outcome of the verifier.
        group_ids_R: ``int64`` number of the prompt group, in order of first appearance.
        observation_keys_A: ``int64`` number of what the policy saw just before each action; equal where two actions
            of one prompt group answer the identical observation, and never across groups.
        mean_logprobs_S: the reference's score of each state, <= 0; ``None`` where nothing was scored.
        advantages_N: set by ``with_advantages``.
        temperature: of sampling; the logits of the policy in training are divided by it too.
    """

    ids: tuple[str, ...]
    input_ids_N: Tensor
    loss_mask_N: Tensor
    sampler_logprobs_N: Tensor
    old_logprobs_N: Tensor
    token_turns_N: Tensor
    cu_tokens_R1: Tensor
    boundaries_S: Tensor
    cu_states_R1: Tensor
    n_turns_R: Tensor
    rewards_R: Tensor
    group_ids_R: Tensor
    observation_keys_A: Tensor
    mean_logprobs_S: Tensor | None = None
    advantages_N: Tensor | None = None
    temperature: float = 1.0

    @property
    def n_rollouts(self) -> int:
        """R."""
        return len(self.ids)

    @property
    def rollout_N(self) -> Tensor:
        """``(N,) int64`` rollout of each token."""
        return segment_index(self.cu_tokens_R1.diff(), self.input_ids_N.numel())

    @property
    def rollout_A(self) -> Tensor:
        """``(A,) int64`` rollout of each action."""
        return segment_index(self.n_turns_R + 1, self.observation_keys_A.numel())

    @property
    def action_N(self) -> Tensor:
        """``(N,) int64`` action (0..A-1) that each trained token belongs to; -1 where none is trained."""
        cu_actions_R1 = offsets(self.n_turns_R + 1)
        return torch.where(self.loss_mask_N, cu_actions_R1[self.rollout_N] + self.token_turns_N, -1)

    @property
    def trained_tokens_R(self) -> Tensor:
        """``(R,) int64`` trained tokens of each rollout."""
        counts_R = torch.zeros_like(self.group_ids_R)
        return counts_R.index_add_(0, self.rollout_N, self.loss_mask_N.long())

    def select(self, rollouts: Sequence[int]) -> TrainingBatch:
        """Some of the rollouts, in this order, for one optimiser step or one micro-batch.

        Advantages stay those of the whole batch; where they are still to come, take whole groups.
        """
        chosen_R = torch.tensor(rollouts, dtype=torch.int64, device=self.input_ids_N.device)
        places = {
            "R": chosen_R,
            "N": _places(self.cu_tokens_R1, chosen_R),
            "S": _places(self.cu_states_R1, chosen_R),
            "A": _places(offsets(self.n_turns_R + 1), chosen_R),
        }
        flat = {f.name: getattr(self, f.name) for f in fields(self) if f.name.rpartition("_")[2] in places}
        return replace(
            self,
            ids=tuple(self.ids[r] for r in rollouts),
            cu_tokens_R1=offsets(self.cu_tokens_R1.diff()[chosen_R]),
            cu_states_R1=offsets(self.cu_states_R1.diff()[chosen_R]),
            **{k: v[places[k.rpartition("_")[2]]] for k, v in flat.items() if v is not None},
        )

    def to(self, device: torch.device | str) -> TrainingBatch:
        """The same batch on ``device``."""
        own: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in own.items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def with_old_logprobs(self, old_logprobs_N: Tensor) -> TrainingBatch:
        """With the log-probabilities that the policy itself, not the sampler, gives before its update.

        Raises:
            TraceFastError: not one number a token, or at a trained token not a finite number <= 0.
        """
        return replace(self, old_logprobs_N=self._per_token("old_logprobs_N", old_logprobs_N, at_most_0=True))

    def with_advantages(self, advantages_N: Tensor, kept_R: Tensor | None = None) -> TrainingBatch:
        """With the advantages of an algorithm. Rollouts where ``kept_R`` is False are not trained, and not counted.

        Raises:
            TraceFastError: not one number a token, or at a trained token not a finite number.
        """
        advantages_N = self._per_token("advantages_N", advantages_N)
        if kept_R is None:
            return replace(self, advantages_N=advantages_N)
        mask_N = self.loss_mask_N & kept_R[self.rollout_N]
        return replace(
            self,
            loss_mask_N=mask_N,
            sampler_logprobs_N=torch.where(mask_N, self.sampler_logprobs_N, 0.0),
            old_logprobs_N=torch.where(mask_N, self.old_logprobs_N, 0.0),
            advantages_N=torch.where(mask_N, advantages_N, 0.0),
        )

    def _per_token(self, name: str, values_N: Tensor, *, at_most_0: bool = False) -> Tensor:
        """``values_N`` with 0 where nothing is trained."""
        like = self.sampler_logprobs_N
        if values_N.shape != like.shape:
            raise TraceFastError(
                f"{name}: expected shape {tuple(like.shape)} (one number a token), got {tuple(values_N.shape)}"
            )
        values_N = values_N.detach().to(like)
        bad_N = self.loss_mask_N & (~values_N.isfinite() | (at_most_0 & (values_N > 0)))
        if bad_N.any():
            i = int(bad_N.to(torch.uint8).argmax())
            r = int(self.rollout_N[i])
            raise TraceFastError(
                f"{name}: expected finite numbers{' <= 0' if at_most_0 else ''} at trained tokens, got {values_N[i]} "
                f"at token {i - int(self.cu_tokens_R1[r])} of rollout {self.ids[r]!r}"
            )
        return torch.where(self.loss_mask_N, values_N, 0.0)


def training_batch(
    rollouts: Sequence[Rollout],
    scores: Sequence[RolloutScore] | None = None,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    observation_keys: Sequence[Sequence[Hashable]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> TrainingBatch:
    """Puts rollouts together, on the CPU. The old log-probabilities are the sampler's until ``with_old_logprobs``.

    Give whole prompt groups, all that are trained in the step and nothing else: advantages are relative to the group's
    rollouts here. Groups may differ in size; a rollout that failed is left out by the caller.

    Args:
        rollouts: with ``loss_mask``, ``logprobs`` and ``reward``; ids are different within a group.
        scores: of the same rollouts in the same order, for TRACE.
        temperature, top_p: that the tokens were sampled with.
        observation_keys: T+1 a rollout, equal where two observations count as the same. By default an observation is
            its tokens: the prompt, then in each turn what the policy did not write.

    Raises:
        RolloutError: a rollout lacks what training needs, its chat template rewrites history, or a log-probability at
            a trained token is not a finite number <= 0; it names the rollout.
        TraceFastError: no rollout, one given twice, scores or keys of other rollouts, 2^31 tokens or more.
        ConfigError: ``temperature`` or ``top_p`` with which sampled tokens cannot be trained exactly.
    """
    check_sampling(temperature, top_p)
    _check_rollouts(rollouts, scores)
    lengths = [len(rollout.input_ids) for rollout in rollouts]
    if sum(lengths) >= 2**31:
        raise TraceFastError(f"rollouts: expected fewer than 2^31 tokens in one batch, got {sum(lengths)}")
    cu_tokens_R1 = offsets(torch.tensor(lengths))
    n_turns_R = torch.tensor([rollout.n_turns for rollout in rollouts])
    boundaries_S = torch.from_numpy(np.concatenate([rollout.boundaries for rollout in rollouts]))
    cu_states_R1 = offsets(torch.tensor([rollout.n_states for rollout in rollouts]))
    token_turns_N = torch.from_numpy(np.concatenate([rollout.token_turns() for rollout in rollouts]))
    loss_mask_N = torch.from_numpy(np.concatenate([_field(r, "loss_mask") for r in rollouts])) & (token_turns_N >= 0)
    logprobs_N = np.concatenate([_field(r, "logprobs") for r in rollouts])
    _check_trained(rollouts, loss_mask_N.numpy(), logprobs_N, cu_tokens_R1.numpy())
    sampler_logprobs_N = torch.where(loss_mask_N, torch.from_numpy(logprobs_N).to(dtype), 0.0)
    numbers: dict[str, int] = {}
    return TrainingBatch(
        ids=tuple(rollout.id for rollout in rollouts),
        input_ids_N=torch.from_numpy(np.concatenate([rollout.input_ids for rollout in rollouts])),
        loss_mask_N=loss_mask_N,
        sampler_logprobs_N=sampler_logprobs_N,
        old_logprobs_N=sampler_logprobs_N,
        token_turns_N=token_turns_N,
        cu_tokens_R1=cu_tokens_R1,
        boundaries_S=boundaries_S,
        cu_states_R1=cu_states_R1,
        n_turns_R=n_turns_R,
        rewards_R=torch.tensor([_field(rollout, "reward") for rollout in rollouts], dtype=dtype),
        group_ids_R=torch.tensor([numbers.setdefault(rollout.group, len(numbers)) for rollout in rollouts]),
        observation_keys_A=_observation_keys(rollouts, observation_keys),
        mean_logprobs_S=_mean_logprobs(scores, dtype),
        temperature=temperature,
    )


def _places(cu_R1: Tensor, chosen_R: Tensor) -> Tensor:
    """Places of all entries of the chosen rollouts, one rollout behind the other."""
    lengths_R = cu_R1.diff()[chosen_R].long()
    new_cu_R1 = offsets(lengths_R)
    moved = torch.repeat_interleave(cu_R1[chosen_R] - new_cu_R1[:-1], lengths_R)
    return torch.arange(moved.numel(), device=moved.device) + moved


def _observation_keys(rollouts: Sequence[Rollout], given: Sequence[Sequence[Hashable]] | None) -> Tensor:
    if given is not None and len(given) != len(rollouts):
        raise TraceFastError(f"observation_keys: expected {len(rollouts)} entries (one a rollout), got {len(given)}")
    numbers: dict[tuple[str, Hashable], int] = {}
    keys_A: list[int] = []
    for r, rollout in enumerate(rollouts):
        keys = _observations(rollout) if given is None else given[r]
        if len(keys) != rollout.n_turns + 1:
            raise TraceFastError(
                f"observation_keys[{r}]: expected {rollout.n_turns + 1} keys (one an action of rollout "
                f"{rollout.id!r}), got {len(keys)}"
            )
        keys_A += [numbers.setdefault((rollout.group, key), len(numbers)) for key in keys]
    return torch.tensor(keys_A)


def _observations(rollout: Rollout) -> list[bytes]:
    """What the policy saw before each action, as bytes: the prompt, then what it did not write in each turn."""
    seen = ~_field(rollout, "loss_mask")
    cuts = rollout.boundaries[: rollout.n_turns + 1].tolist()
    observed = [rollout.input_ids[a:b][seen[a:b]].tobytes() for a, b in pairwise(cuts)]
    return [rollout.input_ids[: cuts[0]].tobytes(), *observed]


def _mean_logprobs(scores: Sequence[RolloutScore] | None, dtype: torch.dtype) -> Tensor | None:
    if scores is None:
        return None
    return torch.from_numpy(np.concatenate([score.mean_logprobs for score in scores])).to(dtype)


def check_sampling(temperature: float, top_p: float) -> None:
    """Raises ConfigError where tokens that were sampled so cannot be trained on exactly."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(
            f"temperature: expected a positive number, got {temperature}; tokens chosen greedily have no "
            "sampling probability that a policy gradient could use"
        )
    if top_p != 1:
        raise ConfigError(
            f"top_p: expected 1 for rollouts that are trained on, got {top_p}; cutting the distribution rescales the "
            "sampler's probabilities, which biases every importance ratio. Use it for evaluation only"
        )


def _check_rollouts(rollouts: Sequence[Rollout], scores: Sequence[RolloutScore] | None) -> None:
    if not rollouts:
        raise TraceFastError("rollouts: expected at least one, got none")
    places: dict[tuple[str, str], int] = {}
    for r, rollout in enumerate(rollouts):
        first = places.setdefault((rollout.group, rollout.id), r)
        if first != r:
            raise TraceFastError(
                f"rollouts[{r}]: expected different ids within group {rollout.group!r}, got {rollout.id!r} again, as "
                f"at [{first}]; its reward would be counted repeatedly in the group's statistics"
            )
        for name in ("loss_mask", "logprobs", "reward"):
            _field(rollout, name)
    if scores is None:
        return
    if len(scores) != len(rollouts):
        raise TraceFastError(f"scores: expected {len(rollouts)} (one a rollout, in order), got {len(scores)}")
    for r, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
        for name in ("id", "group", "n_turns"):
            expected, got = getattr(rollout, name), getattr(score, name)
            if expected != got:
                raise TraceFastError(f"scores[{r}]: expected {name} {expected!r} of rollouts[{r}], got {got!r}")
        if not np.array_equal(score.boundaries, rollout.boundaries):
            raise TraceFastError(
                f"scores[{r}] ({rollout.id!r}): expected the rollout's boundaries {rollout.boundaries.tolist()}, got "
                f"{np.asarray(score.boundaries).tolist()}"
            )


def _check_trained(
    rollouts: Sequence[Rollout], loss_mask_N: np.ndarray, logprobs_N: np.ndarray, cu_tokens_R1: np.ndarray
) -> None:
    """Every trained token has a token before it, and a log-probability."""

    def refuse(bad_N: np.ndarray, expected: str, got: str) -> None:
        if bad_N.any():
            i = int(bad_N.argmax())
            r = int(np.searchsorted(cu_tokens_R1, i, side="right")) - 1
            reason = f"{expected}, got {got.format(logprobs_N[i])} at token {i - cu_tokens_R1[r]}"
            raise RolloutError("format", reason, rollout_id=rollouts[r].id, source=rollouts[r].source)

    first_N = np.zeros_like(loss_mask_N)
    first_N[cu_tokens_R1[:-1][np.diff(cu_tokens_R1) > 0]] = True
    refuse(loss_mask_N & first_N, "loss_mask: expected a token before the first trained one, to predict it", "True")
    no_logprob_N = ~(np.isfinite(logprobs_N) & (logprobs_N <= 0))
    refuse(loss_mask_N & no_logprob_N, "logprobs: expected finite numbers <= 0 at trained tokens", "{}")


def _field(rollout: Rollout, name: str) -> Any:
    """A field that rollouts may lack and training needs."""
    value = getattr(rollout, name)
    if value is None:
        raise RolloutError(
            "inexact",
            f"has no {name}; expected loss_mask, the sampler's logprobs and a reward in every rollout to train on",
            rollout_id=rollout.id,
            source=rollout.source,
        )
    return value
