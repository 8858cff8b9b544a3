"""Backward kernels of log-sum-exp: dS of a block, rounded once to the features' dtype.

Two cuBLAS products with dS then give dx and dy.

1. `lse_and_grad` gathers, for one side, the log-sum-exps and their upstream gradients.
2. `unmasked_tiles` takes one exponential a logit for both sides, relative to the tile's largest row
   log-sum-exp.
3. `masked_tiles` takes two exponentials, with masks. It overwrites the tiles that need masks and
   those whose log-sum-exps lie too far apart to share a reference. Sharing loses probabilities
   under 2^(spread - 126): with a spread of 80 at most they are below 2^-46, 4M of them below 2^-24.
4. `write_grad` scales and rounds an accumulated product.

A side's `lse_and_grad` has these rows: log-sum-exp over negatives, its upstream gradient; if pairs
can be positive, the same two over positives, and the upstream gradient of their sum of logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megabatch.similarity.triton.launch import kernel
from megabatch.similarity.triton.tiles import (
    LOG2E,
    first_sums,
    logits_tile,
    mask_tile,
    needs_mask,
    swizzle,
)


@kernel
def lse_extremes(lse, out, size, tiles, B: tl.constexpr):
    """Smallest and largest log-sum-exp of each tile of B rows in log2: out[0], out[1]."""
    t = tl.program_id(0)
    i = t * B + tl.arange(0, B)
    _store_extremes(tl.load(lse + i, mask=i < size, other=0.0), i < size, out + t, tiles)


@triton.jit
def _store_extremes(lse, inside, out, tiles):
    lse = lse * LOG2E
    tl.store(out, tl.min(tl.where(inside, lse, float("inf")), 0))
    tl.store(out + tiles, tl.max(tl.where(inside, lse, float("-inf")), 0))


@kernel
def lse_and_grad(
    results, result_stride, gradients, gradient_stride, out, extremes, size, tiles,
    B: tl.constexpr, HAS_POSITIVES: tl.constexpr,
):  # fmt: skip
    """A side's rows of log-sum-exps and gradients, and its tiles' `lse_extremes`, in one launch.

    A log-sum-exp over no pair, -inf, becomes +inf with gradient 0: its exponentials are then 0.
    """
    t = tl.program_id(0)
    i = t * B + tl.arange(0, B)
    inside = i < size
    for kind in tl.static_range(2 if HAS_POSITIVES else 1):  # negatives, positives
        lse = tl.load(results + kind * result_stride + i, mask=inside, other=0.0)
        gradient = tl.load(gradients + kind * gradient_stride + i, mask=inside, other=0.0)
        empty = lse == float("-inf")
        lse = tl.where(empty, float("inf"), lse)
        tl.store(out + 2 * kind * size.to(tl.int64) + i, lse, mask=inside)
        gradient = tl.where(empty, 0.0, gradient)
        tl.store(out + (2 * kind + 1) * size.to(tl.int64) + i, gradient, mask=inside)
        if kind == 0:
            _store_extremes(lse, inside, extremes + t, tiles)
    if HAS_POSITIVES:
        gradient = tl.load(gradients + 2 * gradient_stride + i, mask=inside, other=0.0)
        tl.store(out + 4 * size.to(tl.int64) + i, gradient, mask=inside)


@triton.jit
def _needs_two_exponentials(
    ti, tj, row_extremes, row_tiles, col_extremes, col_tiles,
    COLS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Whether the log-sum-exps of a tile lie more than LIMIT apart; ti and tj may be vectors."""
    low = tl.load(row_extremes + ti)
    high = tl.load(row_extremes + row_tiles + ti)
    if COLS:
        low = tl.minimum(low, tl.load(col_extremes + tj))
        high = tl.maximum(high, tl.load(col_extremes + col_tiles + tj))
    return (high - low <= LIMIT) == 0  # infinite and NaN differences count as too large


@kernel
def unmasked_tiles(
    x, y, ds, scale, row_lse_and_grad, row_stride, col_lse_and_grad, col_stride, ceiling,
    guide_x, guide_y, guide_d, row_start, col_start, m, n, d,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ROW_TILES: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, COLS: tl.constexpr, CEILING: tl.constexpr,
    GUIDE: tl.constexpr, GUIDE_BK: tl.constexpr, TRIANGLE: tl.constexpr,
):  # fmt: skip
    """dS of ROW_TILES row tiles per program, as if no tile needed masks or two exponentials.

    dS is stored in SPLIT pieces. TRIANGLE, with ROW_TILES = 1: the block is symmetric; tiles above
    the diagonal are computed and stored twice, once transposed.
    """
    group, tj = swizzle(tl.program_id(0), tl.cdiv(m, BM * ROW_TILES), tl.cdiv(n, BN), GROUP)
    if TRIANGLE:  # noqa: SIM102 - one is known when the kernel is compiled
        if tj < group:
            return
    j0 = tj * BN
    j = j0 + tl.arange(0, BN)
    scale_factor = tl.load(scale)
    k = scale_factor * LOG2E
    if COLS:
        col_lse = tl.load(col_lse_and_grad + j, mask=j < n, other=float("inf")) * LOG2E
        col_grad = tl.load(col_lse_and_grad + col_stride + j, mask=j < n, other=0.0)
    for r in tl.range(0, ROW_TILES, flatten=True):
        i0 = (group * ROW_TILES + r) * BM
        i = i0 + tl.arange(0, BM)
        acc = first_sums(
            guide_x, guide_y, ceiling, i, row_start + i0, col_start + j0, m, guide_d,
            BM, BN, GUIDE_BK, GUIDE,
        )  # fmt: skip
        for q in tl.range(0, d, BK):
            a = x.load([row_start + i0, q])
            acc = tl.dot(a, y.load([col_start + j0, q]).T, acc, input_precision="tf32")
        row_lse = tl.load(row_lse_and_grad + i, mask=i < m, other=float("-inf")) * LOG2E
        reference = tl.max(row_lse, 0)
        row_grad = tl.load(row_lse_and_grad + row_stride + i, mask=i < m, other=0.0)
        row_grad = tl.where(i < m, row_grad * tl.exp2(reference - row_lse), 0.0)
        e = tl.exp2(acc * k - reference)
        if COLS:
            e = e * (row_grad[:, None] + (col_grad * tl.exp2(reference - col_lse))[None, :])
        else:
            e = e * row_grad[:, None]
        if GUIDE:
            e = tl.where(acc == float("-inf"), 0.0, e)
        elif CEILING:
            highest = tl.load(ceiling + i, mask=i < m, other=0.0)
            e = tl.where(acc * scale_factor > highest[:, None], 0.0, e)
        e = e.to(ds.dtype)
        _store_ds(ds, i0, j0, e, SPLIT)
        if TRIANGLE:  # noqa: SIM102 - one is known when the kernel is compiled
            if group < tj:
                _store_ds(ds, j0, i0, tl.trans(e), SPLIT)


@triton.jit
def _store_ds(ds, i0, j0, e, SPLIT: tl.constexpr):
    if SPLIT == 1:
        ds.store([i0, j0], e)
    else:
        halves = tl.reshape(e, (e.shape[0], 2, e.shape[1] // 2))
        left, right = tl.split(tl.permute(halves, (0, 2, 1)))
        ds.store([i0, j0], left)
        ds.store([i0, j0 + e.shape[1] // 2], right)


@kernel
def masked_tiles(
    x, y, ds, scale, row_lse_and_grad, row_stride, col_lse_and_grad, col_stride,
    row_extremes, row_tiles, col_extremes, col_tiles,
    row_ids, row_ranges, row_range_stride, col_ids, col_ranges, col_range_stride, ceiling,
    guide_x, guide_y, guide_d, row_start, col_start, m, n, d, diagonal_offset,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr, ALL: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DIAGONAL: tl.constexpr, IDS: tl.constexpr,
    PAIRED: tl.constexpr, CEILING: tl.constexpr, GUIDE: tl.constexpr, GUIDE_BK: tl.constexpr,
    HAS_POSITIVES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """dS of the tiles that need masks or two exponentials, or of ALL.

    Each program looks at CHUNK tiles at once and leaves early if none is its own.
    """
    tiles = tl.cdiv(n, BN)
    start = tl.program_id(0) * CHUNK
    total = tl.cdiv(m, BM) * tiles
    if not ALL:
        index = tl.minimum(start + tl.arange(0, CHUNK), total - 1)
        candidates = _needs_two_exponentials(
            index // tiles, index % tiles, row_extremes=row_extremes, row_tiles=row_tiles,
            col_extremes=col_extremes, col_tiles=col_tiles, COLS=COLS, LIMIT=LIMIT,
        ) | needs_mask(
            index // tiles, index % tiles, row_ranges=row_ranges, row_stride=row_range_stride,
            col_ranges=col_ranges, col_stride=col_range_stride, diagonal_offset=diagonal_offset,
            BM=BM, BN=BN, DIAGONAL=DIAGONAL, IDS=IDS,
        )  # fmt: skip
        if tl.max(candidates.to(tl.int32), 0) == 0:
            return
    k = tl.load(scale)
    for t in tl.range(start, tl.minimum(start + CHUNK, total)):
        ti = t // tiles
        tj = t % tiles
        wanted = True
        if not ALL:
            wanted = _needs_two_exponentials(
                ti, tj, row_extremes=row_extremes, row_tiles=row_tiles,
                col_extremes=col_extremes, col_tiles=col_tiles, COLS=COLS, LIMIT=LIMIT,
            ) | needs_mask(
                ti, tj, row_ranges=row_ranges, row_stride=row_range_stride, col_ranges=col_ranges,
                col_stride=col_range_stride, diagonal_offset=diagonal_offset,
                BM=BM, BN=BN, DIAGONAL=DIAGONAL, IDS=IDS,
            )  # fmt: skip
        if wanted:
            i0 = ti * BM
            j0 = tj * BN
            s = logits_tile(x, y, row_start + i0, col_start + j0, d, BM, BN, BK) * k
            compared = s
            if GUIDE:
                compared = logits_tile(
                    guide_x, guide_y, row_start + i0, col_start + j0, guide_d, BM, BN, GUIDE_BK
                )  # fmt: skip
            negative, positive = mask_tile(
                compared, i0, j0, m=m, n=n, diagonal_offset=diagonal_offset, row_ids=row_ids,
                col_ids=col_ids, ceiling=ceiling, BM=BM, BN=BN, DIAGONAL=DIAGONAL, IDS=IDS,
                PAIRED=PAIRED, CEILING=CEILING,
            )  # fmt: skip
            g = tl.zeros((BM, BN), tl.float32)  # of a negative
            h = tl.zeros((BM, BN), tl.float32)  # of a positive
            if ROWS:
                i = i0 + tl.arange(0, BM)
                g += _softmax_grad(s, row_lse_and_grad, row_stride, i, m, 0, 1)
                if HAS_POSITIVES:
                    h += _softmax_grad(s, row_lse_and_grad, row_stride, i, m, 2, 1)
                    of_sum = tl.load(row_lse_and_grad + 4 * row_stride + i, mask=i < m, other=0.0)
                    h += of_sum[:, None]
            if COLS:
                j = j0 + tl.arange(0, BN)
                g += _softmax_grad(s, col_lse_and_grad, col_stride, j, n, 0, 0)
                if HAS_POSITIVES:
                    h += _softmax_grad(s, col_lse_and_grad, col_stride, j, n, 2, 0)
                    of_sum = tl.load(col_lse_and_grad + 4 * col_stride + j, mask=j < n, other=0.0)
                    h += of_sum[None, :]
            g = tl.where(negative, g, tl.where(positive, h, 0.0))
            ds.store([i0, j0], g.to(ds.dtype))


@triton.jit
def _softmax_grad(
    s, lse_and_grad, stride, index, size, START: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """upstream gradient * e^(s - log-sum-exp) of one side; AXIS 1: of the rows.

    START: 0 for the log-sum-exp over negatives, 2 for that over positives.
    """
    inside = index < size
    lse = tl.load(lse_and_grad + START * stride + index, mask=inside, other=float("inf"))
    gradient = tl.load(lse_and_grad + (START + 1) * stride + index, mask=inside, other=0.0)
    e = tl.exp2((s - tl.expand_dims(lse, AXIS)) * LOG2E)
    # For a pair of the other kind the exponential may overflow; the caller masks it out.
    return e * tl.expand_dims(gradient, AXIS)


@kernel
def write_grad(
    total, features, out, factor, scale_grad_parts, rows, d,
    total_stride, feature_stride, out_stride,
    B: tl.constexpr, BD: tl.constexpr, SCALE_GRAD: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """out = factor * total in out's dtype.

    scale_grad_parts[program] = <features, total> of the program's B rows.
    """
    i = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    f = tl.load(factor)
    dot = tl.zeros((B, BD), tl.float32)
    for c in tl.range(0, d, BD):
        j = c + tl.arange(0, BD)
        mask = (i < rows)[:, None] & (j < d)[None, :]
        t = tl.load(total + i[:, None] * total_stride + j[None, :], mask=mask, other=0.0)
        if SCALE_GRAD:
            a = tl.load(features + i[:, None] * feature_stride + j[None, :], mask=mask, other=0.0)
            dot += t * a.to(tl.float32)
        if WRITE:
            value = (t * f).to(out.dtype.element_ty)
            tl.store(out + i[:, None] * out_stride + j[None, :], value, mask=mask)
    if SCALE_GRAD:
        tl.store(scale_grad_parts + tl.program_id(0), tl.sum(tl.sum(dot, 1), 0))
