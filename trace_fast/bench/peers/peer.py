"""What every peer is given and what it offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from trace_fast.errors import TraceFastError
from trace_fast.model_spec import ModelSpec
from trace_fast.rollout import Rollout


class PeerError(TraceFastError):
    """A peer could not score a rollout (its server answered otherwise than its protocol says, ...)."""


@dataclass(frozen=True)
class PeerSetup:
    """What the peers of one run are given.

    Args:
        module: the reference model in the dtype and on the device of the run.
        spec: its sizes.
        model: how the user named it (a path to a GGUF file, where llama.cpp is to read the same one).
        endpoints: base URLs by name of the peer.
    """

    module: PreTrainedModel
    spec: ModelSpec
    model: str
    endpoints: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return _device(self.module)

    def has_windows(self) -> bool:
        """Whether some layer sees less than all tokens before it: a mask that is handed over replaces the window."""
        return any(window is not None for window in self.spec.layer_windows)


class Peer(ABC):
    """A way to score rollouts. ``own_memory`` says whether its memory is this process's (and can be measured)."""

    own_memory = True

    def prepare(self) -> None:  # noqa: B027 - most have nothing to drop
        """Called before every timed call, not timed: drops what an earlier call left in a cache."""

    @abstractmethod
    def score(self, rollout: Rollout) -> np.ndarray:
        """``(S,) float64`` mean log-probability (nats) of the first gold answer at every state."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Gives back what ``open_peer`` took."""


class ModulePeer(Peer):
    """A function of the model that is already loaded."""

    def __init__(
        self, module: PreTrainedModel, function: Callable[[PreTrainedModel, Rollout], np.ndarray]
    ) -> None:
        self._module, self._function = module, function

    def score(self, rollout: Rollout) -> np.ndarray:
        with torch.no_grad():
            return self._function(self._module, rollout)


def branch(rollout: Rollout, state: int) -> np.ndarray:
    """What a state adds to its prefix: the opener and the answer without its last token, which predicts nothing."""
    return np.concatenate([rollout.openers[state], rollout.answers[0][:-1]])


def mean_logprob(logits_AV: torch.Tensor, answer_A: np.ndarray) -> float:
    """Mean log-probability of an answer from the logits of its rows; log-softmax in at least float32."""
    logits_AV = logits_AV if logits_AV.dtype == torch.float64 else logits_AV.float()
    targets = torch.as_tensor(answer_A, device=logits_AV.device)[:, None]
    return float(torch.log_softmax(logits_AV, -1).gather(1, targets).double().mean())


def on(module: PreTrainedModel, ids: np.ndarray) -> torch.Tensor:
    """Ids as the batch of one sequence, where the model's embedding lies."""
    return torch.as_tensor(ids, device=_device(module))[None]


def _device(module: PreTrainedModel) -> torch.device:
    weight = module.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.device
