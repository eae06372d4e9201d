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
        logprobs: ``(n,) float32`` log-probability (nats) of each id under the distribution it was sampled from; at
            temperature 0, which has no such distribution, that at temperature 1.
        finish: why it ended. error: what went wrong, for ``FinishReason.ERROR``.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    finish: FinishReason
    error: str | None = None


class Engine(Protocol):
    """Continues sequences; ``generate`` gives one generation a request, in order, and never raises for one of them."""

    def generate(self, requests: Sequence[Request]) -> list[Generation]: ...


def failed(reason: str) -> Generation:
    """A generation of nothing, for a reason."""
    return Generation(np.empty(0, np.int64), np.empty(0, np.float32), FinishReason.ERROR, reason)


def why_refused(request: Request, *, vocab_size: int | None = None, max_length: int | None = None) -> str | None:
    """Why no engine can serve a request, in words; ``None`` where one can.

    Args:
        vocab_size, max_length: of the model, where the engine knows them.
    """
    prompt = request.prompt_ids
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu" or not len(prompt):
        return f"prompt_ids: expected at least one id in one dimension, got {prompt.dtype} of shape {prompt.shape}"
    limit = 2**31 if vocab_size is None else vocab_size
    outside = (prompt < 0) | (prompt >= limit)
    if outside.any():
        at = int(outside.argmax())
        return f"prompt_ids[{at}]: expected a token id in 0..{limit - 1}, got {prompt[at]}"
    if max_length is not None and len(prompt) > max_length:
        return f"prompt_ids: expected at most {max_length} tokens, got {len(prompt)}"
    if request.max_new_tokens < 1:
        return f"max_new_tokens: expected at least 1, got {request.max_new_tokens}"
    if not 0 <= request.temperature < float("inf"):
        return f"temperature: expected a finite number >= 0, got {request.temperature}"
    if not 0 < request.top_p <= 1:
        return f"top_p: expected a number in (0, 1], got {request.top_p}"
    if request.seed < 0:
        return f"seed: expected an integer >= 0, got {request.seed}"
    return None
