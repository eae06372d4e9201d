"""The only place that chooses an implementation: what there is, what is chosen, and why the rest is not.

``auto`` may choose and says what and why; an explicit choice runs or raises.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trace_fast.errors import ConfigError

OPS = ("prefix_attention", "token_logprob", "turn_credit")
CHOICES = {
    "torch": "tiles on torch's own kernels; forward only; bit-equal in any pack",
    "reference": "eager oracle; materialises scores and logits; for checks",
}


@dataclass(frozen=True)
class Backends:
    """The implementation of each scoring op, and the reason of the choice."""

    prefix_attention: str
    token_logprob: str
    reason: str


@dataclass(frozen=True)
class BackendStatus:
    """One implementation of one op on this machine."""

    op: str
    name: str
    available: bool
    chosen: bool
    reason: str


def resolve(requested: str, device: torch.device) -> Backends:
    """Chooses implementations for a device.

    Args:
        requested: ``"auto"`` or a name of ``CHOICES``.

    Raises:
        ConfigError: an unknown name; the message lists the known ones.
    """
    if requested == "auto":
        tiles = "flash tiles" if device.type == "cpu" else "eager tiles: torch has no exact fused kernel there"
        return Backends("torch", "torch", f"auto: the fastest implementation for {device.type} ({tiles})")
    if requested not in CHOICES:
        raise ConfigError(f"backend: expected auto, {' or '.join(CHOICES)}, got {requested!r}")
    return Backends(requested, requested, "chosen explicitly")


def probe() -> list[BackendStatus]:
    """Every implementation of every op, with the reason for those that ``auto`` does not choose here."""
    rows = []
    for op in OPS:
        for name, what in CHOICES.items():
            if op == "turn_credit" and name == "torch":
                continue  # its eager form is vectorised already: one implementation serves both
            chosen = name == "torch" or op == "turn_credit"
            reason = what if chosen else f"not chosen: {what}"
            if op == "turn_credit":
                reason = "vectorised over all turns of all rollouts, on any device"
            rows.append(BackendStatus(op, name, available=True, chosen=chosen, reason=reason))
    return rows


def pick_device(requested: str) -> torch.device:
    """``"auto"`` is CUDA when there is one, else the CPU. Raises ConfigError for a device that is not there."""
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {requested!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: {requested!r} was asked for, but torch {torch.__version__} sees no CUDA device")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {requested!r}")
    return device
