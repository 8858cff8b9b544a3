"""Kernels of the sigmoid loss: losses and dS of a tile, one exponential and 1/8 root a pair.

For a negative pair of logit z, with e = e^z, the loss is log(1 + e) and dS is e / (1 + e). Both
come from products (1 + a)(1 + b) = 1 + p that are stored as p = a + b + ab. Adding the 1 would lose
small terms: at SigLIP's first bias, -10, e is 5e-5 and 1 + e is off by up to 0.1% of e, by the same
amount in all pairs whose features are alike. 16 pairs share a logarithm. 8 pairs share a
reciprocal, which is split by 1 / (1 + a) = (1 + b) / (1 + p).

1. `unmasked_tiles` computes every pair as a negative. A tile whose products leave float32's range
   gets a sum that is not finite.
2. `masked_tiles` recomputes such tiles, pair by pair, and those that hold positives.
3. `defer_grad` rounds a gradient that waits for the backward pass, `write_deferred_grad` multiplies
   it there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megabatch.similarity.triton.launch import kernel
from megabatch.similarity.triton.tiles import (
    LN2,
    LOG2E,
    logits_tile,
    mask_tile,
    needs_mask,
    swizzle,
)

#: Largest product of 16 pairs that is used: the reciprocal of a larger one is not a normal number.
LARGEST = tl.constexpr(2.0**120)
#: Partial sums per program of `unmasked_tiles`: one for each of four warps, so that none waits.
PARTS = tl.constexpr(4)


@triton.jit
def _halves(v, BM: tl.constexpr, B: tl.constexpr):
    """The left and the right half of (BM, B); each thread keeps its own values."""
    return tl.split(tl.permute(tl.reshape(v, (BM, 2, B // 2)), (0, 2, 1)))


@triton.jit
def _join_halves(left, right, BM: tl.constexpr, B: tl.constexpr):
    """The inverse of `_halves`."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (BM, B))


@triton.jit
def _product(a, b):
    """(1 + a)(1 + b) - 1."""
    return tl.fma(a, b, a) + b


@triton.jit
def _product_of_halves(v, BM: tl.constexpr, B: tl.constexpr):
    left, right = _halves(v, BM, B)
    return _product(left, right)


@triton.jit
def _sum_of_halves(v, BM: tl.constexpr, B: tl.constexpr):
    left, right = _halves(v, BM, B)
    return left + right


@triton.jit
def _split_reciprocal(r, a, b, BM: tl.constexpr, B: tl.constexpr):
    """1 / (1 + a) and 1 / (1 + b), from r = 1 / ((1 + a)(1 + b)); no difference is taken."""
    return _join_halves(tl.fma(r, b, r), tl.fma(r, a, r), BM, B)


@triton.jit
def _log2_1p(p):
    """log2(1 + p) for p >= 0 to 2^-21 of it, however small p is."""
    y = 1.0 + p
    bits = y.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) & -0x800000  # 1 + p = 2^exponent * (1 + f), f around 0
    f = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
    f = tl.where(exponent == 0, p, f)
    q = 0.12583698332309723  # log2(1 + f) / f by a polynomial: relative error 3e-8
    q = tl.fma(q, f, -0.20726972818374634)
    q = tl.fma(q, f, 0.21571561694145203)
    q = tl.fma(q, f, -0.23894482851028442)
    q = tl.fma(q, f, 0.28791624307632446)
    q = tl.fma(q, f, -0.3607036769390106)
    q = tl.fma(q, f, 0.48091062903404236)
    q = tl.fma(q, f, -0.7213473320007324)
    q = tl.fma(q, f, 1.4426950216293335)
    return tl.fma(f, q, exponent.to(tl.float32) * 2.0**-23)


@triton.jit
def _sum_to_parts(v, BM: tl.constexpr, B: tl.constexpr):
    """(BM, B) summed to PARTS numbers, within warps if four warps hold 64 rows."""
    v = tl.sum(tl.reshape(v, (BM // 64, PARTS, 2, 8, B)), 0)
    return tl.sum(tl.sum(tl.sum(v, 1), 2), 1)


@kernel
def unmasked_tiles(
    x, y, ds, partials, scale, bias, weight,
    row_ranges, row_range_stride, col_ranges, col_range_stride,
    row_start, col_start, m, n, d, first_col_tile, col_tiles, diagonal_offset,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ROW_TILES: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, EVEN_N: tl.constexpr, DIAGONAL: tl.constexpr,
    IDS: tl.constexpr, WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """dS * GAIN of ROW_TILES row tiles per program, and its sums of losses (in base 2) and of dS.

    The sums go to partials[group of row tiles, column tile]; tiles that need masks add nothing to
    them. Unless EVEN_N, one of these col_tiles reaches past n.
    """
    group, tj = swizzle(tl.program_id(0), tl.cdiv(m, BM * ROW_TILES), col_tiles, GROUP)
    tj += first_col_tile
    j0 = tj * BN
    k = tl.load(scale) * LOG2E
    shift = tl.load(bias) * LOG2E
    if not EVEN_N:
        shift = tl.where(j0 + tl.arange(0, BN) < n, shift, float("-inf"))[None, :]
    losses = tl.zeros((BM, BN // 16), tl.float32)
    gradients = tl.zeros((BM, BN // 16), tl.float32)
    for r in tl.range(0, ROW_TILES, flatten=True):
        ti = group * ROW_TILES + r
        i0 = ti * BM
        i = i0 + tl.arange(0, BM)
        acc = tl.zeros((BM, BN), tl.float32)
        for q in tl.range(0, d, BK):
            a = x.load([row_start + i0, q])
            acc = tl.dot(a, y.load([col_start + j0, q]).T, acc, input_precision="tf32")
        counted = i < m
        if DIAGONAL or IDS:
            # The last group may reach past the last row tile.
            skipped = needs_mask(
                tl.minimum(ti, tl.cdiv(m, BM) - 1), tj,
                row_ranges=row_ranges, row_stride=row_range_stride,
                col_ranges=col_ranges, col_stride=col_range_stride,
                diagonal_offset=diagonal_offset, BM=BM, BN=BN, DIAGONAL=DIAGONAL, IDS=IDS,
            )  # fmt: skip
            counted = counted & ~skipped
        a, b = _halves(tl.exp2(tl.fma(acc, k, shift)), BM, BN)
        of_2 = _product(a, b)
        c, e = _halves(of_2, BM, BN // 2)
        of_4 = _product(c, e)
        f, g = _halves(of_4, BM, BN // 4)
        of_8 = _product(f, g)
        of_16 = _product_of_halves(of_8, BM, BN // 8)
        loss = tl.where(of_16 <= LARGEST, _log2_1p(of_16), float("inf"))
        if WEIGHT:
            own = tl.load(weight + i, mask=i < m, other=0.0)[:, None]
            loss *= own
        losses += tl.where(counted[:, None], loss, 0.0)

        if GRADIENT:
            root = tl.rsqrt(tl.fma(of_8, 1.0 / GAIN, 1.0 / GAIN))  # a division takes 7 operations
            inverse = root * root
            if WEIGHT:
                inverse *= own
            inverse = _split_reciprocal(inverse, f, g, BM, BN // 4)
            inverse = _split_reciprocal(inverse, c, e, BM, BN // 2)
            left = tl.fma(a, b, a) * inverse  # a / (1 + a)
            right = tl.fma(a, b, b) * inverse
            of_4_pairs = _sum_of_halves(left + right, BM, BN // 2)
            of_16_pairs = _sum_of_halves(_sum_of_halves(of_4_pairs, BM, BN // 4), BM, BN // 8)
            gradients += tl.where(counted[:, None], of_16_pairs, 0.0)
            if SPLIT == 1:
                ds.store([i0, j0], _join_halves(left, right, BM, BN).to(ds.dtype))
            else:
                ds.store([i0, j0], left.to(ds.dtype))
                ds.store([i0, j0 + BN // 2], right.to(ds.dtype))
    index = (group * tl.cdiv(n, BN) + tj) * (2 * PARTS) + tl.arange(0, PARTS)
    tl.store(partials + index, _sum_to_parts(losses, BM, BN // 16))
    if GRADIENT:
        tl.store(partials + index + PARTS, _sum_to_parts(gradients, BM, BN // 16))


@kernel
def masked_tiles(
    x, y, ds, partials, sums, stride, scale, bias, weight,
    row_ids, row_ranges, row_range_stride, col_ids, col_ranges, col_range_stride,
    row_start, col_start, m, n, d, diagonal_offset,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ROW_TILES: tl.constexpr,
    CHUNK: tl.constexpr, ALL: tl.constexpr, DIAGONAL: tl.constexpr, IDS: tl.constexpr,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """The tiles that `unmasked_tiles` leaves, or ALL; each program looks at CHUNK tiles at once.

    Adds to sums[:, program] (float64) the losses, dS, and dS times the products <x, y>, the last
    from this kernel's own tiles alone. Without GRADIENT no dS is stored.
    """
    cols = tl.cdiv(n, BN)
    total = tl.cdiv(m, BM) * cols
    start = tl.program_id(0) * CHUNK
    end = tl.minimum(start + CHUNK, total)
    loss_sum = tl.zeros((1,), tl.float64)
    ds_sum = tl.zeros((1,), tl.float64)
    scale_sum = tl.zeros((1,), tl.float64)
    if not ALL:
        index = start + tl.arange(0, CHUNK)
        inside = index < end
        index = tl.minimum(index, end - 1)
        overflowed = _overflowed(partials, index // cols // ROW_TILES * cols + index % cols)
        candidates = overflowed | needs_mask(
            index // cols, index % cols, row_ranges=row_ranges, row_stride=row_range_stride,
            col_ranges=col_ranges, col_stride=col_range_stride, diagonal_offset=diagonal_offset,
            BM=BM, BN=BN, DIAGONAL=DIAGONAL, IDS=IDS,
        )  # fmt: skip
        # The sums of a program of `unmasked_tiles` are added once, with the first of its tiles.
        first = inside & ~overflowed & (index // cols % ROW_TILES == 0)
        place = (index // cols // ROW_TILES * cols + index % cols) * (2 * PARTS)
        loss_sum += _sum_of_parts(partials + place, first)
        if GRADIENT:
            ds_sum += _sum_of_parts(partials + place + PARTS, first)
        if tl.max((candidates & inside).to(tl.int32), 0) == 0:
            end = start
    factor = tl.load(scale)
    shift = tl.load(bias)
    for t in tl.range(start, end):
        ti = t // cols
        tj = t % cols
        wanted = True
        if not ALL:
            wanted = _overflowed(partials, ti // ROW_TILES * cols + tj) | needs_mask(
                ti, tj, row_ranges=row_ranges, row_stride=row_range_stride, col_ranges=col_ranges,
                col_stride=col_range_stride, diagonal_offset=diagonal_offset,
                BM=BM, BN=BN, DIAGONAL=DIAGONAL, IDS=IDS,
            )  # fmt: skip
        if wanted:
            i0 = ti * BM
            j0 = tj * BN
            s = logits_tile(x, y, row_start + i0, col_start + j0, d, BM, BN, BK)
            z = s * factor + shift
            negative, positive = mask_tile(
                z, i0, j0, m=m, n=n, diagonal_offset=diagonal_offset, row_ids=row_ids,
                col_ids=col_ids, ceiling=None, BM=BM, BN=BN, DIAGONAL=DIAGONAL, IDS=IDS,
                PAIRED=0, CEILING=0,
            )  # fmt: skip
            sign = tl.where(negative, 1.0, tl.where(positive, -1.0, 0.0))  # 0: past the end
            u = z * LOG2E * sign
            e = tl.exp2(-tl.abs(u))
            root = tl.rsqrt(1.0 + e)
            # Comparisons that let a NaN through.
            loss = (tl.where(u <= 0, 0.0, u) + _log2_1p(e)) * (sign * sign)
            gradient = tl.where(u <= 0, e, tl.where(u > 0, 1.0, u)) * (root * root) * (sign * GAIN)
            if WEIGHT:
                i = i0 + tl.arange(0, BM)
                own = tl.load(weight + i, mask=i < m, other=0.0)[:, None]
                loss *= own
                gradient *= own
            loss_sum += tl.sum(tl.sum(loss, 1), 0).to(tl.float64)
            ds_sum += tl.sum(tl.sum(gradient, 1), 0).to(tl.float64)
            scale_sum += tl.sum(tl.sum(gradient * s, 1), 0).to(tl.float64)
            if GRADIENT:
                ds.store([i0, j0], gradient.to(ds.dtype))
    place = sums + tl.program_id(0) + tl.arange(0, 1)
    tl.store(place, tl.load(place) + loss_sum * LN2)
    tl.store(place + stride, tl.load(place + stride) + ds_sum * (1.0 / GAIN))
    tl.store(place + 2 * stride, tl.load(place + 2 * stride) + scale_sum * (1.0 / GAIN))


@triton.jit
def _overflowed(partials, program):
    """Whether a program of `unmasked_tiles` has a sum that is not finite; may be a vector."""
    found = program < 0
    for part in tl.static_range(PARTS):
        value = tl.load(partials + program * (2 * PARTS) + part)
        found = found | ~(tl.abs(value) < float("inf"))
    return found


@triton.jit
def _sum_of_parts(place, mask):
    total = tl.zeros((1,), tl.float64)
    for part in tl.static_range(PARTS):
        total += tl.sum(tl.load(place + part, mask=mask, other=0.0).to(tl.float64), 0)
    return total


@kernel
def defer_grad(
    total, features, order, out, row_scale, factor, scale_grad_parts, rows, d,
    total_stride, feature_stride, out_stride,
    B: tl.constexpr, BD: tl.constexpr, ORDER: tl.constexpr, ROW_SCALE: tl.constexpr,
    SCALE_GRAD: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """out[order] = factor * total / row_scale in out's dtype.

    scale_grad_parts[program] = <features, total> / GAIN. ROW_SCALE: the kernel chooses row_scale,
    for each row the power of two that brings its largest number to 2^14.
    """
    i = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    inside = i < rows
    to = i
    if ORDER:
        to = tl.load(order + i, mask=inside, other=0)
    multiplier = tl.zeros((B,), tl.float32) + tl.load(factor)
    if ROW_SCALE:
        largest = tl.zeros((B,), tl.float32)
        for c in tl.range(0, d, BD):
            j = c + tl.arange(0, BD)
            mask = inside[:, None] & (j < d)[None, :]
            t = tl.load(total + i[:, None] * total_stride + j[None, :], mask=mask, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(t), 1))
        largest = tl.abs(largest * multiplier)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        usual = (power >= 2.0**-100) & (power <= 2.0**100)
        own_scale = tl.where(usual, power * 2.0**-14, 1.0)
        tl.store(row_scale + to, own_scale, mask=inside)
        multiplier = multiplier / own_scale
    dot = tl.zeros((B, BD), tl.float32)
    for c in tl.range(0, d, BD):
        j = c + tl.arange(0, BD)
        mask = inside[:, None] & (j < d)[None, :]
        t = tl.load(total + i[:, None] * total_stride + j[None, :], mask=mask, other=0.0)
        if SCALE_GRAD:
            a = tl.load(features + i[:, None] * feature_stride + j[None, :], mask=mask, other=0.0)
            dot += t * a.to(tl.float32)
        value = (t * multiplier[:, None]).to(out.dtype.element_ty)
        tl.store(out + to[:, None] * out_stride + j[None, :], value, mask=mask)
    if SCALE_GRAD:
        tl.store(scale_grad_parts + tl.program_id(0), tl.sum(tl.sum(dot, 1), 0) * (1.0 / GAIN))


@kernel
def write_deferred_grad(
    deferred, row_scale, out, factor, divisor, rows, d, deferred_stride, out_stride,
    B: tl.constexpr, BD: tl.constexpr, ROW_SCALE: tl.constexpr,
):  # fmt: skip
    """out = deferred * row_scale * factor * divisor in out's dtype."""
    i = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    inside = i < rows
    multiplier = tl.zeros((B,), tl.float32) + tl.load(factor) * divisor
    if ROW_SCALE:
        multiplier *= tl.load(row_scale + i, mask=inside, other=0.0)
    for c in tl.range(0, d, BD):
        j = c + tl.arange(0, BD)
        mask = inside[:, None] & (j < d)[None, :]
        t = tl.load(deferred + i[:, None] * deferred_stride + j[None, :], mask=mask, other=0.0)
        value = (t.to(tl.float32) * multiplier[:, None]).to(out.dtype.element_ty)
        tl.store(out + i[:, None] * out_stride + j[None, :], value, mask=mask)
