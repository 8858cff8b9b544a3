"""The sigmoid loss's kernels: losses and dS of a tile, one exponential and 1/8 root a pair.

For a negative pair of logit z, with e = e^z, the loss is log(1 + e) and dS is e / (1 + e). Both
come of products (1 + a)(1 + b) = 1 + p that are carried without their one, as p = a + b + ab. The
one would swallow small terms: at SigLIP's first bias, -10, e is 5e-5 and 1 + e is off by up to 0.1%
of it, alike in all pairs whose features are alike. 16 pairs share a logarithm. 8 pairs share a
reciprocal, which is handed down by 1 / (1 + a) = (1 + b) / (1 + p).

`tile` takes all pairs for negatives, and gives no finite sum to a tile whose products float32 does
not hold. `exact` does such tiles anew, pair by pair, and those that hold positives.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megabatch.similarity.backends.triton.launch import kernel
from megabatch.similarity.backends.triton.tiles import (
    LN2,
    LOG2E,
    logits_tile,
    mask_tile,
    mixed,
    swizzle,
)

#: Largest product of 16 pairs that counts: the reciprocal of a larger one is no normal number.
LARGEST = tl.constexpr(2.0**120)
#: A program's sums are in so many parts: one of each of four warps, none waits for another.
PARTS = tl.constexpr(4)


@triton.jit
def _halves(v, BM: tl.constexpr, B: tl.constexpr):
    """(BM, B) as its left and its right half, each thread's values staying its own."""
    return tl.split(tl.permute(tl.reshape(v, (BM, 2, B // 2)), (0, 2, 1)))


@triton.jit
def _beside(left, right, BM: tl.constexpr, B: tl.constexpr):
    """The inverse of `_halves`."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (BM, B))


@triton.jit
def _product(a, b):
    """(1 + a)(1 + b) - 1."""
    return tl.fma(a, b, a) + b


@triton.jit
def _folded(v, BM: tl.constexpr, B: tl.constexpr):
    left, right = _halves(v, BM, B)
    return _product(left, right)


@triton.jit
def _summed(v, BM: tl.constexpr, B: tl.constexpr):
    left, right = _halves(v, BM, B)
    return left + right


@triton.jit
def _handed_down(r, a, b, BM: tl.constexpr, B: tl.constexpr):
    """1 / (1 + a) beside 1 / (1 + b), from r = 1 / ((1 + a)(1 + b)); no difference is taken."""
    return _beside(tl.fma(r, b, r), tl.fma(r, a, r), BM, B)


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
def _quarter_sums(v, BM: tl.constexpr, B: tl.constexpr):
    """(BM, B) summed to PARTS numbers, within warps where four warps hold 64 rows."""
    v = tl.sum(tl.reshape(v, (BM // 64, PARTS, 2, 8, B)), 0)
    return tl.sum(tl.sum(tl.sum(v, 1), 2), 1)


@kernel
def tile(
    x, y, ds, parts, scale, bias, weight, row_ranges, row_range_stride, column_ranges,
    column_range_stride, row_start, column_start, m, n, d, first_column_tile, column_tiles,
    diagonal_offset,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr, EVEN: tl.constexpr, DIAGONAL: tl.constexpr, IDS: tl.constexpr,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """dS * GAIN of R row tiles a program, and its sums of losses (in base 2) and of dS.

    Those are parts[group of R row tiles, tile column]; mixed tiles count nothing in them. Not EVEN:
    some of these column_tiles reaches past n.
    """
    group, tj = swizzle(tl.program_id(0), tl.cdiv(m, BM * R), column_tiles, GROUP)
    tj += first_column_tile
    j0 = tj * BN
    k = tl.load(scale) * LOG2E
    shift = tl.load(bias) * LOG2E
    if not EVEN:
        shift = tl.where(j0 + tl.arange(0, BN) < n, shift, float("-inf"))[None, :]
    losses = tl.zeros((BM, BN // 16), tl.float32)
    slopes = tl.zeros((BM, BN // 16), tl.float32)
    for r in tl.range(0, R, flatten=True):
        ti = group * R + r
        i0 = ti * BM
        i = i0 + tl.arange(0, BM)
        acc = tl.zeros((BM, BN), tl.float32)
        for q in tl.range(0, d, BK):
            a = x.load([row_start + i0, q])
            acc = tl.dot(a, y.load([column_start + j0, q]).T, acc, input_precision="tf32")
        counted = i < m
        if DIAGONAL or IDS:
            # The last group may reach past the rows' tiles.
            skipped = mixed(
                tl.minimum(ti, tl.cdiv(m, BM) - 1), tj, row_ranges, row_range_stride,
                column_ranges, column_range_stride, diagonal_offset, BM, BN, DIAGONAL, IDS,
            )  # fmt: skip
            counted = counted & ~skipped
        a, b = _halves(tl.exp2(tl.fma(acc, k, shift)), BM, BN)
        of_2 = _product(a, b)
        c, e = _halves(of_2, BM, BN // 2)
        of_4 = _product(c, e)
        f, g = _halves(of_4, BM, BN // 4)
        of_8 = _product(f, g)
        of_16 = _folded(of_8, BM, BN // 8)
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
            inverse = _handed_down(inverse, f, g, BM, BN // 4)
            inverse = _handed_down(inverse, c, e, BM, BN // 2)
            left = tl.fma(a, b, a) * inverse  # a / (1 + a)
            right = tl.fma(a, b, b) * inverse
            slope = _summed(_summed(_summed(left + right, BM, BN // 2), BM, BN // 4), BM, BN // 8)
            slopes += tl.where(counted[:, None], slope, 0.0)
            if SPLIT == 1:
                ds.store([i0, j0], _beside(left, right, BM, BN).to(ds.dtype))
            else:
                ds.store([i0, j0], left.to(ds.dtype))
                ds.store([i0, j0 + BN // 2], right.to(ds.dtype))
    index = (group * tl.cdiv(n, BN) + tj) * (2 * PARTS) + tl.arange(0, PARTS)
    tl.store(parts + index, _quarter_sums(losses, BM, BN // 16))
    if GRADIENT:
        tl.store(parts + index + PARTS, _quarter_sums(slopes, BM, BN // 16))


@kernel
def exact(
    x, y, ds, parts, sums, stride, scale, bias, weight, row_ids, row_ranges, row_range_stride,
    column_ids, column_ranges, column_range_stride, row_start, column_start, m, n, d,
    diagonal_offset,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
    ALL: tl.constexpr, DIAGONAL: tl.constexpr, IDS: tl.constexpr, WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """The tiles that `tile` leaves, or ALL; each program looks at CHUNK tiles at once.

    Adds to sums[:, program] (float64) the losses, dS, and dS times the products <x, y>, the last
    from its own tiles alone. Without GRADIENT no dS is stored.
    """
    columns = tl.cdiv(n, BN)
    total = tl.cdiv(m, BM) * columns
    start = tl.program_id(0) * CHUNK
    end = tl.minimum(start + CHUNK, total)
    loss_sum = tl.zeros((1,), tl.float64)
    slope_sum = tl.zeros((1,), tl.float64)
    inner_sum = tl.zeros((1,), tl.float64)
    if not ALL:
        index = start + tl.arange(0, CHUNK)
        inside = index < end
        index = tl.minimum(index, end - 1)
        flagged = _flagged(parts, index // columns // R * columns + index % columns)
        some = flagged | mixed(
            index // columns, index % columns, row_ranges, row_range_stride,
            column_ranges, column_range_stride, diagonal_offset, BM, BN, DIAGONAL, IDS,
        )  # fmt: skip
        # What a program of `tile` found is added once, with the first of its tiles.
        first = inside & ~flagged & (index // columns % R == 0)
        place = (index // columns // R * columns + index % columns) * (2 * PARTS)
        loss_sum += _sum_of_parts(parts + place, first)
        if GRADIENT:
            slope_sum += _sum_of_parts(parts + place + PARTS, first)
        if tl.max((some & inside).to(tl.int32), 0) == 0:
            end = start
    factor = tl.load(scale)
    shift = tl.load(bias)
    for t in tl.range(start, end):
        ti = t // columns
        tj = t % columns
        wanted = True
        if not ALL:
            wanted = _flagged(parts, ti // R * columns + tj) | mixed(
                ti, tj, row_ranges, row_range_stride, column_ranges, column_range_stride,
                diagonal_offset, BM, BN, DIAGONAL, IDS,
            )  # fmt: skip
        if wanted:
            i0 = ti * BM
            j0 = tj * BN
            s = logits_tile(x, y, row_start + i0, column_start + j0, d, BM, BN, BK)
            z = s * factor + shift
            negative, positive = mask_tile(
                z, i0, j0, m, n, diagonal_offset, row_ids, column_ids, None,
                BM, BN, DIAGONAL, IDS, 0, 0,
            )  # fmt: skip
            sign = tl.where(negative, 1.0, tl.where(positive, -1.0, 0.0))  # 0: past the end
            u = z * LOG2E * sign
            e = tl.exp2(-tl.abs(u))
            root = tl.rsqrt(1.0 + e)
            # Comparisons that a NaN passes through.
            loss = (tl.where(u <= 0, 0.0, u) + _log2_1p(e)) * (sign * sign)
            slope = tl.where(u <= 0, e, tl.where(u > 0, 1.0, u)) * (root * root) * (sign * GAIN)
            if WEIGHT:
                i = i0 + tl.arange(0, BM)
                own = tl.load(weight + i, mask=i < m, other=0.0)[:, None]
                loss *= own
                slope *= own
            loss_sum += tl.sum(tl.sum(loss, 1), 0).to(tl.float64)
            slope_sum += tl.sum(tl.sum(slope, 1), 0).to(tl.float64)
            inner_sum += tl.sum(tl.sum(slope * s, 1), 0).to(tl.float64)
            if GRADIENT:
                ds.store([i0, j0], slope.to(ds.dtype))
    place = sums + tl.program_id(0) + tl.arange(0, 1)
    tl.store(place, tl.load(place) + loss_sum * LN2)
    tl.store(place + stride, tl.load(place + stride) + slope_sum * (1.0 / GAIN))
    tl.store(place + 2 * stride, tl.load(place + 2 * stride) + inner_sum * (1.0 / GAIN))


@triton.jit
def _flagged(parts, program):
    """Whether programs of `tile` found no finite sum; `program` may be a vector."""
    found = program < 0
    for part in tl.static_range(PARTS):
        value = tl.load(parts + program * (2 * PARTS) + part)
        found = found | ~(tl.abs(value) < float("inf"))
    return found


@triton.jit
def _sum_of_parts(place, mask):
    total = tl.zeros((1,), tl.float64)
    for part in tl.static_range(PARTS):
        total += tl.sum(tl.load(place + part, mask=mask, other=0.0).to(tl.float64), 0)
    return total


@kernel
def keep(
    total, features, order, out, units, factor, inner, rows, d, total_stride, feature_stride,
    out_stride,
    B: tl.constexpr, BD: tl.constexpr, ORDER: tl.constexpr, UNITS: tl.constexpr,
    INNER: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """out[order] = factor * total / units in out's dtype.

    inner[program] = <features, total> / GAIN. UNITS: one a row is chosen, a power of two that
    brings its largest number to 2^14.
    """
    i = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    inside = i < rows
    to = i
    if ORDER:
        to = tl.load(order + i, mask=inside, other=0)
    scaling = tl.zeros((B,), tl.float32) + tl.load(factor)
    if UNITS:
        largest = tl.zeros((B,), tl.float32)
        for c in tl.range(0, d, BD):
            j = c + tl.arange(0, BD)
            mask = inside[:, None] & (j < d)[None, :]
            t = tl.load(total + i[:, None] * total_stride + j[None, :], mask=mask, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(t), 1))
        largest = tl.abs(largest * scaling)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        usual = (power >= 2.0**-100) & (power <= 2.0**100)
        unit = tl.where(usual, power * 2.0**-14, 1.0)
        tl.store(units + to, unit, mask=inside)
        scaling = scaling / unit
    dot = tl.zeros((B, BD), tl.float32)
    for c in tl.range(0, d, BD):
        j = c + tl.arange(0, BD)
        mask = inside[:, None] & (j < d)[None, :]
        t = tl.load(total + i[:, None] * total_stride + j[None, :], mask=mask, other=0.0)
        if INNER:
            a = tl.load(features + i[:, None] * feature_stride + j[None, :], mask=mask, other=0.0)
            dot += t * a.to(tl.float32)
        value = (t * scaling[:, None]).to(out.dtype.element_ty)
        tl.store(out + to[:, None] * out_stride + j[None, :], value, mask=mask)
    if INNER:
        tl.store(inner + tl.program_id(0), tl.sum(tl.sum(dot, 1), 0) * (1.0 / GAIN))


@kernel
def release(
    kept, units, out, factor, times, rows, d, kept_stride, out_stride,
    B: tl.constexpr, BD: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """out = kept * units * factor * times in out's dtype."""
    i = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    inside = i < rows
    scaling = tl.zeros((B,), tl.float32) + tl.load(factor) * times
    if UNITS:
        scaling *= tl.load(units + i, mask=inside, other=0.0)
    for c in tl.range(0, d, BD):
        j = c + tl.arange(0, BD)
        mask = inside[:, None] & (j < d)[None, :]
        t = tl.load(kept + i[:, None] * kept_stride + j[None, :], mask=mask, other=0.0)
        value = (t.to(tl.float32) * scaling[:, None]).to(out.dtype.element_ty)
        tl.store(out + i[:, None] * out_stride + j[None, :], value, mask=mask)
