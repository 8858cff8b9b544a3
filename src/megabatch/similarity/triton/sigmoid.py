"""Kernels of the sigmoid loss: losses and dS of a tile, one exponential and 1/8 root a pair.

For a negative pair of logit z, with e = e^z, the loss is log(1 + e) and dS is e / (1 + e). Both
come from products (1 + a)(1 + b) = 1 + p that are stored as p = a + b + ab. Adding the 1 would lose
small terms: at SigLIP's first bias, -10, e is 5e-5 and 1 + e is off by up to 0.1% of e, by the same
amount in all pairs whose features are alike. 16 pairs share a logarithm. 8 pairs share a
reciprocal, which is split by 1 / (1 + a) = (1 + b) / (1 + p).

1. `unmasked_tiles` computes every pair as a negative. A tile whose products leave float32's range
   gets a sum that is not finite.
2. `masked_tiles` recomputes such tiles, pair by pair, and those that hold positives.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megabatch.similarity.triton.blocks import block_kernel
from megabatch.similarity.triton.tiles import (
    LN2,
    LOG2E,
    B,
    BlockSide,
    halves,
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
def _join_halves(left, right):
    """The inverse of `halves`."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (B, 2 * left.shape[1]))


@triton.jit
def _product(a, b):
    """(1 + a)(1 + b) - 1."""
    return tl.fma(a, b, a) + b


@triton.jit
def _sum_of_halves(v):
    left, right = halves(v)
    return left + right


@triton.jit
def _split_reciprocal(r, a, b):
    """1 / (1 + a) and 1 / (1 + b), from r = 1 / ((1 + a)(1 + b)); no difference is taken."""
    return _join_halves(tl.fma(r, b, r), tl.fma(r, a, r))


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
def _sum_to_parts(v):
    """(B, width) summed to PARTS numbers, within warps if four warps hold 64 rows."""
    v = tl.sum(tl.reshape(v, (B // 64, PARTS, 2, 8, v.shape[1])), 0)
    return tl.sum(tl.sum(tl.sum(v, 1), 2), 1)


@block_kernel
def unmasked_tiles(
    x, y, ds, partials, scale, bias, weight,
    row_ranges, row_range_stride, col_ranges, col_range_stride,
    row_start, col_start, m, n, d, first_col_tile, col_tiles, diagonal_offset,
    BK: tl.constexpr, ROW_TILES: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_N: tl.constexpr, DIAGONAL: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """dS * GAIN of ROW_TILES row tiles per program, and its sums of losses (in base 2) and of dS.

    The sums go to partials[group of row tiles, column tile]; tiles that need masks add nothing to
    them. Unless EVEN_N, the last of these column tiles reaches past n. ds None: losses alone.
    """
    rows = BlockSide(x, None, row_start, m, None, row_ranges, row_range_stride, None)
    cols = BlockSide(y, None, col_start, n, None, col_ranges, col_range_stride, None)
    group, tj = swizzle(tl.program_id(0), tl.cdiv(m, B * ROW_TILES), col_tiles, GROUP)
    tj += first_col_tile
    j0 = tj * B
    k = tl.load(scale) * LOG2E
    shift = tl.load(bias) * LOG2E
    if not EVEN_N:
        shift = tl.where(j0 + tl.arange(0, B) < n, shift, float("-inf"))[None, :]
    losses = tl.zeros((B, B // 16), tl.float32)
    gradients = tl.zeros((B, B // 16), tl.float32)
    for r in tl.range(0, ROW_TILES, flatten=True):
        ti = group * ROW_TILES + r
        i = ti * B + tl.arange(0, B)
        acc = logits_tile(rows, cols, ti, tj, d, BK)
        counted = i < m
        if DIAGONAL != 0 or row_ranges is not None:
            last = tl.cdiv(m, B) - 1  # the last group may reach past the last row tile
            skipped = needs_mask(tl.minimum(ti, last), tj, rows, cols, diagonal_offset, DIAGONAL)
            counted = counted & ~skipped
        a, b = halves(tl.exp2(tl.fma(acc, k, shift)))
        of_2 = _product(a, b)
        c, e = halves(of_2)
        of_4 = _product(c, e)
        f, g = halves(of_4)
        of_8 = _product(f, g)
        left, right = halves(of_8)
        of_16 = _product(left, right)
        loss = tl.where(of_16 <= LARGEST, _log2_1p(of_16), float("inf"))
        if weight is not None:
            own = tl.load(weight + i, mask=i < m, other=0.0)[:, None]
            loss *= own
        losses += tl.where(counted[:, None], loss, 0.0)

        if ds is not None:
            root = tl.rsqrt(tl.fma(of_8, 1.0 / GAIN, 1.0 / GAIN))  # a division takes 7 operations
            inverse = root * root
            if weight is not None:
                inverse *= own
            inverse = _split_reciprocal(inverse, f, g)
            inverse = _split_reciprocal(inverse, c, e)
            left = tl.fma(a, b, a) * inverse  # a / (1 + a)
            right = tl.fma(a, b, b) * inverse
            of_16_pairs = _sum_of_halves(_sum_of_halves(_sum_of_halves(left + right)))
            gradients += tl.where(counted[:, None], of_16_pairs, 0.0)
            if SPLIT == 1:
                ds.store([ti * B, j0], _join_halves(left, right).to(ds.dtype))
            else:
                ds.store([ti * B, j0], left.to(ds.dtype))
                ds.store([ti * B, j0 + B // 2], right.to(ds.dtype))
    index = (group * tl.cdiv(n, B) + tj) * (2 * PARTS) + tl.arange(0, PARTS)
    tl.store(partials + index, _sum_to_parts(losses))
    if ds is not None:
        tl.store(partials + index + PARTS, _sum_to_parts(gradients))


@block_kernel
def masked_tiles(
    x, y, ds, partials, sums, stride, scale, bias, weight,
    row_ids, row_ranges, row_range_stride, col_ids, col_ranges, col_range_stride,
    row_start, col_start, m, n, d, diagonal_offset,
    BK: tl.constexpr, ROW_TILES: tl.constexpr, CHUNK: tl.constexpr, ALL: tl.constexpr,
    DIAGONAL: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """The tiles that `unmasked_tiles` leaves, or ALL; each program looks at CHUNK tiles at once.

    Adds to sums[:, program] (float64) the losses, dS, and dS times the products <x, y>, the last
    from this kernel's own tiles alone. ds None: no dS is stored.
    """
    rows = BlockSide(x, None, row_start, m, row_ids, row_ranges, row_range_stride, None)
    cols = BlockSide(y, None, col_start, n, col_ids, col_ranges, col_range_stride, None)
    width = tl.cdiv(n, B)
    total = tl.cdiv(m, B) * width
    start = tl.program_id(0) * CHUNK
    end = tl.minimum(start + CHUNK, total)
    loss_sum = tl.zeros((1,), tl.float64)
    ds_sum = tl.zeros((1,), tl.float64)
    scale_sum = tl.zeros((1,), tl.float64)
    if not ALL:
        index = start + tl.arange(0, CHUNK)
        inside = index < end
        index = tl.minimum(index, end - 1)
        row_tile = index // width
        col_tile = index % width
        program = row_tile // ROW_TILES * width + col_tile
        overflowed = _overflowed(partials, program)
        candidates = overflowed | needs_mask(
            row_tile, col_tile, rows, cols, diagonal_offset, DIAGONAL
        )  # fmt: skip
        # The sums of a program of `unmasked_tiles` are added once, with the first of its tiles.
        first = inside & ~overflowed & (row_tile % ROW_TILES == 0)
        parts = partials + program * (2 * PARTS)
        loss_sum += _sum_of_parts(parts, first)
        if ds is not None:
            ds_sum += _sum_of_parts(parts + PARTS, first)
        if tl.max((candidates & inside).to(tl.int32), 0) == 0:
            end = start
    factor = tl.load(scale)
    shift = tl.load(bias)
    for t in tl.range(start, end):
        ti = t // width
        tj = t % width
        wanted = True
        if not ALL:
            wanted = _overflowed(partials, ti // ROW_TILES * width + tj)
            wanted |= needs_mask(ti, tj, rows, cols, diagonal_offset, DIAGONAL)
        if wanted:
            s = logits_tile(rows, cols, ti, tj, d, BK)
            z = s * factor + shift
            negative, positive = mask_tile(
                z, rows, cols, ti, tj, diagonal_offset, 0, DIAGONAL, False, 0
            )  # fmt: skip
            sign = tl.where(negative, 1.0, tl.where(positive, -1.0, 0.0))  # 0: past the end
            u = z * LOG2E * sign
            e = tl.exp2(-tl.abs(u))
            root = tl.rsqrt(1.0 + e)
            # Comparisons that let a NaN through.
            loss = (tl.where(u <= 0, 0.0, u) + _log2_1p(e)) * (sign * sign)
            gradient = tl.where(u <= 0, e, tl.where(u > 0, 1.0, u)) * (root * root) * (sign * GAIN)
            if weight is not None:
                i = ti * B + tl.arange(0, B)
                own = tl.load(weight + i, mask=i < m, other=0.0)[:, None]
                loss *= own
                gradient *= own
            loss_sum += tl.sum(tl.sum(loss, 1), 0).to(tl.float64)
            ds_sum += tl.sum(tl.sum(gradient, 1), 0).to(tl.float64)
            scale_sum += tl.sum(tl.sum(gradient * s, 1), 0).to(tl.float64)
            if ds is not None:
                ds.store([ti * B, tj * B], gradient.to(ds.dtype))
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
