"""Backward kernels of prefix_attention in Triton: recomputation from the log-sum-exp, no atomics.

With p = exp(s - lse), s = softcap(scale q k^T), and delta_i = sum_d out_id dout_id - dlse_i,

    ds = p * (dout v^T - delta) * (1 - (s / softcap)^2)
    dq = scale ds k        dk = scale ds^T q        dv = p^T dout        dsink = -sum_i exp(sink - lse_i) delta_i

``query_grad_kernel`` walks the key blocks of a query tile as the forward does, ``key_grad_kernel`` the query rows of a
key tile; each gradient has one writer and a fixed order of summation. Sums are float32; p and ds are rounded to the
inputs' dtype for the second products. A hidden pair has weight 0, and edge blocks keep what is not finite in it from
0 * NaN, as in the forward.
"""

# mypy: disable-error-code="no-untyped-def"
# device code: its arguments are pointers and numbers of the machine, not Python's

from __future__ import annotations

import triton
import triton.language as tl

from trace_fast.kernels.prefix_attention.triton_blocks import LOG2E, load_keys, load_queries, logits, tainted_rows


@triton.jit(do_not_specialize=["n_pairs"])
def delta_kernel(
    out,
    grad_out,
    grad_lse,
    delta,
    n_pairs,
    grad_row_stride,
    grad_head_stride,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Grid (N * H / BLOCK_P): delta ``(N, H)`` of a contiguous out ``(N, H, DV)``."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    used = pair < n_pairs
    dim = tl.arange(0, BLOCK_DV)
    at = pair[:, None] * DV + dim[None, :]
    o = tl.load(out + at, mask=used[:, None] & (dim < DV)[None, :], other=0.0).to(tl.float32)
    do = load_queries(grad_out, pair // HEADS, pair % HEADS, used, grad_row_stride, grad_head_stride, DV, BLOCK_DV)
    total = tl.sum(o * do.to(tl.float32), 1)
    total -= tl.load(grad_lse + pair, mask=used, other=0.0)
    tl.store(delta + pair, total, mask=used)


@triton.jit
def _query_grad_block(
    grad,
    q,
    do,
    lse,
    delta,
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
    """Adds one key block's ``ds k`` to ``grad``; lse in base 2."""
    k = load_keys(key, start, head, n_rows, key_row_stride, key_head_stride, D, BLOCK_N, BLOCK_D, TMA)
    if EDGE:
        taint = tainted_rows(k)
        k = tl.where((taint == 0.0)[:, None], k, 0.0).to(k.dtype)
    v = load_keys(value, start, head, n_rows, value_row_stride, value_head_stride, DV, BLOCK_N, BLOCK_DV, TMA)
    z, unit = logits(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, softcap, SOFTCAP, ACCURATE)
    p = tl.exp2(z * unit - lse[:, None])
    ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
    if SOFTCAP:
        ds = ds * (1.0 - z * z)
    if EDGE:
        keys = start + tl.arange(0, BLOCK_N)
        visible = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        ds = tl.where(visible, ds + taint[None, :], 0.0)
    return tl.dot(ds.to(k.dtype), k, grad, input_precision="ieee")


@triton.jit(do_not_specialize=["n_rows"])
def query_grad_kernel(
    query,
    key,
    value,
    grad_out,
    lse,
    delta,
    grad_query,
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
    grad_row_stride,
    grad_head_stride,
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
    ACCURATE: tl.constexpr,
    TMA: tl.constexpr,
):
    """Grid (tiles, K). Tables: ``triton_plan.QueryTables``, whole items. grad_query ``(N, H, D)`` contiguous."""
    item = items + tl.program_id(0) * 6
    head = tl.program_id(1)
    tile = tl.load(item)
    pair = tl.arange(0, BLOCK_M)
    place = pair // GROUP
    query_head = head * GROUP + pair % GROUP
    row = tl.load(tile_rows + tile * TILE_ROWS + place, mask=place < TILE_ROWS, other=-1)
    used = row >= 0
    q = load_queries(query, row, query_head, used, query_row_stride, query_head_stride, D, BLOCK_D)
    do = load_queries(grad_out, row, query_head, used, grad_row_stride, grad_head_stride, DV, BLOCK_DV)
    at = row.to(tl.int64) * (tl.num_programs(1) * GROUP) + query_head
    lse2 = tl.load(lse + at, mask=used, other=float("inf")) * LOG2E
    d = tl.load(delta + at, mask=used, other=0.0)

    grad = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for segment in range(tl.load(item + 1), tl.load(item + 2)):
        for start in range(tl.load(segments + 2 * segment), tl.load(segments + 2 * segment + 1), BLOCK_N):
            grad = _query_grad_block(
                grad, q, do, lse2, d, key, value, start, 0, 0, head, n_rows,
                key_row_stride, key_head_stride, value_row_stride, value_head_stride, scale, softcap,
                D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, SOFTCAP, ACCURATE, TMA, EDGE=False,
            )  # fmt: skip
    first_edge = tl.load(item + 3)
    limits = first_edge.to(tl.int64) * TILE_ROWS
    for edge in tl.range(first_edge, tl.load(item + 4), num_stages=1):
        low = tl.load(edge_low + limits + place, mask=place < TILE_ROWS, other=0)
        high = tl.load(edge_high + limits + place, mask=place < TILE_ROWS, other=0)
        limits += TILE_ROWS
        grad = _query_grad_block(
            grad, q, do, lse2, d, key, value, tl.load(edges + edge), low, high, head, n_rows,
            key_row_stride, key_head_stride, value_row_stride, value_head_stride, scale, softcap,
            D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, SOFTCAP, ACCURATE, TMA, EDGE=True,
        )  # fmt: skip
    dim = tl.arange(0, BLOCK_D)
    tl.store(
        grad_query + at[:, None] * D + dim[None, :],
        (grad * scale).to(grad_query.dtype.element_ty),
        mask=used[:, None] & (dim < D)[None, :],
    )


@triton.jit
def _key_grad_block(
    grad_k,
    grad_v,
    k,
    v,
    query,
    grad_out,
    lse,
    delta,
    row,
    query_head,
    used,
    first_key,
    low,
    high,
    heads,
    query_row_stride,
    query_head_stride,
    grad_row_stride,
    grad_head_stride,
    scale,
    softcap,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ACCURATE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Adds one block of row-head pairs; scores are transposed, ``[n, M]``."""
    q = load_queries(query, row, query_head, used, query_row_stride, query_head_stride, D, BLOCK_D)
    do = load_queries(grad_out, row, query_head, used, grad_row_stride, grad_head_stride, DV, BLOCK_DV)
    if EDGE:
        taint = tainted_rows(q) + tainted_rows(do)
        q = tl.where((taint == 0.0)[:, None], q, 0.0).to(q.dtype)
        do = tl.where((taint == 0.0)[:, None], do, 0.0).to(do.dtype)
    at = row.to(tl.int64) * heads + query_head
    lse2 = tl.load(lse + at, mask=used, other=float("inf")) * LOG2E  # 2^(z - inf) = 0: places without a row
    d = tl.load(delta + at, mask=used, other=0.0)
    z, unit = logits(tl.dot(k, tl.trans(q), input_precision="ieee"), scale, softcap, SOFTCAP, ACCURATE)
    p = tl.exp2(z * unit - lse2[None, :])
    if EDGE:
        keys = first_key + tl.arange(0, BLOCK_N)
        visible = (keys[:, None] >= low[None, :]) & (keys[:, None] < high[None, :])
        p = tl.where(visible, p + taint[None, :], 0.0)
    if VALUES:
        grad_v = tl.dot(p.to(do.dtype), do, grad_v, input_precision="ieee")
    if KEYS:
        ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - d[None, :])
        if SOFTCAP:
            ds = ds * (1.0 - z * z)
        if EDGE:
            ds = tl.where(visible, ds, 0.0)
        grad_k = tl.dot(ds.to(q.dtype), q, grad_k, input_precision="ieee")
    return grad_k, grad_v


@triton.jit
def key_grad_kernel(
    query,
    key,
    value,
    grad_out,
    lse,
    delta,
    grad_key,
    grad_value,
    tiles,
    segments,
    edge_rows,
    edge_low,
    edge_high,
    query_row_stride,
    query_head_stride,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    grad_row_stride,
    grad_head_stride,
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
    ACCURATE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Grid (key tiles, K). Tables: ``triton_plan.KeyTables``. Gradients ``(N, K, D)`` and ``(N, K, DV)`` contiguous.

    KEYS and VALUES say which of the two are computed: for large heads both sums do not fit into the registers of one
    program, and are made in two launches.
    """
    tile = tiles + tl.program_id(0) * 6
    head = tl.program_id(1)
    key_heads = tl.num_programs(1)
    heads = key_heads * GROUP
    first_key = tl.load(tile)
    last_key = first_key + tl.load(tile + 1)
    k = load_keys(key, first_key, head, last_key, key_row_stride, key_head_stride, D, BLOCK_N, BLOCK_D, False)
    v = load_keys(value, first_key, head, last_key, value_row_stride, value_head_stride, DV, BLOCK_N, BLOCK_DV, False)
    pair = tl.arange(0, BLOCK_M)
    place = pair // GROUP
    query_head = head * GROUP + pair % GROUP

    grad_k = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)
    for segment in range(tl.load(tile + 2), tl.load(tile + 3)):
        end = tl.load(segments + 2 * segment + 1)
        for first in range(tl.load(segments + 2 * segment), end, TILE_ROWS):
            row = first + place
            grad_k, grad_v = _key_grad_block(
                grad_k, grad_v, k, v, query, grad_out, lse, delta, row, query_head, (place < TILE_ROWS) & (row < end),
                first_key, 0, 0, heads, query_row_stride, query_head_stride, grad_row_stride, grad_head_stride,
                scale, softcap, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, SOFTCAP, ACCURATE, KEYS, VALUES, EDGE=False,
            )  # fmt: skip
    end = tl.load(tile + 5)
    for first in tl.range(tl.load(tile + 4), end, TILE_ROWS, num_stages=1):
        edge = first + place
        used = (place < TILE_ROWS) & (edge < end)
        row = tl.load(edge_rows + edge, mask=used, other=0)
        low = tl.load(edge_low + edge, mask=used, other=0)
        high = tl.load(edge_high + edge, mask=used, other=0)
        grad_k, grad_v = _key_grad_block(
            grad_k, grad_v, k, v, query, grad_out, lse, delta, row, query_head, used,
            first_key, low, high, heads, query_row_stride, query_head_stride, grad_row_stride, grad_head_stride,
            scale, softcap, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, SOFTCAP, ACCURATE, KEYS, VALUES, EDGE=True,
        )  # fmt: skip

    row = first_key + tl.arange(0, BLOCK_N)
    at = row.to(tl.int64) * key_heads + head
    if KEYS:
        dim = tl.arange(0, BLOCK_D)
        tl.store(
            grad_key + at[:, None] * D + dim[None, :],
            (grad_k * scale).to(grad_key.dtype.element_ty),
            mask=(row < last_key)[:, None] & (dim < D)[None, :],
        )
    if VALUES:
        dim = tl.arange(0, BLOCK_DV)
        tl.store(
            grad_value + at[:, None] * DV + dim[None, :],
            grad_v.to(grad_value.dtype.element_ty),
            mask=(row < last_key)[:, None] & (dim < DV)[None, :],
        )
