"""Forward kernels of prefix_attention in Triton: online softmax over the plan's key blocks, and the merge of splits.

One program takes one work item (a query tile, or a part of its keys) and one key head. Its M row-head pairs are
TILE_ROWS rows times the GROUP query heads of that key head. With z the base-2 logits of a key block,

    m' = max(m, max z)    l' = l 2^(m - m') + sum 2^(z - m')    acc' = acc 2^(m - m') + 2^(z - m') v

and in the end out = acc / l, lse = ln2 (m + log2 l); a sink adds 2^(sink log2e - m) to l and nothing to acc. Sums are
float32; weights are rounded to the value's dtype for the second product.

A key that a row does not see has weight 0, but 0 * NaN would reach the row: edge blocks replace values that are not
finite by 0 and put NaN into the logits of the keys they belong to.
"""

# mypy: disable-error-code="no-untyped-def"
# device code: its arguments are pointers and numbers of the machine, not Python's

from __future__ import annotations

import triton
import triton.language as tl

from trace_fast.kernels.prefix_attention.triton_blocks import LN2, LOG2E, load_keys, load_queries, logits, tainted_rows


@triton.jit
def _attend(
    acc,
    m,
    total,
    q,
    key,
    value,
    start,
    low,
    high,
    head,
    n_rows,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    scale,
    softcap,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ACCURATE: tl.constexpr,
    TMA: tl.constexpr,
    EDGE: tl.constexpr,
):
    """One key block. EDGE: row i sees keys ``low[i]:high[i]`` of it, perhaps none; else all of them."""
    if EDGE:  # before the logits exist: these values pass through registers, and both would not fit
        v = load_keys(value, start, head, n_rows, value_row_stride, value_head_stride, DV, BLOCK_N, BLOCK_DV, TMA)
        taint = tainted_rows(v)
        v = tl.where((taint == 0.0)[:, None], v, 0.0).to(v.dtype)
    k = load_keys(key, start, head, n_rows, key_row_stride, key_head_stride, D, BLOCK_N, BLOCK_D, TMA)
    z, unit = logits(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, softcap, SOFTCAP, ACCURATE)
    if EDGE:
        keys = start + tl.arange(0, BLOCK_N)
        visible = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        z = tl.where(visible, z + taint[None, :], float("-inf"))
    m_new = tl.maximum(m, tl.max(z, 1) * unit)
    shift = m_new
    if EDGE:
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet: -inf - -inf is NaN
    p = tl.exp2(z * unit - shift[:, None])
    decay = tl.exp2(m - shift)
    total = total * decay + tl.sum(p, 1)
    if not EDGE:
        v = load_keys(value, start, head, n_rows, value_row_stride, value_head_stride, DV, BLOCK_N, BLOCK_DV, TMA)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, m_new, total


@triton.jit(do_not_specialize=["n_rows"])
def forward_kernel(
    query,
    key,
    value,
    sinks,
    out,
    lse,
    part_out,
    part_lse,
    items,
    tile_rows,
    segments,
    edges,
    edge_low,
    edge_high,
    n_rows,
    query_row_stride,
    query_head_stride,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    scale,
    softcap,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ACCURATE: tl.constexpr,
    TMA: tl.constexpr,
):
    """Grid (items, K). Tables: see ``triton_plan.QueryTables``. out ``(N, H, DV)`` and lse ``(N, H)`` contiguous."""
    item = items + tl.program_id(0) * 6
    head = tl.program_id(1)
    key_heads = tl.num_programs(1)
    tile = tl.load(item)
    slot = tl.load(item + 5)

    pair = tl.arange(0, BLOCK_M)
    place = pair // GROUP
    query_head = head * GROUP + pair % GROUP
    row = tl.load(tile_rows + tile * TILE_ROWS + place, mask=place < TILE_ROWS, other=-1)
    used = row >= 0
    q = load_queries(query, row, query_head, used, query_row_stride, query_head_stride, D, BLOCK_D)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for segment in range(tl.load(item + 1), tl.load(item + 2)):
        for start in range(tl.load(segments + 2 * segment), tl.load(segments + 2 * segment + 1), BLOCK_N):
            acc, m, total = _attend(
                acc, m, total, q, key, value, start, 0, 0, head, n_rows,
                key_row_stride, key_head_stride, value_row_stride, value_head_stride, scale, softcap,
                D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, SOFTCAP, ACCURATE, TMA, EDGE=False,
            )  # fmt: skip
    first_edge = tl.load(item + 3)
    limits = first_edge.to(tl.int64) * TILE_ROWS
    for edge in tl.range(first_edge, tl.load(item + 4), num_stages=1):
        low = tl.load(edge_low + limits + place, mask=place < TILE_ROWS, other=0)
        high = tl.load(edge_high + limits + place, mask=place < TILE_ROWS, other=0)
        limits += TILE_ROWS
        acc, m, total = _attend(
            acc, m, total, q, key, value, tl.load(edges + edge), low, high, head, n_rows,
            key_row_stride, key_head_stride, value_row_stride, value_head_stride, scale, softcap,
            D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, SOFTCAP, ACCURATE, TMA, EDGE=True,
        )  # fmt: skip

    dim = tl.arange(0, BLOCK_DV)
    if slot < 0:
        if SINKS:
            sink = tl.load(sinks + query_head, mask=used, other=0.0).to(tl.float32) * LOG2E
            m_new = tl.maximum(m, sink)
            decay = tl.exp2(m - m_new)
            total = total * decay + tl.exp2(sink - m_new)
            acc = acc * decay[:, None]
            m = m_new
        acc = acc / total[:, None]
        at = row.to(tl.int64) * (key_heads * GROUP) + query_head
        tl.store(lse + at, (m + tl.log2(total)) * LN2, mask=used)
        tl.store(
            out + at[:, None] * DV + dim[None, :],
            acc.to(out.dtype.element_ty),
            mask=used[:, None] & (dim < DV)[None, :],
        )
    else:
        at = (slot.to(tl.int64) * key_heads + head) * BLOCK_M + pair
        # a row may see no key of this part: lse -inf, weight 0 in the merge
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(part_lse + at, m + tl.log2(total))
        tl.store(part_out + at[:, None] * DV + dim[None, :], acc, mask=(dim < DV)[None, :])


@triton.jit
def merge_kernel(
    sinks,
    out,
    lse,
    part_out,
    part_lse,
    splits,
    tile_rows,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Grid (split tiles, K, BLOCK_M / BLOCK_P): parts of a tile by base-2 log-sum-exp, always in the same order."""
    split = splits + tl.program_id(0) * 3
    head = tl.program_id(1)
    key_heads = tl.num_programs(1)
    tile = tl.load(split)
    pair = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    place = pair // GROUP
    query_head = head * GROUP + pair % GROUP
    row = tl.load(tile_rows + tile * TILE_ROWS + place, mask=place < TILE_ROWS, other=-1)
    used = row >= 0
    dim = tl.arange(0, BLOCK_DV)

    acc = tl.zeros([BLOCK_P, BLOCK_DV], dtype=tl.float32)
    m = tl.full([BLOCK_P], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_P], dtype=tl.float32)
    if SINKS:
        m = tl.load(sinks + query_head, mask=used, other=0.0).to(tl.float32) * LOG2E
        total = total + 1.0
    first_slot = tl.load(split + 1)
    at = (first_slot.to(tl.int64) * key_heads + head) * BLOCK_M + pair
    for _ in range(first_slot, tl.load(split + 2)):
        part = tl.load(part_lse + at)
        m_new = tl.maximum(m, part)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(part - shift)
        decay = tl.exp2(m - shift)
        value = tl.load(part_out + at[:, None] * DV + dim[None, :], mask=(dim < DV)[None, :], other=0.0)
        acc = acc * decay[:, None] + value * weight[:, None]
        total = total * decay + weight
        m = m_new
        at += key_heads * BLOCK_M
    at = row.to(tl.int64) * (key_heads * GROUP) + query_head
    tl.store(lse + at, (m + tl.log2(total)) * LN2, mask=used)
    tl.store(
        out + at[:, None] * DV + dim[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=used[:, None] & (dim < DV)[None, :],
    )
