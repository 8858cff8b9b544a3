"""The sigmoid loss's kernels: one for the losses of a tile and for its dS.

`tile` treats all pairs as negatives whose e^logit float32 holds; a tile of which that is not true,
or which is mixed or reaches past the end, gets no finite sum, and `exact` does it anew.

With e = e^logit a negative's loss is log(1 + e) and its dS e / (1 + e). Sums of log(1 + e) take one
logarithm for 16 pairs: (1 + a)(1 + b) = 1 + (a + b + ab), so that products minus one are carried
along. Without the one, which would swallow small e: at SigLIP's first bias, -10, e is 5e-5, and
1 + e is off by up to 0.1% of it, alike in all pairs where features are alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megabatch.similarity.fused.tiles import LOG2E, logits_tile, mask_tile, mixed, swizzle


@triton.jit
def _joined(p, BM: tl.constexpr, N: tl.constexpr):
    """(1 + a)(1 + b) - 1 of the left half's a and the right half's b; (BM, N) -> (BM, N / 2).

    Halves of 8 columns and more lie in the same threads.
    """
    a, b = tl.split(tl.permute(tl.reshape(p, (BM, 2, N // 2)), (0, 2, 1)))
    return a + b + a * b


@triton.jit
def _log1p(p):
    """log(1 + p) for p >= 0, also where 1 + p rounds p away; infinite p gives infinity."""
    s = p / (2.0 + p)
    q = s * s
    small = 2.0 * s * (1.0 + q * (1.0 / 3.0 + q * (0.2 + q * (1.0 / 7.0 + q * (1.0 / 9.0)))))
    return tl.where(p < 0.25, small, tl.log(1.0 + p))


@triton.jit(
    do_not_specialize=[
        "row_start",
        "column_start",
        "m",
        "n",
        "diagonal_offset",
        "row_range_stride",
        "column_range_stride",
    ]
)
def tile(
    x,
    y,
    ds,
    scale,
    bias,
    weight,
    sums,
    row_ranges,
    row_range_stride,
    column_ranges,
    column_range_stride,
    row_start,
    column_start,
    m,
    n,
    d,
    diagonal_offset,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    DIAGONAL: tl.constexpr,
    IDS: tl.constexpr,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    GAIN: tl.constexpr,
):
    """dS, times GAIN, of R row tiles a program; sums[0], sums[1] (tiles) of losses and of dS."""
    tiles = tl.cdiv(m, BM)
    columns = tl.cdiv(n, BN)
    group, tj = swizzle(tl.program_id(0), tl.cdiv(m, BM * R), columns, GROUP)
    j0 = tj * BN
    k = tl.load(scale)
    shift = tl.load(bias)
    for r in tl.range(0, R, flatten=True):
        ti = group * R + r
        i0 = ti * BM
        i = i0 + tl.arange(0, BM)
        acc = tl.zeros((BM, BN), tl.float32)
        for q in tl.range(0, d, BK):
            a = x.load([row_start + i0, q])
            acc = tl.dot(a, y.load([column_start + j0, q]).T, acc, input_precision="tf32")
        # Factors with LOG2E in them would be rounded alike for all pairs: 3e-6 of the sum where
        # features are alike, for one multiplication less.
        e = tl.exp2((acc * k + shift) * LOG2E)
        products = _joined(_joined(e, BM, BN), BM, BN // 2)
        products = _joined(_joined(products, BM, BN // 4), BM, BN // 8)
        losses = tl.sum(_log1p(products), 1)
        root = tl.rsqrt(1.0 + e)
        g = e * (root * root)  # a division takes three operations more
        if WEIGHT:
            own = tl.load(weight + i, mask=i < m, other=0.0)
            losses *= own
            g *= own[:, None]
        skipped = mixed(
            tl.minimum(ti, tiles - 1), tj, row_ranges, row_range_stride,
            column_ranges, column_range_stride, diagonal_offset, BM, BN, DIAGONAL, IDS,
        )  # fmt: skip
        skipped = skipped | (i0 + BM > m) | (j0 + BN > n)
        total = tl.where(skipped, float("inf"), tl.sum(losses, 0))
        index = tl.minimum(ti, tiles - 1) * columns + tj
        tl.store(sums + index, total, mask=ti < tiles)
        if GRADIENT:
            tl.store(sums + tiles * columns + index, tl.sum(tl.sum(g, 1), 0), mask=ti < tiles)
            g = (g * GAIN).to(ds.dtype)
            if SPLIT == 1:
                ds.store([i0, j0], g)
            else:
                left, right = tl.split(tl.permute(tl.reshape(g, (BM, 2, BN // 2)), (0, 2, 1)))
                ds.store([i0, j0], left)
                ds.store([i0, j0 + BN // 2], right)


@triton.jit(do_not_specialize=["row_start", "column_start", "m", "n", "diagonal_offset"])
def exact(
    x,
    y,
    ds,
    scale,
    bias,
    weight,
    sums,
    row_ids,
    column_ids,
    row_start,
    column_start,
    m,
    n,
    d,
    diagonal_offset,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    CHUNK: tl.constexpr,
    DIAGONAL: tl.constexpr,
    IDS: tl.constexpr,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    GAIN: tl.constexpr,
):
    """The tiles without a finite sum anew, with masks; each program looks at CHUNK at once."""
    columns = tl.cdiv(n, BN)
    total = tl.cdiv(m, BM) * columns
    start = tl.program_id(0) * CHUNK
    index = tl.minimum(start + tl.arange(0, CHUNK), total - 1)
    missing = ~(tl.load(sums + index) < float("inf"))
    if tl.max(missing.to(tl.int32), 0) == 0:
        return
    k = tl.load(scale)
    shift = tl.load(bias)
    for t in tl.range(start, tl.minimum(start + CHUNK, total)):
        if ~(tl.load(sums + t) < float("inf")):
            i0 = t // columns * BM
            j0 = t % columns * BN
            s = logits_tile(x, y, row_start + i0, column_start + j0, d, BM, BN, BK) * k + shift
            negative, positive = mask_tile(
                s, i0, j0, m, n, diagonal_offset, row_ids, column_ids, weight,
                BM, BN, DIAGONAL, IDS, False, 0,
            )  # fmt: skip
            s = tl.where(positive, -s, s)
            e = tl.exp2(-tl.abs(s) * LOG2E)
            losses = tl.maximum(s, 0.0) + _log1p(e)
            losses = tl.sum(tl.where(negative | positive, losses, 0.0), 1)
            g = tl.where(s > 0, 1.0, e) / (1.0 + e)
            g = tl.where(s == s, g, s)  # NaN stays
            g = tl.where(negative, g, tl.where(positive, -g, 0.0))
            if WEIGHT:
                i = i0 + tl.arange(0, BM)
                own = tl.load(weight + i, mask=i < m, other=0.0)
                losses *= own
                g *= own[:, None]
            tl.store(sums + t, tl.sum(losses, 0))
            if GRADIENT:
                tl.store(sums + total + t, tl.sum(tl.sum(g, 1), 0))
                ds.store([i0, j0], (g * GAIN).to(ds.dtype))
