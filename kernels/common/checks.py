"""Checks that several ops share: every error names the argument, what was expected and what came."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from trace_fast import native
from trace_fast.errors import ConfigError, TraceFastError

FLOATS = (torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
FACTORS = (1e-12, 1e12)  # of logits and scores: neither they nor their inverses leave float32 for numbers up to 1e26


def expect(ok: bool, op: str, what: str, expected: str, got: object) -> None:
    """Raises ``ConfigError`` unless ``ok``."""
    if not ok:
        raise ConfigError(f"{op}: {what}: expected {expected}, got {got}")


def check_factor(op: str, name: str, value: float | None, *, optional: bool) -> None:
    """A positive factor that float32 can divide by; ``None`` where it is ``optional``."""
    least, most = FACTORS
    ok = optional if value is None else isinstance(value, int | float) and least <= value <= most
    expect(ok, op, name, f"{'None or ' * optional}a number from {least:.0e} to {most:.0e}", value)


def check_form(
    name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], like: Tensor, length: int | None = None
) -> None:
    """Raises unless ``tensor`` is flat, of one of ``dtypes``, on ``like``'s device and ``length`` long (None: any)."""
    if not isinstance(tensor, Tensor):
        raise TraceFastError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.ndim != 1:
        raise TraceFastError(f"{name}: expected a flat tensor (1 dimension), got shape {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise TraceFastError(f"{name}: expected {' or '.join(str(d) for d in dtypes)}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise TraceFastError(f"{name}: expected a tensor on {like.device} like the others, got {tensor.device}")
    if length is not None and tensor.shape[0] != length:
        raise TraceFastError(f"{name}: expected {length} entries, got {tensor.shape[0]}")


def check_contiguous(**tensors: Tensor | None) -> None:
    """Raises unless every tensor is dense, which compiled code relies on."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise TraceFastError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def why_not_implementation(
    op: str, names: Sequence[str], name: str, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why implementation ``name`` of the package ``op`` cannot run tensors of this device and dtype here, if so.

    Imports ``{op}.{name}_impl``, which registers its custom op; ``reference`` runs everywhere.
    """
    if name not in names:
        return f"expected one of {', '.join(names)}, got {name!r}"
    if name == "reference":
        return None
    if name == "triton" and importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    reason: str | None = importlib.import_module(f"{op}.{name}_impl").why_not(device, dtype)
    return reason


def why_not_native(device: torch.device, dtype: torch.dtype) -> str | None:
    """The same for the elementwise C++ code (turn_credit, policy_loss)."""
    if device.type != "cpu":
        return f"the C++ code runs on the CPU, got {device}"
    if dtype not in FLOATS:
        return f"the C++ code takes float32 or float64, got {dtype}"
    state = native.status()
    return None if state.available else f"the native module is {state.reason}"
