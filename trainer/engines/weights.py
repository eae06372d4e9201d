"""Engines whose weights follow a policy in training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from trace_fast.trainer.engines.engine import Engine


class TrainableEngine(Engine, Protocol):
    """An engine that takes new weights between two calls of ``generate``."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Every parameter in full, by the model's own names; the whole of ``weights`` is consumed.

        Args:
            version: number of the policy that these are the weights of.
        """
        ...
