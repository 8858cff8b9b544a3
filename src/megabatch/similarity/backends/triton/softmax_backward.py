"""The backward kernels: dS of a tile, rounded once to the features' dtype, for two products.

`pull` gathers what a side sends back. `tile` takes one exponential a logit for both sides, relative
to the tile's largest row log-sum-exp; `exact` takes two, with masks, and writes over what `tile`
wrote in mixed tiles and where a tile's log-sum-exps lie too far apart to share a reference:
sharing loses probabilities under 2^(spread - 126); with a spread of 80 at most they are below
2^-46, 4M of them below 2^-24.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megabatch.similarity.backends.triton.launch import kernel
from megabatch.similarity.backends.triton.tiles import LOG2E, logits_tile, mask_tile, mixed, swizzle


@kernel
def extremes(pull, out, size, tiles, B: tl.constexpr):
    """Smallest and largest log-sum-exp of each tile of B rows in log2: out[0], out[1]."""
    t = tl.program_id(0)
    i = t * B + tl.arange(0, B)
    _extremes(tl.load(pull + i, mask=i < size, other=0.0), i < size, out + t, tiles)


@triton.jit
def _extremes(value, inside, out, tiles):
    value = value * LOG2E
    tl.store(out, tl.min(tl.where(inside, value, float("inf")), 0))
    tl.store(out + tiles, tl.max(tl.where(inside, value, float("-inf")), 0))


@kernel
def pull(
    values, value_stride, gradients, gradient_stride, out, extremes_out, size, tiles,
    B: tl.constexpr, KINDS: tl.constexpr,
):  # fmt: skip
    """A side's pull as `states.pull_of` makes it, and its tiles' `extremes`, in one launch."""
    t = tl.program_id(0)
    i = t * B + tl.arange(0, B)
    inside = i < size
    for kind in tl.static_range(KINDS):
        value = tl.load(values + kind * value_stride + i, mask=inside, other=0.0)
        gradient = tl.load(gradients + kind * gradient_stride + i, mask=inside, other=0.0)
        empty = value == float("-inf")
        value = tl.where(empty, float("inf"), value)
        tl.store(out + 2 * kind * size.to(tl.int64) + i, value, mask=inside)
        gradient = tl.where(empty, 0.0, gradient)
        tl.store(out + (2 * kind + 1) * size.to(tl.int64) + i, gradient, mask=inside)
        if kind == 0:
            _extremes(value, inside, extremes_out + t, tiles)
    if KINDS == 2:
        gradient = tl.load(gradients + 2 * gradient_stride + i, mask=inside, other=0.0)
        tl.store(out + 4 * size.to(tl.int64) + i, gradient, mask=inside)


@triton.jit
def _apart(
    ti,
    tj,
    row_extremes,
    row_tiles,
    column_extremes,
    column_tiles,
    row_ranges,
    row_range_stride,
    column_ranges,
    column_range_stride,
    diagonal_offset,
    BM: tl.constexpr,
    BN: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIAGONAL: tl.constexpr,
    IDS: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Whether `exact` must take a tile: see the module."""
    low = tl.load(row_extremes + ti)
    high = tl.load(row_extremes + row_tiles + ti)
    if COLUMNS:
        low = tl.minimum(low, tl.load(column_extremes + tj))
        high = tl.maximum(high, tl.load(column_extremes + column_tiles + tj))
    apart = (high - low <= LIMIT) == 0  # infinite and NaN differences count as too large
    return apart | mixed(
        ti, tj, row_ranges, row_range_stride, column_ranges, column_range_stride,
        diagonal_offset, BM, BN, DIAGONAL, IDS,
    )  # fmt: skip


@kernel
def tile(
    x, y, ds, scale, row_pull, row_stride, column_pull, column_stride, ceiling, row_start,
    column_start, m, n, d,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr, COLUMNS: tl.constexpr, CEILING: tl.constexpr, TRIANGLE: tl.constexpr,
):  # fmt: skip
    """dS of R row tiles a program, as if their log-sum-exps lay close; stored in SPLIT pieces.

    TRIANGLE, with R = 1: the block is symmetric. What lies below the diagonal comes from the tiles
    above it, which are stored twice.
    """
    group, tj = swizzle(tl.program_id(0), tl.cdiv(m, BM * R), tl.cdiv(n, BN), GROUP)
    if TRIANGLE:  # noqa: SIM102 - one is known when the kernel is compiled
        if tj < group:
            return
    j0 = tj * BN
    j = j0 + tl.arange(0, BN)
    scale_factor = tl.load(scale)
    k = scale_factor * LOG2E
    if COLUMNS:
        c = tl.load(column_pull + j, mask=j < n, other=float("inf")) * LOG2E
        weight = tl.load(column_pull + column_stride + j, mask=j < n, other=0.0)
    for r in tl.range(0, R, flatten=True):
        i0 = (group * R + r) * BM
        i = i0 + tl.arange(0, BM)
        acc = tl.zeros((BM, BN), tl.float32)
        for q in tl.range(0, d, BK):
            a = x.load([row_start + i0, q])
            acc = tl.dot(a, y.load([column_start + j0, q]).T, acc, input_precision="tf32")
        own = tl.load(row_pull + i, mask=i < m, other=float("-inf")) * LOG2E
        reference = tl.max(own, 0)
        factor = tl.load(row_pull + row_stride + i, mask=i < m, other=0.0)
        factor = tl.where(i < m, factor * tl.exp2(reference - own), 0.0)
        e = tl.exp2(acc * k - reference)
        if COLUMNS:
            e = e * (factor[:, None] + (weight * tl.exp2(reference - c))[None, :])
        else:
            e = e * factor[:, None]
        if CEILING:
            highest = tl.load(ceiling + i, mask=i < m, other=0.0)
            e = tl.where(acc * scale_factor > highest[:, None], 0.0, e)
        e = e.to(ds.dtype)
        _store(ds, i0, j0, e, SPLIT)
        if TRIANGLE:  # noqa: SIM102 - one is known when the kernel is compiled
            if group < tj:
                _store(ds, j0, i0, tl.trans(e), SPLIT)


@triton.jit
def _store(ds, i0, j0, e, SPLIT: tl.constexpr):
    if SPLIT == 1:
        ds.store([i0, j0], e)
    else:
        halves = tl.reshape(e, (e.shape[0], 2, e.shape[1] // 2))
        left, right = tl.split(tl.permute(halves, (0, 2, 1)))
        ds.store([i0, j0], left)
        ds.store([i0, j0 + e.shape[1] // 2], right)


@kernel
def exact(
    x, y, ds, scale, row_pull, row_stride, column_pull, column_stride, row_extremes, row_tiles,
    column_extremes, column_tiles, row_ids, row_ranges, row_range_stride, column_ids,
    column_ranges, column_range_stride, ceiling, row_start, column_start, m, n, d,
    diagonal_offset,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr,
    ALL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIAGONAL: tl.constexpr,
    IDS: tl.constexpr, OWN: tl.constexpr, CEILING: tl.constexpr, POSITIVES: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """dS of the other tiles, or of ALL; each program looks at CHUNK tiles at once."""
    tiles = tl.cdiv(n, BN)
    start = tl.program_id(0) * CHUNK
    total = tl.cdiv(m, BM) * tiles
    if not ALL:
        index = tl.minimum(start + tl.arange(0, CHUNK), total - 1)
        apart = _apart(
            index // tiles, index % tiles, row_extremes, row_tiles, column_extremes, column_tiles,
            row_ranges, row_range_stride, column_ranges, column_range_stride,
            diagonal_offset, BM, BN, COLUMNS, DIAGONAL, IDS, LIMIT,
        )  # fmt: skip
        if tl.max(apart.to(tl.int32), 0) == 0:
            return
    k = tl.load(scale)
    for t in tl.range(start, tl.minimum(start + CHUNK, total)):
        ti = t // tiles
        tj = t % tiles
        wanted = True
        if not ALL:
            wanted = _apart(
                ti, tj, row_extremes, row_tiles, column_extremes, column_tiles,
                row_ranges, row_range_stride, column_ranges, column_range_stride,
                diagonal_offset, BM, BN, COLUMNS, DIAGONAL, IDS, LIMIT,
            )  # fmt: skip
        if wanted:
            i0 = ti * BM
            j0 = tj * BN
            s = logits_tile(x, y, row_start + i0, column_start + j0, d, BM, BN, BK) * k
            negative, positive = mask_tile(
                s, i0, j0, m, n, diagonal_offset, row_ids, column_ids, ceiling,
                BM, BN, DIAGONAL, IDS, OWN, CEILING,
            )  # fmt: skip
            g = tl.zeros((BM, BN), tl.float32)
            h = tl.zeros((BM, BN), tl.float32)
            if ROWS:
                i = i0 + tl.arange(0, BM)
                g += _pull(s, row_pull, row_stride, i, m, 0, 1)
                if POSITIVES:
                    h += _pull(s, row_pull, row_stride, i, m, 2, 1)
                    h += tl.load(row_pull + 4 * row_stride + i, mask=i < m, other=0.0)[:, None]
            if COLUMNS:
                j = j0 + tl.arange(0, BN)
                g += _pull(s, column_pull, column_stride, j, n, 0, 0)
                if POSITIVES:
                    h += _pull(s, column_pull, column_stride, j, n, 2, 0)
                    h += tl.load(column_pull + 4 * column_stride + j, mask=j < n, other=0.0)[
                        None, :
                    ]
            g = tl.where(negative, g, tl.where(positive, h, 0.0))
            ds.store([i0, j0], g.to(ds.dtype))


@triton.jit
def _pull(s, pull, stride, index, size, START: tl.constexpr, AXIS: tl.constexpr):
    """upstream gradient * e^(s - log-sum-exp) of one side (AXIS 1: rows)."""
    inside = index < size
    reference = tl.load(pull + START * stride + index, mask=inside, other=float("inf"))
    weight = tl.load(pull + (START + 1) * stride + index, mask=inside, other=0.0)
    e = tl.exp2((s - tl.expand_dims(reference, AXIS)) * LOG2E)
    # Beyond its own kind of pair an exponential may overflow; it is masked out afterwards.
    return e * tl.expand_dims(weight, AXIS)


@kernel
def finish(
    total, features, out, factor, inner, rows, d, total_stride, feature_stride, out_stride,
    B: tl.constexpr, BD: tl.constexpr, INNER: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """out = factor * total in out's dtype, inner[program] = <features, total> of B rows."""
    i = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    f = tl.load(factor)
    dot = tl.zeros((B, BD), tl.float32)
    for c in tl.range(0, d, BD):
        j = c + tl.arange(0, BD)
        mask = (i < rows)[:, None] & (j < d)[None, :]
        t = tl.load(total + i[:, None] * total_stride + j[None, :], mask=mask, other=0.0)
        if INNER:
            a = tl.load(features + i[:, None] * feature_stride + j[None, :], mask=mask, other=0.0)
            dot += t * a.to(tl.float32)
        if OUT:
            value = (t * f).to(out.dtype.element_ty)
            tl.store(out + i[:, None] * out_stride + j[None, :], value, mask=mask)
    if INNER:
        tl.store(inner + tl.program_id(0), tl.sum(tl.sum(dot, 1), 0))
