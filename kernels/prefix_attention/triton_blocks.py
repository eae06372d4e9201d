"""Pieces that the Triton kernels of prefix_attention share: loads of a block, logits, visibility.

Shapes: N rows, H query heads, K key heads, D head dim; ``[M, D]`` etc. are the blocks of one program, M = row-head
pairs of a query tile (BLOCK_M), n = key rows of a block (BLOCK_N). Logits are kept as ``(value, unit)``: the exponent
of base 2 is ``value * unit``, so that scale and log2(e) cost one multiplication that fuses with the subtraction of the
running maximum. Addresses are 64-bit: rows times stride passes 2^31 elements from some 60k rows of 32 heads on.
"""

# mypy: disable-error-code="no-untyped-def"
# device code: its arguments are pointers and numbers of the machine, not Python's

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_keys(
    source,  # pointer to (N, K, D), or a descriptor of its (K, N, D) view with blocks (1, BLOCK, BLOCK_D)
    start,
    head,
    n_rows,
    row_stride,
    head_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
):
    """``[BLOCK, BLOCK_D]`` rows ``start..`` of one key head; zeros past the last row and past D."""
    if TMA:
        block = tl.reshape(source.load([head, start, 0]), [BLOCK, BLOCK_D])
    else:
        row = start + tl.arange(0, BLOCK)
        dim = tl.arange(0, BLOCK_D)
        address = row.to(tl.int64)[:, None] * row_stride + head.to(tl.int64) * head_stride + dim[None, :]
        block = tl.load(source + address, mask=(row < n_rows)[:, None] & (dim < D)[None, :], other=0.0)
    return block


@triton.jit
def load_queries(source, row, head, used, row_stride, head_stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """``[M, BLOCK_D]`` of the row-head pairs ``row[M], head[M]``; zeros where not ``used`` and past D."""
    dim = tl.arange(0, BLOCK_D)
    address = row.to(tl.int64)[:, None] * row_stride + head.to(tl.int64)[:, None] * head_stride + dim[None, :]
    return tl.load(source + address, mask=used[:, None] & (dim < D)[None, :], other=0.0)


@triton.jit
def tanh(x, ACCURATE: tl.constexpr):
    """tanh from one exponential. Near 0 the quotient cancels to 1e-7 absolute; ACCURATE puts its series there."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    y = tl.where(x < 0, -far, far)
    if ACCURATE:
        xx = x * x
        near = x * (1.0 + xx * (-1 / 3 + xx * (2 / 15 + xx * (-17 / 315 + xx * (62 / 2835)))))
        y = tl.where(tl.abs(x) < 0.25, near, y)
    return y


@triton.jit
def logits(products, scale, softcap, SOFTCAP: tl.constexpr, ACCURATE: tl.constexpr):
    """``(value, unit)`` of ``softcap * tanh(scale * products / softcap)``, or of ``scale * products``."""
    if SOFTCAP:
        value = tanh(products * (scale / softcap), ACCURATE)
        unit = softcap * LOG2E
    else:
        value = products
        unit = scale * LOG2E
    return value, unit


@triton.jit
def tainted_rows(block):
    """``[n]`` 0 where every element of the row is finite, else NaN: x * 0 is exact."""
    return tl.sum(block.to(tl.float32) * 0.0, 1)
