"""Device functions that several kernels share, and kernels of the extremes of each tile's rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from megabatch.similarity.triton.blocking import TILE
from megabatch.similarity.triton.launch import kernel

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
#: Rows and columns of a tile.
B = tl.constexpr(TILE)
#: Values of DIAGONAL in the kernels: the kind of the pairs (i, i).
NO_DIAGONAL, POSITIVE, DROPPED = 0, 1, 2


class BlockSide(NamedTuple):
    """The rows or the columns of a block inside a kernel; an absent operand is None.

    Device functions take two of them, so that a kernel may swap rows and columns.
    """

    features: Any  #: descriptor
    guide: Any  #: descriptor of another model's features
    start: Any  #: the block's first row in the features
    size: Any
    ids: Any
    ranges: Any  #: see `id_ranges`
    range_stride: Any
    ceiling: Any


@triton.jit
def swizzle(pid, row_tiles, col_tiles, GROUP: tl.constexpr):
    """(row tile, column tile) of a program, so that GROUP row tiles stay in the L2 cache."""
    per_group = GROUP * col_tiles
    first = pid // per_group * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    return first + pid % per_group % size, pid % per_group // size


@triton.jit
def store_rows(out, stride, i, rows, mask):
    """out[k * stride + i] = rows[k] for a tuple of vectors."""
    for k in tl.static_range(len(rows)):
        tl.store(out + k * stride + i, rows[k], mask=mask)


@triton.jit
def load_sum(numbers, stride, k, i, mask):
    """Numbers k and k + 1 of states: (largest logit, sum relative to it) of no pair unless mask."""
    largest = tl.load(numbers + k * stride + i, mask=mask, other=float("-inf"))
    return largest, tl.load(numbers + (k + 1) * stride + i, mask=mask, other=0.0)


@triton.jit
def load_partials(partials, start, count, i, size, P: tl.constexpr):
    """Partial sums start to start + P of rows i, (P, rows); 0 from `count` on and past `size`."""
    p = start + tl.arange(0, P)
    mask = (p < count)[:, None] & (i < size)[None, :]
    return tl.load(partials + p.to(tl.int64)[:, None] * size + i[None, :], mask=mask, other=0.0)


@triton.jit
def finite(largest):
    """0 for -inf, the largest of no number."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def to_logsumexp(largest, total):
    """Log-sum-exp, in base e, of a sum relative to a reference in base 2."""
    return tl.log(total) + largest * LN2


@triton.jit
def halves(v):
    """The left and the right half of (B, width); each thread keeps its own values."""
    return tl.split(tl.permute(tl.reshape(v, (B, 2, v.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def add_product(acc, x, y, row_start, col_start, ti, tj, d, BK: tl.constexpr):
    """acc (B, B) + tile (ti, tj) of x[row_start:] @ y[col_start:].T; rows past the end are 0."""
    for c in tl.range(0, d, BK):
        # Places computed here: across a flattened loop, Triton would carry them in registers.
        a = x.load([row_start + ti * B, c])
        acc = tl.dot(a, y.load([col_start + tj * B, c]).T, acc, input_precision="tf32")
    return acc


@triton.jit
def logits_tile(rows, cols, ti, tj, d, BK: tl.constexpr):
    """Tile (ti, tj) of the logits in float32, without the scale."""
    acc = tl.zeros((B, B), tl.float32)
    return add_product(
        acc, rows.features, cols.features, rows.start, cols.start, ti, tj, d, BK
    )  # fmt: skip


@triton.jit
def guide_tile(rows, cols, ti, tj, guide_d, BK: tl.constexpr):
    """The same tile of the similarities of the guide's features."""
    acc = tl.zeros((B, B), tl.float32)
    return add_product(
        acc, rows.guide, cols.guide, rows.start, cols.start, ti, tj, guide_d, BK
    )  # fmt: skip


@triton.jit
def unmasked_logits(rows, cols, ti, tj, d, guide_d, BK: tl.constexpr, GUIDE_BK: tl.constexpr):
    """`logits_tile`, with -inf where a guide leaves the pair out.

    The sums begin at -inf there and stay so: the guide's decision takes no registers besides them.
    """
    if rows.guide is not None:
        similarity = guide_tile(rows, cols, ti, tj, guide_d, GUIDE_BK)
        i = ti * B + tl.arange(0, B)
        highest = tl.load(rows.ceiling + i, mask=i < rows.size, other=0.0)
        acc = tl.where(similarity > highest[:, None], float("-inf"), 0.0)
    else:
        acc = tl.zeros((B, B), tl.float32)
    return add_product(
        acc, rows.features, cols.features, rows.start, cols.start, ti, tj, d, BK
    )  # fmt: skip


@kernel
def id_ranges(ids, out, size, tiles):
    """Smallest and largest id of each tile of rows: out[0], out[1]; negative ids do not count."""
    t = tl.program_id(0)
    i = t * B + tl.arange(0, B)
    value = tl.load(ids + i, mask=i < size, other=-1)
    tl.store(out + t, tl.min(tl.where(value >= 0, value, 1 << 62), 0))
    tl.store(out + tiles + t, tl.max(value, 0))


@kernel
def lse_extremes(packed, stride, out, size, tiles, COUNT: tl.constexpr):
    """out[2 k], out[2 k + 1] = smallest, largest of packed[2 k] in each tile of rows, in log2."""
    t = tl.program_id(0)
    i = t * B + tl.arange(0, B)
    for k in tl.static_range(COUNT):
        lse = tl.load(packed + 2 * k * stride + i, mask=i < size, other=0.0)
        store_extremes(lse, i < size, out + 2 * k * tiles + t, tiles)


@triton.jit
def store_extremes(lse, inside, out, tiles):
    """Write the smallest and the largest log-sum-exp of a tile, in log2, to out[0], out[tiles]."""
    lse = lse * LOG2E
    tl.store(out, tl.min(tl.where(inside, lse, float("inf")), 0))
    tl.store(out + tiles, tl.max(tl.where(inside, lse, float("-inf")), 0))


@triton.jit
def needs_mask(ti, tj, rows, cols, diagonal_offset, DIAGONAL: tl.constexpr):
    """Whether tile (ti, tj) may hold pairs that are not negatives; ti or tj may be a vector.

    Such pairs lie on the diagonal, or where the tiles' ranges of ids overlap.
    """
    result = tj < 0
    if DIAGONAL != 0:
        j0 = tj * B + diagonal_offset
        result = result | ((ti * B < j0 + B) & (j0 < ti * B + B))
    if rows.ranges is not None:
        disjoint = tl.load(rows.ranges + ti) > tl.load(cols.ranges + cols.range_stride + tj)
        disjoint = disjoint | (
            tl.load(cols.ranges + tj) > tl.load(rows.ranges + rows.range_stride + ti)
        )
        result = result | ~disjoint
    return result


@triton.jit
def group_reference(references, group, each, m, ROW_TILES: tl.constexpr):
    """Largest reference of a group of rows; `each`: its row tiles, 0 to ROW_TILES."""
    group_rows = ROW_TILES * B
    of_tiles = references + tl.cdiv(m, group_rows) * group_rows  # they follow those of the rows
    return tl.max(tl.load(of_tiles + group * ROW_TILES + each), 0)


@triton.jit
def clamped_references(references, i, largest):
    """References of rows, raised if far below their group's: the columns' weights would vanish."""
    return tl.maximum(tl.load(references + i), largest - 100.0)


@triton.jit
def exponentials(acc, scale, own, rows, cols, ti, tj, i, diagonal_offset, DIAGONAL: tl.constexpr):
    """2^(logit - reference) of tile (ti, tj), 0 if it needs masks, from its products.

    own: the references of its rows i.
    """
    shift = own
    if DIAGONAL != 0 or rows.ranges is not None:
        last = tl.cdiv(rows.size, B) - 1  # the last group may reach past the last row tile
        skipped = needs_mask(tl.minimum(ti, last), tj, rows, cols, diagonal_offset, DIAGONAL)
        shift = tl.where(skipped, float("inf"), own)
    if rows.ceiling is not None and rows.guide is None:
        highest = tl.load(rows.ceiling + i, mask=i < rows.size, other=0.0)
        acc = tl.where(acc * scale > highest[:, None], float("-inf"), acc)
    e = tl.exp2(acc * (scale * LOG2E) - shift[:, None])
    if rows.ceiling is not None:  # a scale of 0 turns -inf into NaN, a negative one into +inf
        e = tl.where(acc == float("-inf"), 0.0, e)
    return e


@triton.jit
def spread_col_sums(e, own, largest):
    """Sums of columns, (32, B), still spread over the threads: each adds up its own exponentials.

    own: the rows' references, to which e is relative; the sums are relative to the group's largest.
    """
    e = e * tl.exp2(tl.minimum(own - largest, 0.0))[:, None]
    spread = tl.reshape(e, (B // 64, 4, 2, 8, B))
    return tl.reshape(tl.sum(tl.sum(spread, 2), 0), (32, B))


@triton.jit
def shared_weights(upstream, stride, i, size, reference):
    """Upstream gradient * 2^(reference - log-sum-exp) of rows or columns i."""
    lse = tl.load(upstream + i, mask=i < size, other=float("inf")) * LOG2E
    gradient = tl.load(upstream + stride + i, mask=i < size, other=0.0)
    return gradient * tl.exp2(reference - lse)


@triton.jit
def unmasked_ds(acc, scale, reference, row_weight, col_weight, rows, i):
    """dS of a tile, as if it needed no masks, from its products and both sides' `shared_weights`.

    col_weight: None if the columns have no upstream.
    """
    e = tl.exp2(acc * (scale * LOG2E) - reference)
    if col_weight is not None:
        e = e * (row_weight[:, None] + col_weight[None, :])
    else:
        e = e * row_weight[:, None]
    if rows.guide is not None:
        e = tl.where(acc == float("-inf"), 0.0, e)
    elif rows.ceiling is not None:
        highest = tl.load(rows.ceiling + i, mask=i < rows.size, other=0.0)
        e = tl.where(acc * scale > highest[:, None], 0.0, e)
    return e


@triton.jit
def mask_tile(
    s, rows, cols, ti, tj, diagonal_offset, guide_d, DIAGONAL: tl.constexpr, PAIRED: tl.constexpr,
    GUIDE_BK: tl.constexpr,
):  # fmt: skip
    """`masks` of tile (ti, tj) of the logits, or by the similarities of a guide's features."""
    if rows.guide is not None:
        s = guide_tile(rows, cols, ti, tj, guide_d, GUIDE_BK)
    i = ti * B + tl.arange(0, B)
    j = tj * B + tl.arange(0, B)
    return masks(s, rows, cols, i, j, diagonal_offset, DIAGONAL, PAIRED)


@triton.jit
def masks(s, rows, cols, i, j, diagonal_offset, DIAGONAL: tl.constexpr, PAIRED: tl.constexpr):
    """(negative, positive) masks of rows i and columns j; pairs in neither are dropped or past the
    end.

    s: the logits, or what ceilings bound instead. PAIRED: the positives are the pairs (i, i), other
    pairs of equal ids are dropped.
    """
    inside = (i < rows.size)[:, None] & (j < cols.size)[None, :]
    if rows.ids is not None:
        row_ids = tl.load(rows.ids + i, mask=i < rows.size, other=-1)
        col_ids = tl.load(cols.ids + j, mask=j < cols.size, other=-1)
        positive = inside & (row_ids[:, None] == col_ids[None, :]) & (row_ids >= 0)[:, None]
    else:
        positive = inside & (i < 0)[:, None]
    negative = inside & ~positive
    if PAIRED:
        positive = positive & (i < 0)[:, None]
    if DIAGONAL != 0:
        own = i[:, None] == (j + diagonal_offset)[None, :]
        negative = negative & ~own
        positive = (positive | (inside & own)) if DIAGONAL == 1 else (positive & ~own)
    if rows.ceiling is not None:
        highest = tl.load(rows.ceiling + i, mask=i < rows.size, other=0.0)
        negative = negative & ~(s > highest[:, None])
    if cols.ceiling is not None:
        highest = tl.load(cols.ceiling + j, mask=j < cols.size, other=0.0)
        negative = negative & ~(s > highest[None, :])
    return negative, positive
