"""The result of scoring one rollout; the hand-over from the engine to credit, files and reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trace_fast.errors import RolloutError


@dataclass(frozen=True, slots=True, eq=False)
class RolloutScore:
    """Gold-answer log-probabilities of one rollout at each of its S states, natural log (nats).

    Args:
        id, group, source, n_turns, boundaries, reward, extra: as in the ``Rollout``.
        mean_logprobs: ``(S,) float64`` the state's score l-bar_k (Eq. 5) after combining aliases; finite, <= 0.
        alias_mean_logprobs: ``(S, A) float64`` mean log-probability of every alias.
        alias: ``(S,) int64`` index of the best alias a state (the one reported).
        token_logprobs: S arrays ``(A_k,) float32``: the best alias's token log-probabilities.
        answer: text of the best alias at the last state, or ``None`` when answers came as ids.
        answer_ids: its token ids.
        trunk_logprobs: ``(N-1,) float32`` or ``None``: entry t is log p(input_ids[t+1] | input_ids[:t+1]) under
            the reference.
        written_logprobs: ``(W,) float32`` or ``None``: the same of the W tokens after the first that the policy wrote
            (``loss_mask``), in order.
        model: name and hash of the reference, ``"name@hash"``.

    Raises:
        RolloutError: kind ``non_finite`` when a log-probability is NaN, infinite or positive.
    """

    id: str
    group: str
    n_turns: int
    boundaries: np.ndarray
    mean_logprobs: np.ndarray
    alias_mean_logprobs: np.ndarray
    alias: np.ndarray
    token_logprobs: tuple[np.ndarray, ...]
    answer: str | None
    answer_ids: np.ndarray
    reward: float | None = None
    trunk_logprobs: np.ndarray | None = None
    written_logprobs: np.ndarray | None = None
    model: str = ""
    source: str = "<memory>"
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked = [("mean_logprobs", self.mean_logprobs), ("alias_mean_logprobs", self.alias_mean_logprobs)]
        checked += [("token_logprobs", t) for t in self.token_logprobs]
        given = (("trunk_logprobs", self.trunk_logprobs), ("written_logprobs", self.written_logprobs))
        checked += [(name, values) for name, values in given if values is not None]
        for name, values in checked:
            bad = ~(values <= 0) | np.isinf(values)  # NaN fails every comparison
            if bad.any():
                value = float(values[bad].flat[0])
                raise RolloutError(
                    "non_finite",
                    f"the model gave {name} = {value}; expected finite numbers <= 0. Check the weights, or score "
                    "in float32 if the model overflows in this dtype",
                    rollout_id=self.id,
                    source=self.source,
                )
