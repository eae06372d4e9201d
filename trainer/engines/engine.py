"""What a rollout engine is: token ids in, token ids and the sampler's log-probabilities out.

An engine continues many sequences at once. Ids are never decoded and encoded again on the way, and the
log-probabilities are those of the distribution that was sampled from (temperature and top-p applied), since importance
weights of a policy update divide by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"  # an id of ``stop_ids`` was written (it is the last id)
    LENGTH = "length"  # ``max_new_tokens`` were written, or the context is full
    ERROR = "error"  # the engine failed or ran out of time for this request; ids so far may be empty


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue.

    Args:
        prompt_ids: ``(L,) int64`` all ids before the continuation.
        max_new_tokens: at least 1.
        stop_ids: ids that end the generation; kept in the output.
        temperature: 0 is greedy. top_p: in (0, 1].
        seed: of this request alone: the same request and seed give the same ids in any company.
    """

    prompt_ids: np.ndarray
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """A continuation.

    Args:
        ids: ``(n,) int64``.
        logprobs: ``(n,) float32`` log-probability (nats) of each id under the distribution it was sampled from.
        finish: why it ended. error: what went wrong, for ``FinishReason.ERROR``.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    finish: FinishReason
    error: str | None = None


class Engine(Protocol):
    """Continues sequences; ``generate`` gives one generation a request, in order, and never raises for one of them."""

    def generate(self, requests: Sequence[Request]) -> list[Generation]: ...
