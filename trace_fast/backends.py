"""The only place that chooses an implementation: what there is, what is chosen, and why the rest is not.

``auto`` may choose and says what and why; an explicit choice runs or raises. What an implementation can run, its op
says (``why_not``); which of those that can is taken, is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trace_fast.errors import ConfigError
from trace_fast.kernels import policy_loss, prefix_attention, token_logprob, turn_credit
from trace_fast.kernels.prefix_attention.native_impl import kernels as native_paths

# Ops and their implementations, most wanted first.
PREFERRED = {
    "prefix_attention": ("triton", "native", "torch", "reference"),
    "token_logprob": ("triton", "torch", "reference"),
    "turn_credit": ("cuda", "triton", "native", "reference"),
    "policy_loss": ("triton", "native", "reference"),
}
SCORING = ("prefix_attention", "token_logprob")
FORWARD_ONLY = {"prefix_attention": ("torch",)}
WHAT = {
    "cuda": "CUDA C++ kernels",
    "triton": "fused Triton kernels",
    "native": "C++ kernels for this processor",
    "torch": "tiles on torch's own kernels",
    "reference": "plain torch operations; the oracle of the others",
}
CHOICES = ("triton", "native", "torch", "reference")  # for scoring
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Backends:
    """The implementation of each scoring op, and the reason of the choice."""

    prefix_attention: str
    token_logprob: str
    reason: str

    def arithmetic(self, dtype: torch.dtype) -> str:
        """What decides the last bits: the implementations, and the code path where one has several."""
        path = f" ({native_paths(dtype)[0]})" if self.prefix_attention == "native" else ""
        return f"{self.prefix_attention}{path}, {self.token_logprob}"


@dataclass(frozen=True)
class BackendStatus:
    """One implementation of one op on this machine."""

    op: str
    name: str
    available: bool
    chosen: bool
    reason: str


def resolve(
    requested: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dtype: torch.dtype | None = None,
    head_dim: int | None = None,
    training: bool = False,
) -> Backends:
    """Chooses implementations for a model's tensors.

    Args:
        training: only those that have a gradient.
        head_dtype: of the language-model head, where it is another. head_dim: of its attention.
        requested: ``"auto"`` or a name of ``CHOICES``. An op that has no implementation of the name asked for
            (``token_logprob`` has no ``native`` one) takes what ``auto`` would.

    Raises:
        ConfigError: an unknown name, or one that cannot run here; the message says why.
    """
    if requested != "auto" and requested not in CHOICES:
        raise ConfigError(f"backend: expected auto, {', '.join(CHOICES)}, got {requested!r}")
    chosen, notes = {}, []
    for op in SCORING:
        if requested in PREFERRED[op]:
            reason = _why_not(op, requested, device, dtype, head_dtype, head_dim, training)
            if reason is not None:
                raise ConfigError(f"backend: {requested!r} was asked for, but for {op} {reason}")
            chosen[op] = requested
        else:
            chosen[op], reasons = _first(op, device, dtype, head_dtype, head_dim, training)
            notes += [f"{op} not {name}: {reason}" for name, reason in reasons.items() if reason is not None]
    how = "chosen explicitly" if requested != "auto" else f"auto: the fastest that runs on {device.type}"
    return Backends(**chosen, reason="; ".join([how, *notes]))


def fastest(op: str, device: torch.device, dtype: torch.dtype) -> str:
    """Name of the implementation of an op that ``auto`` takes for such tensors."""
    return _first(op, device, dtype)[0]


def probe(device: torch.device | None = None, dtype: torch.dtype = torch.bfloat16) -> list[BackendStatus]:
    """Every implementation of every op, with the reason for those that ``auto`` does not choose.

    For tensors of ``dtype`` on ``device`` (the best there is by default); credit and loss are float32.
    """
    device = device or pick_device("auto")
    rows = []
    for op in PREFERRED:
        taken, reasons = _first(op, device, dtype if op in SCORING else torch.float32)
        for name, reason in reasons.items():
            why = reason or (WHAT[name] if name == taken else f"not chosen ({taken} is faster): {WHAT[name]}")
            rows.append(BackendStatus(op, name, available=reason is None, chosen=name == taken, reason=why))
    return rows


def _first(
    op: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dtype: torch.dtype | None = None,
    head_dim: int | None = None,
    training: bool = False,
) -> tuple[str, dict[str, str | None]]:
    """The most wanted implementation that runs, and of each one the reason why it does not."""
    reasons = {name: _why_not(op, name, device, dtype, head_dtype, head_dim, training) for name in PREFERRED[op]}
    return next(name for name, reason in reasons.items() if reason is None), reasons


def _why_not(
    op: str,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dtype: torch.dtype | None,
    head_dim: int | None,
    training: bool = False,
) -> str | None:
    if training and name in FORWARD_ONLY.get(op, ()):
        return "it has no gradient"
    if op == "token_logprob":
        return token_logprob.why_not(name, device=device, dtype=dtype, weight_dtype=head_dtype)
    if op == "prefix_attention":
        return prefix_attention.why_not(name, device=device, dtype=dtype, head_dim=head_dim)
    ops = {"turn_credit": turn_credit, "policy_loss": policy_loss}
    return ops[op].why_not(name, device=device, dtype=dtype)


def dtype_of(name: str) -> torch.dtype:
    """Raises ConfigError for a name outside ``DTYPES``."""
    if name not in DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


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
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.index is not None and device.index >= count:
        raise ConfigError(f"device: {requested!r} was asked for, but there is {count} of that type")
    return device
