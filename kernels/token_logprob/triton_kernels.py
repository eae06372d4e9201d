"""The Triton kernels of token_logprob: partial sums of every vocabulary tile, their merge, and a chunk of the gradient.

Imported by ``triton_impl.py`` only. Three kernels and nothing that one program waits for in another one:

``partials``   a program multiplies one block of rows by a range of vocabulary tiles. Of every tile it writes, per row,
    the maximum, the sum of exponentials below it and (for the entropy) their first moment. Nothing is carried from tile
    to tile, so the numbers of a row depend neither on how the tiles are shared out nor on how many rows there are.
``merge``      adds the tiles of a row up, in the order of the vocabulary; with segments, one program an answer, whose
    mean is taken in float64, in the order of its rows.
``gradient``   forms one tile of logits again and writes d loss / d (hidden weight^T + bias) in the input's dtype.

Shapes: M rows, H hidden, V vocabulary (of this shard), T tiles of the vocabulary, C vocabulary entries of one chunk,
S segments. Offsets are int64. A descriptor (TMA) and a pointer reach the same products: see ``_product``.
"""

# The arguments of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_block(source, rows, row_limit, columns, column_limit, row_stride, column_stride):
    """[R, K] block; rows past the end repeat the last one (their results are dropped), columns past the end are 0."""
    kept = tl.minimum(rows, row_limit - 1).to(tl.int64)
    pointers = source + kept[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
    return tl.load(pointers, mask=columns[None, :] < column_limit, other=0.0)


@triton.jit
def _product(
    hidden, weight, row0, column0, rows, hidden_size, vocabulary,
    hidden_row_stride, hidden_stride, weight_row_stride, weight_stride,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_V] of hidden weight^T; hidden and weight are descriptors with TMA, else pointers."""
    product = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    row_M = row0 + tl.arange(0, BLOCK_M)
    column_V = column0 + tl.arange(0, BLOCK_V)
    for start in range(0, hidden_size, BLOCK_H):
        if TMA:
            hidden_MH = hidden.load([row0, start])
            weight_VH = weight.load([column0, start])
        else:
            start_H = start + tl.arange(0, BLOCK_H)
            hidden_MH = _load_block(hidden, row_M, rows, start_H, hidden_size, hidden_row_stride, hidden_stride)
            weight_VH = _load_block(
                weight, column_V, vocabulary, start_H, hidden_size, weight_row_stride, weight_stride
            )  # fmt: skip
        # "ieee" concerns float32 only: half precision is exact in the tensor cores' products
        product = tl.dot(hidden_MH, weight_VH.T, product, input_precision="ieee")
    return product


@triton.jit
def _capped(logits, softcap):
    """softcap tanh(logits / softcap), without overflow for any size of logit."""
    shrunk = tl.exp(tl.abs(logits) * (-2.0 / softcap))
    size = softcap * (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(logits < 0, -size, size)


@triton.jit
def _biased(product, bias, column_V, vocabulary, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        bias_V = tl.load(bias + column_V, mask=column_V < vocabulary, other=0.0)
        product += bias_V.to(tl.float32)[None, :]
    return product


@triton.jit(do_not_specialize=["rows", "vocabulary", "vocabulary_start", "tiles", "splits"])
def partials(
    hidden, weight, bias, targets_M, peak_TM, total_TM, moment_TM, found_M,
    rows, hidden_size, vocabulary, vocabulary_start,
    hidden_row_stride, hidden_stride, weight_row_stride, weight_stride,
    logit_scale, softcap, inverse_temperature, tiles, splits,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MOMENT: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks * splits,). ``found_M`` gets the target's logit from the one tile that holds it."""
    # Programs of up to GROUP row blocks walk through the same tiles together: weights and hidden rows stay in L2.
    row_blocks = tl.cdiv(rows, BLOCK_M)
    program = tl.program_id(0)
    first_block = program // (GROUP * splits) * GROUP
    group = tl.minimum(row_blocks - first_block, GROUP)
    place = program % (GROUP * splits)
    row0 = (first_block + place % group) * BLOCK_M
    split = place // group

    row_M = row0 + tl.arange(0, BLOCK_M)
    inside_M = row_M < rows
    target_M = tl.load(targets_M + row_M, mask=inside_M, other=-1) - vocabulary_start
    first = (split.to(tl.int64) * tiles // splits).to(tl.int32)
    last = ((split.to(tl.int64) + 1) * tiles // splits).to(tl.int32)
    # One loop over tiles and depth: the next tile's loads start before this one's sums are done.
    for tile in tl.range(first, last, flatten=True):
        column0 = tile * BLOCK_V
        logits_MV = _product(
            hidden, weight, row0, column0, rows, hidden_size, vocabulary,
            hidden_row_stride, hidden_stride, weight_row_stride, weight_stride, BLOCK_M, BLOCK_V, BLOCK_H, TMA,
        )  # fmt: skip
        column_V = column0 + tl.arange(0, BLOCK_V)
        logits_MV = _biased(logits_MV, bias, column_V, vocabulary, HAS_BIAS) * logit_scale
        if HAS_SOFTCAP:
            logits_MV = _capped(logits_MV, softcap) * inverse_temperature
        here_M = inside_M & (target_M >= column0) & (target_M < tl.minimum(column0 + BLOCK_V, vocabulary))
        # 32 bits: a comparison of 64-bit ids costs registers that the accumulators need
        hit_MV = (target_M - column0).to(tl.int32)[:, None] == tl.arange(0, BLOCK_V)[None, :]
        tl.store(found_M + row_M, tl.sum(tl.where(hit_MV, logits_MV, 0.0), 1), mask=here_M)

        # Past the vocabulary: -inf, so that exp gives 0 and the maximum is one of real logits, however negative.
        logits_MV = tl.where(column_V[None, :] < vocabulary, logits_MV, float("-inf"))
        peak = tl.max(logits_MV, 1)
        shift = tl.where(peak == float("-inf"), 0.0, peak)  # a tile of -inf only: 0 in sum, not NaN
        below_MV = logits_MV - shift[:, None]
        weight_MV = tl.exp(below_MV)
        place_M = tile * rows.to(tl.int64) + row_M
        tl.store(peak_TM + place_M, peak, mask=inside_M)
        tl.store(total_TM + place_M, tl.sum(weight_MV, 1), mask=inside_M)
        if MOMENT:
            moment = tl.sum(tl.where(weight_MV > 0, weight_MV * below_MV, 0.0), 1)
            tl.store(moment_TM + place_M, moment, mask=inside_M)


@triton.jit(do_not_specialize=["rows", "tiles", "vocabulary", "vocabulary_start", "ignore_index"])
def merge(
    peak_TM, total_TM, moment_TM, found_M, targets_M, starts_S,
    logprob_M, entropy_M, mean_S, row_peak_M, row_total_M, row_target_M, row_moment_M,
    rows, tiles, vocabulary, vocabulary_start, ignore_index,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
    FINISH: tl.constexpr, MOMENT: tl.constexpr, SEGMENTS: tl.constexpr, HAS_IGNORE: tl.constexpr,
):  # fmt: skip
    """Grid (segments,) with SEGMENTS, else (row blocks,). Without FINISH: sums only, no log-probabilities.

    A NaN is never dropped: the sums carry it even where a maximum does not, and 0 is chosen by comparison.
    """
    program = tl.program_id(0)
    if SEGMENTS:  # never outside the rows, whatever the offsets say
        first = tl.maximum(tl.load(starts_S + program), 0).to(tl.int32)
        last = tl.minimum(tl.load(starts_S + program + 1), rows).to(tl.int32)
    else:
        first = program * BLOCK_M
        last = tl.minimum(first + BLOCK_M, rows)
    sum_M = tl.zeros([BLOCK_M], tl.float64)
    count_M = tl.zeros([BLOCK_M], tl.float64)
    for start in range(first, last, BLOCK_M):
        row_M = start + tl.arange(0, BLOCK_M)
        inside_M = row_M < last
        peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total_M = tl.zeros([BLOCK_M], tl.float32)
        moment_M = tl.zeros([BLOCK_M], tl.float32)
        for tile0 in range(0, tiles, BLOCK_T):
            tile_T = tile0 + tl.arange(0, BLOCK_T)
            place = tile_T.to(tl.int64)[:, None] * rows + row_M[None, :]
            real = (tile_T < tiles)[:, None] & inside_M[None, :]
            peak = tl.load(peak_TM + place, mask=real, other=float("-inf"))
            total = tl.load(total_TM + place, mask=real, other=0.0)
            highest_M = tl.maximum(peak_M, tl.max(peak, 0))
            shift_M = tl.where(highest_M == float("-inf"), 0.0, highest_M)
            old_M = tl.exp(peak_M - shift_M)
            new = tl.exp(peak - shift_M[None, :])
            if MOMENT:  # sums of e^(x - a) (x - a): moving a to b adds (a - b) times the sum of exponentials
                moment = tl.load(moment_TM + place, mask=real, other=0.0)
                moved_M = tl.where(total_M > 0, total_M * (peak_M - shift_M), 0.0)
                moved = tl.where(total > 0, total * (peak - shift_M[None, :]), 0.0)
                moment_M = old_M * (moment_M + moved_M) + tl.sum(new * (moment + moved), 0)
            total_M = old_M * total_M + tl.sum(new * total, 0)
            peak_M = highest_M
        target_M = tl.load(targets_M + row_M, mask=inside_M, other=0)
        known_M = inside_M & (target_M >= vocabulary_start) & (target_M < vocabulary_start + vocabulary)
        found = tl.load(found_M + row_M, mask=known_M, other=0.0)
        tl.store(row_peak_M + row_M, peak_M, mask=inside_M)
        tl.store(row_total_M + row_M, total_M, mask=inside_M)
        if FINISH:
            logprob = found - peak_M - tl.log(total_M)
            logprob = tl.where(known_M, tl.where(logprob > 0, 0.0, logprob), float("nan"))
            scored_M = inside_M
            if HAS_IGNORE:
                scored_M = inside_M & (target_M != ignore_index)
                logprob = tl.where(scored_M, logprob, 0.0)
            tl.store(logprob_M + row_M, logprob, mask=inside_M)
            if MOMENT:
                entropy = tl.log(total_M) - moment_M / total_M
                entropy = tl.where(scored_M, tl.where(entropy < 0, 0.0, entropy), 0.0)
                tl.store(entropy_M + row_M, entropy, mask=inside_M)
            sum_M += tl.where(scored_M, logprob, 0.0).to(tl.float64)
            count_M += scored_M.to(tl.float64)
        else:
            tl.store(row_target_M + row_M, found, mask=inside_M)
            if MOMENT:
                tl.store(row_moment_M + row_M, moment_M, mask=inside_M)
    if SEGMENTS:  # nothing to score: 0 / 0 is NaN, as documented
        tl.store(mean_S + program, tl.sum(sum_M, 0) / tl.sum(count_M, 0))


@triton.jit(do_not_specialize=["rows", "columns", "column_start"])
def gradient(
    hidden, weight, bias, targets_M, peak_M, slope_M, curve_M, spike_M, out_MC,
    rows, hidden_size, columns, column_start,
    hidden_row_stride, hidden_stride, weight_row_stride, weight_stride, out_row_stride,
    logit_scale, softcap, inverse_temperature,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, CURVE: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks * tiles of the chunk,): one tile of d loss / d (hidden weight^T + bias), see ``ops.py``.

    weight and bias begin at the chunk, whose first entry is ``column_start`` in the ids of ``targets_M``.
    """
    row_blocks = tl.cdiv(rows, BLOCK_M)
    row0 = tl.program_id(0) % row_blocks * BLOCK_M
    column0 = tl.program_id(0) // row_blocks * BLOCK_V
    logits_MV = _product(
        hidden, weight, row0, column0, rows, hidden_size, columns,
        hidden_row_stride, hidden_stride, weight_row_stride, weight_stride, BLOCK_M, BLOCK_V, BLOCK_H, TMA,
    )  # fmt: skip
    row_M = row0 + tl.arange(0, BLOCK_M)
    inside_M = row_M < rows
    column_V = column0 + tl.arange(0, BLOCK_V)
    logits_MV = _biased(logits_MV, bias, column_V, columns, HAS_BIAS) * logit_scale
    chain = logit_scale * inverse_temperature
    slope = tl.load(slope_M + row_M, mask=inside_M, other=0.0)
    spike = tl.load(spike_M + row_M, mask=inside_M, other=0.0)
    peak = tl.load(peak_M + row_M, mask=inside_M, other=0.0)
    target_M = tl.load(targets_M + row_M, mask=inside_M, other=-1) - column_start
    active_M = (slope != 0) | (spike != 0)
    if HAS_SOFTCAP:
        capped_MV = _capped(logits_MV, softcap)
        below_MV = capped_MV * inverse_temperature - peak[:, None]
    else:
        below_MV = logits_MV - peak[:, None]
    share_MV = tl.exp(below_MV)
    if CURVE:
        curve = tl.load(curve_M + row_M, mask=inside_M, other=0.0)
        active_M = active_M | (curve != 0)
        bent_MV = tl.where(share_MV > 0, curve[:, None] * below_MV, 0.0)
        grad_MV = share_MV * (slope[:, None] + bent_MV)
    else:
        grad_MV = share_MV * slope[:, None]
    hit_MV = target_M.to(tl.int32)[:, None] == column_V[None, :]
    grad_MV += tl.where(hit_MV, spike[:, None], 0.0)
    if HAS_SOFTCAP:
        bend_MV = capped_MV / softcap
        grad_MV *= 1.0 - bend_MV * bend_MV
    grad_MV = tl.where(active_M[:, None], grad_MV * chain, 0.0)  # a row without gradient gives 0, whatever it holds
    place = row_M.to(tl.int64)[:, None] * out_row_stride + column_V[None, :]
    kept = inside_M[:, None] & (column_V < columns)[None, :]
    tl.store(out_MC + place, grad_MV.to(out_MC.dtype.element_ty), mask=kept)
