"""The kernels of `ranking`: `ranks` counts scores, `scores` writes them for a selection."""

from __future__ import annotations

import triton.language as tl

from megabatch.similarity.backends.triton.launch import kernel
from megabatch.similarity.backends.triton.tiles import logits_tile, swizzle


@kernel
def ranks(
    x, y, target, score, above, equal, row_ids, column_ids, m, n, d,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PART: tl.constexpr,
    GROUP: tl.constexpr, FIND: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """FIND: score[i] = x[i] @ y[target[i]], where that is a column; else counts of the others.

    One kernel for both: a target's score is then, bit for bit, what its tile holds when the others
    are counted. Counts are whole numbers, whose sum no order of the programs changes.
    """
    ti, part = swizzle(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN * PART), GROUP)
    i = ti * BM + tl.arange(0, BM)
    home = tl.load(target + i, mask=i < m, other=-1)
    first = part * PART
    last = tl.minimum(first + PART, tl.cdiv(n, BN))
    if FIND:  # the tiles that have targets of these rows, and those between
        here = (home >= first * BN) & (home < tl.minimum(last * BN, n))
        low = tl.min(tl.where(here, home // BN, last), 0)
        last = (tl.max(tl.where(here, home // BN, first - 1), 0) + 1).to(tl.int32)
        first = low.to(tl.int32)
    else:
        own = tl.load(score + i, mask=i < m, other=0.0)
        higher = tl.zeros((BM,), tl.int32)
        alike = tl.zeros((BM,), tl.int32)
    if IDS:
        ids = tl.load(row_ids + i, mask=i < m, other=-1)
    for tj in tl.range(first, last):
        s = logits_tile(x, y, ti * BM, tj * BN, d, BM, BN, BK)
        j = tj * BN + tl.arange(0, BN)
        targets = home[:, None] == j[None, :]
        if FIND:
            found = tl.sum(tl.where(targets, s, 0.0), 1)
            inside = (home >= tj * BN) & (home < tl.minimum(tj * BN + BN, n))
            tl.store(score + i, found, mask=inside)
        else:
            counted = (j < n)[None, :] & ~targets
            if IDS:
                others = tl.load(column_ids + j, mask=j < n, other=-1)
                counted = counted & ~((ids[:, None] == others[None, :]) & (ids >= 0)[:, None])
            # Not s > own: a row whose target's score is NaN counts every column as above.
            higher += tl.sum((counted & ~(s <= own[:, None])).to(tl.int32), 1)
            alike += tl.sum((counted & (s == own[:, None])).to(tl.int32), 1)
    if not FIND:
        tl.atomic_add(above + i, higher.to(tl.int64), mask=i < m, sem="relaxed")
        tl.atomic_add(equal + i, alike.to(tl.int64), mask=i < m, sem="relaxed")


@kernel
def scores(
    x, y, out, tops, row_ids, column_ids, row_start, column_start, m, n, d, out_stride,
    tops_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    IDS: tl.constexpr,
):  # fmt: skip
    """out = x @ y.T of a block of m rows and n columns; tops[i, tile] = largest of row i there.

    -inf where ids are equal and past n, up to a whole tile. A NaN counts as inf in `tops`, so that
    no selection by them passes over it.
    """
    ti, tj = swizzle(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    i = ti * BM + tl.arange(0, BM)
    j = tj * BN + tl.arange(0, BN)
    s = logits_tile(x, y, row_start + ti * BM, column_start + tj * BN, d, BM, BN, BK)
    wanted = (i < m)[:, None] & (j < n)[None, :]
    if IDS:
        own = tl.load(row_ids + row_start + i, mask=i < m, other=-1)
        others = tl.load(column_ids + column_start + j, mask=j < n, other=-1)
        wanted = wanted & ~((own[:, None] == others[None, :]) & (own >= 0)[:, None])
    s = tl.where(wanted, s, float("-inf"))
    rows = i.to(tl.int64)
    tl.store(out + (rows * out_stride)[:, None] + j[None, :], s, mask=(i < m)[:, None])
    largest = tl.max(tl.where(s != s, float("inf"), s), 1)
    tl.store(tops + rows * tops_stride + tj, largest, mask=i < m)
