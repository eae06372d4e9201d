"""Which numbers count as right, so that a speed may be printed for them.

A method's mean error against float64 over the S states of a rollout may be as large as the yardstick's in the same
dtype, times what two samples of the same rounding noise differ by: the mean of S absolute normal errors has a relative
standard error of 0.76 / sqrt(S) (sqrt(pi/2 - 1)), the difference of two of them sqrt(2) times that, and two standard
errors are allowed. The yardstick is the naive pass where it ran, else the KV-cache baseline.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

YARDSTICKS = ("naive", "kv_cache")  # the first that ran


def allowed_mean_error(yardstick_errors_S: np.ndarray) -> float:
    """Bound (nats) on a method's mean absolute error."""
    states = len(yardstick_errors_S)
    return float(yardstick_errors_S.mean() * (1 + 2 * 2**0.5 * 0.76 / states**0.5))


def right(errors_S: np.ndarray, yardstick_errors_S: np.ndarray) -> bool:
    """Whether absolute errors are within the bound; NaN never is."""
    return bool(errors_S.mean() <= allowed_mean_error(yardstick_errors_S))


def yardstick_of(methods: Collection[str]) -> str:
    """The name of the method whose errors are the measure."""
    return next(name for name in YARDSTICKS if name in methods)
