"""Makes a model's rows independent of their company, bit for bit: a mode around a forward pass.

The same rollout must get the same numbers alone and in any pack. Torch promises no such thing: a matrix product
may round a row differently when it has another number of neighbours, and a vectorised transcendental function
rounds the odd elements at the end of a thread's share with another routine. Inside ``FixedRowBlocks`` every
product with a weight matrix is done in blocks of a fixed number of rows, and the elementwise functions in question
in shares without odd ends. Nothing of the model is changed; the mode ends with the ``with`` block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

ROW_BLOCK = 256  # rows a product; packs are padded to a multiple
GRAIN = 32768  # elements that ATen gives one thread at least
SHARE = 16384  # elements that no function here splits among threads (gelu is the first to), whole vectors
VECTOR = 64  # elements; ATen's loops take at most two 512-bit vectors of 16-bit numbers a step

_LINEAR = {F.linear}
_MATMUL = {torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__}
_ADDMM = {torch.addmm}
_ELEMENTWISE = {
    F.silu, F.gelu, F.sigmoid, F.tanh, F.softplus, F.mish, F.logsigmoid, torch.erf, torch.Tensor.erf,
    torch.sigmoid, torch.Tensor.sigmoid, torch.tanh, torch.Tensor.tanh, torch.exp, torch.Tensor.exp,
    torch.cos, torch.Tensor.cos, torch.sin, torch.Tensor.sin,
}  # fmt: skip


class FixedRowBlocks(TorchFunctionMode):
    """Context manager; see the module. ``rows`` is the block size."""

    def __init__(self, rows: int = ROW_BLOCK) -> None:
        super().__init__()
        self.rows = rows

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not args:  # everything by keyword: no model of transformers calls these functions so
            return func(**kwargs)
        if func in _LINEAR:
            plain = not kwargs and len(args) > 1 and all(bias is None for bias in args[2:])
            if plain and args[0].shape[:-1].numel() % self.rows == 0:
                return self._linear(args[0], args[1])
            return self._by_rows(func, args[0], args[1:], kwargs)
        if (
            func in _MATMUL
            and len(args) > 1
            and isinstance(args[1], torch.Tensor)
            and args[1].ndim == 2
            and args[0].ndim >= 2
        ):
            return self._by_rows(func, args[0], args[1:], kwargs)
        if func in _ADDMM and len(args) > 2 and args[1].ndim == 2 and args[0].ndim == 1:
            bias, rows, weight = args[:3]
            return self._by_rows(lambda x, *a, **k: func(bias, x, *a, **k), rows, (weight, *args[3:]), kwargs)
        if func in _ELEMENTWISE and isinstance(args[0], torch.Tensor) and _has_odd_ends(args[0]):
            return _by_shares(func, args[0], args[1:], kwargs)
        return func(*args, **kwargs)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The bulk of a model, straight into its output: whole blocks, no bias."""
        flat = x.reshape(-1, x.shape[-1])
        out = x.new_empty(len(flat), len(weight))
        for first in range(0, len(flat), self.rows):
            torch.mm(flat[first : first + self.rows], weight.t(), out=out[first : first + self.rows])
        return out.reshape(*x.shape[:-1], len(weight))

    def _by_rows(
        self, func: Callable[..., torch.Tensor], x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        count = len(flat)
        if count == self.rows:
            return func(x, *args, **kwargs)
        out: torch.Tensor | None = None
        for first in range(0, count, self.rows):
            block = flat[first : first + self.rows]
            if len(block) < self.rows:
                block = F.pad(block, (0, 0, 0, self.rows - len(block)))
            result = func(block, *args, **kwargs)
            if out is None:
                out = result.new_empty(count, result.shape[-1])
            out[first : first + self.rows] = result[: count - first]
        if out is None:
            return func(x, *args, **kwargs)
        return out.reshape(*x.shape[:-1], out.shape[-1])


def _has_odd_ends(x: torch.Tensor) -> bool:
    """Whether ATen would split ``x`` among threads at places that are no multiple of its vector width."""
    if x.device.type != "cpu" or not x.is_floating_point():
        return False
    threads = torch.get_num_threads()
    splits = {max(1, min(threads, -(-x.numel() // GRAIN))), threads if x.numel() > SHARE else 1}  # most functions, gelu
    return not x.is_contiguous() or x.numel() % VECTOR != 0 or any(-(-x.numel() // n) % VECTOR != 0 for n in splits)


def _by_shares(
    func: Callable[..., torch.Tensor], x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    flat = x.reshape(-1)
    out = torch.empty_like(flat)
    for first in range(0, len(flat), SHARE):
        share = flat[first : first + SHARE]
        odd = -len(share) % VECTOR
        result = func(F.pad(share, (0, odd)) if odd else share, *args, **kwargs)
        out[first : first + SHARE] = result[: len(share)]
    return out.reshape(x.shape)
