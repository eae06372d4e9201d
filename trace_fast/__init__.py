"""Exact turn-level credit for agent rollouts, from gold-answer log-probabilities in one packed pass."""

from importlib.metadata import version

__version__ = version("trace-fast")
