"""The frozen reference of a run: its scores of rollouts, where it lies between the scoring phases, and its hash.

It is loaded from disk at every start and never from a checkpoint, so training and resuming cannot move it; a checkpoint
keeps its hash, and a run refuses to go on with another reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from trace_fast.errors import RolloutError
from trace_fast.rollout import Rollout
from trace_fast.rollout_score import RolloutScore
from trace_fast.scorer import Scorer
from trace_fast.trainer.config import ReferenceConfig


@dataclass(frozen=True, slots=True)
class Scored:
    """What the reference could score: ``scores[i]`` belongs to ``rollouts[i]``; the rest is in ``errors``."""

    rollouts: list[Rollout]
    scores: list[RolloutScore]
    errors: list[RolloutError]

    def complete_groups(self, given: Sequence[Rollout]) -> Scored:
        """Without the groups of which a rollout of ``given`` has no score."""
        whole = Counter(rollout.group for rollout in given)
        whole.subtract(rollout.group for rollout in self.rollouts)
        kept = [i for i, rollout in enumerate(self.rollouts) if not whole[rollout.group]]
        return Scored([self.rollouts[i] for i in kept], [self.scores[i] for i in kept], self.errors)


class FrozenReference(Protocol):
    """What a run asks for scores: ``Reference`` in this process, ``RemoteReference`` in another."""

    @property
    def hash(self) -> str:
        """``name@hash`` of weights, config and tokenizer."""
        ...

    def score(self, rollouts: Sequence[Rollout]) -> Scored:
        """Scores of all states, and with ``kl`` of the written tokens; a rollout that cannot be scored is left out."""
        ...


class Reference:
    """A scorer that may live on the host while the policy trains."""

    def __init__(self, scorer: Scorer, config: ReferenceConfig, device: torch.device) -> None:
        self._scorer = scorer
        self._config = config
        self._device = device
        self._rest()

    @classmethod
    def load(cls, path: str, config: ReferenceConfig, device: torch.device) -> Reference:
        """Raises ConfigError, ModelError as ``Scorer.from_pretrained``."""
        scorer = Scorer.from_pretrained(
            path,
            dtype=config.dtype,
            device=str(device),
            backend=config.backend,
            alias=config.alias,
            max_tokens_per_pack=config.max_tokens_per_pack,
        )
        return cls(scorer, config, device)

    @property
    def hash(self) -> str:
        """``name@hash`` of weights, config and tokenizer."""
        return self._scorer.reference

    def score(self, rollouts: Sequence[Rollout]) -> Scored:
        """Scores of all states, and with ``kl`` of the written tokens; a rollout that cannot be scored is left out."""
        errors: list[RolloutError] = []
        module = self._scorer.model.module
        torch.nn.Module.to(module, self._device)
        by_name = {(rollout.group, rollout.id): rollout for rollout in rollouts}
        scores = self._scorer.score(rollouts, written_logprobs=self._config.kl, errors=errors.append)
        self._rest()
        return Scored([by_name[score.group, score.id] for score in scores], scores, errors)

    def _rest(self) -> None:
        if self._config.placement == "offload":
            torch.nn.Module.to(self._scorer.model.module, torch.device("cpu"))


def reference_kl(rollouts: Sequence[Rollout], scores: Sequence[RolloutScore]) -> float | None:
    """Mean over the policy's tokens of log p_sampler - log p_reference, in nats: an estimate of the divergence of the
    policy (at the sampling temperature) from the reference. ``None`` where the scores hold no token's."""
    differences = []
    for rollout, score in zip(rollouts, scores, strict=True):
        if score.written_logprobs is None or rollout.logprobs is None or rollout.loss_mask is None:
            return None
        sampled = rollout.logprobs[1:][rollout.loss_mask[1:]]
        differences.append(sampled.astype(np.float64) - score.written_logprobs)
    every = np.concatenate(differences) if differences else np.empty(0)
    return float(every.mean()) if every.size else None
