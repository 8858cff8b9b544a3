"""Log-sum-exps of one device's matrix, tile by tile. Exponents are in base 2.

Forward:

1. `reference` estimates each row's largest logit from a sample of the columns.
2. `unmasked_tiles` keeps a tile's logits in registers and takes one exponential each, which both
   sides share: row i's exponentials are relative to a reference of its own, and weighted by
   2^(row's reference - its row group's reference) they sum to the columns'. Tiles that need masks
   (`tiles.needs_mask`) are left out. `hopper` has this one and `unmasked_gradients` once more.
3. `combine_partials` adds the tiles' sums to the running state, computes the tiles left out, with a
   running maximum, and recomputes the rows whose sums left float32's range.

States are laid out as `states` documents, with logits in base 2.

Backward: dS of a block, rounded once to the features' dtype. Two cuBLAS products with dS then give
dx and dy.

1. `lse_and_grad` gathers, for one side, the log-sum-exps and their upstream gradients.
2. `unmasked_gradients` takes one exponential a logit for both sides, relative to the tile's largest
   row log-sum-exp.
3. `masked_gradients` takes two exponentials, with masks. It overwrites the tiles that need masks
   and those whose log-sum-exps lie too far apart to share a reference.

A side's upstream has these rows: log-sum-exp over negatives, its upstream gradient; if pairs can be
positive, the same two over positives, and the upstream gradient of their sum of logits.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megabatch.similarity import states
from megabatch.similarity.matrix import Matrix, narrow
from megabatch.similarity.tiles import State, StateTiles
from megabatch.similarity.triton import hopper
from megabatch.similarity.triton.blocking import TILE, cdiv
from megabatch.similarity.triton.blocks import (
    KernelTiles,
    Upstream,
    block_kernel,
    by_last_tile,
    new_descriptor,
    scale_rows,
)
from megabatch.similarity.triton.configs import launch_config
from megabatch.similarity.triton.launch import kernel
from megabatch.similarity.triton.tiles import (
    LN2,
    LOG2E,
    B,
    BlockSide,
    clamped_references,
    exponentials,
    finite,
    group_reference,
    load_partials,
    load_sum,
    logits_tile,
    mask_tile,
    needs_mask,
    shared_weights,
    spread_col_sums,
    store_extremes,
    store_rows,
    swizzle,
    to_logsumexp,
    unmasked_ds,
    unmasked_logits,
)

#: Sums outside are recomputed. Below LOWEST, terms lost under 2^-126 would matter (4M: 2^-29).
LOWEST = tl.constexpr(2.0**-75)
HIGHEST = tl.constexpr(2.0**126)
#: Partial sums that are added at once.
P = tl.constexpr(64)
#: Largest difference of log2 log-sum-exps that share one exponential's reference. Sharing loses
#: probabilities under 2^(80 - 126) = 2^-46, 4M of them under 2^-24.
SPREAD = tl.constexpr(80.0)


class BinaryStates(StateTiles):
    """Tiles of kernels, whose states have logits in base 2."""

    width: int  #: of the features as given

    def merge(self, parts: Tensor) -> Tensor:
        return self._scaled(super().merge(self._scaled(parts, LN2)), LOG2E)

    def write_results(self, parts: Tensor, out: Tensor) -> None:
        super().write_results(self._scaled(parts, LN2), out)

    def _scaled(self, states: Tensor, factor: tl.constexpr) -> Tensor:
        """Copies of states with logits in another base: by LN2 in base e, by LOG2E in base 2."""
        states = states.clone()
        for places in (*self.numbers.references, *self.numbers.differences):
            states[..., places, :] *= factor.value
        return states

    def write_grad(
        self, total: Tensor, side: str, rows: slice, factor: Tensor, scale_grad: bool, out: Any
    ) -> Tensor | None:
        features = (self.x if side == "x" else self.y) if scale_grad else None
        out, features = (t if t is None else as_rows(narrow(t, rows)) for t in (out, features))
        parts = scale_rows(
            as_rows(total), out, factor, self.width, dot_width=self.matrix.width, features=features
        )
        return None if parts is None else parts.sum()


def as_rows(features: Tensor) -> Tensor:
    """Features (m, l, d) as (m * l, d), and (m, d) as they are."""
    return features if features.dim() == 2 else features.flatten(0, 1)


def new_upstream(results: Tensor, gradient: Tensor) -> Upstream:
    """A side's upstream from its results and their upstream gradients."""
    if gradient.stride(1) != 1:
        gradient = gradient.contiguous()
    parts, size = results.shape
    has_positives = parts > 1
    out = results.new_empty(5 if has_positives else 2, size)
    extremes = results.new_empty(2, cdiv(size, TILE))
    tiles = extremes.shape[1]
    if tiles:
        lse_and_grad.launch(
            tiles, results=results, result_stride=results.stride(0), gradients=gradient,
            gradient_stride=gradient.stride(0), out=out, extremes=extremes, size=size,
            tiles=tiles, HAS_POSITIVES=has_positives,
        )  # fmt: skip
    return Upstream(out, size, extremes, tiles)


class SoftmaxKernelTiles(BinaryStates, KernelTiles):
    """Tiles whose upstream is an `Upstream`."""

    _lses = 1  #: of an upstream, whose spread in a tile counts

    def __init__(self, matrix: Matrix, scale: Tensor) -> None:
        rows = matrix.rows
        if rows.ceiling is not None:
            matrix = matrix._replace(rows=rows._replace(ceiling=rows.ceiling.contiguous()))
        super().__init__(matrix, scale)
        self.numbers = states.SPLIT if matrix.has_positives else states.NEGATIVES
        # The forward pass's workspace is one sum per tile and row: larger blocks fit.
        step = self.block_rows if self.symmetric else 2 * self.block_rows
        self.forward_blocks = step, step

    # --- forward ----------------------------------------------------------------------------

    def forward_block(self, i: slice, j: slice, rows: State, cols: State | None) -> None:
        config = launch_config("forward", self.features)
        block = self._block(i, j, config.bk)
        block.set_states(rows, cols)
        m, n = block.m, block.n
        triangle = self.symmetric and i == j
        group_rows = config.rows * TILE
        groups, tiles = cdiv(m, group_rows), cdiv(n, TILE)
        references = self._empty(groups * (group_rows + config.rows))  # of rows, of row tiles
        group_references = self._empty(groups)
        row_sums, col_sums = self._empty(tiles, m), self._empty(groups, n)
        guide_cols = None if self._guide is None else self._guide.y
        reference.launch(
            groups * config.rows, block, out=references, cols=self.y, cols_stride=self.y.stride(0),
            guide_cols=guide_cols,
            guide_cols_stride=0 if guide_cols is None else guide_cols.stride(0),
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        sums = {
            "references": references, "group_references": group_references, "row_sums": row_sums,
            "col_sums": col_sums, "ROW_TILES": config.rows, "GROUP": config.group,
            "COLS": triangle or cols is not None,
        }  # fmt: skip
        for first, count, even in by_last_tile(n):
            items = cdiv(groups, 2) * count
            if even and not triangle and hopper.takes(self.x, block, items):
                hopper.unmasked_tiles.launch(
                    hopper.programs(self.x, items), block, **sums, col_tiles=count
                )
            else:
                unmasked_tiles.launch(
                    groups * count, block, **sums, first_col_tile=first, col_tiles=count,
                    EVEN_N=even, TRIANGLE=triangle, num_warps=config.warps,
                    num_stages=config.stages,
                )  # fmt: skip
        combine_partials.launch(
            cdiv(m, TILE) + (0 if cols is None else tiles), block, row_sums=row_sums,
            references=references, row_partials=tiles, col_sums=col_sums,
            group_references=group_references, col_partials=groups, GROUP_ROWS=group_rows,
            TRIANGLE=triangle, num_warps=8, num_stages=config.stages,
        )  # fmt: skip

    # --- backward ---------------------------------------------------------------------------

    def make_upstream(self, results: Tensor, gradient: Tensor) -> Upstream:
        return new_upstream(results, gradient)

    def unpack_upstream(self, packed: Tensor | None) -> Upstream | None:
        return None if packed is None else Upstream.of(packed, self._lses)

    def pack_upstream(self, upstream: Upstream | None) -> Tensor | None:
        return None if upstream is None else upstream.packed

    def gradient_block(
        self, i: slice, j: slice, rows: Upstream | None, cols: Upstream | None
    ) -> Tensor:
        config, ds = launch_config("backward", self.features), self._workspace(i, j)
        block = self._block(i, j, config.bk)
        block.set_upstreams(rows and rows.view(i), cols and cols.view(j))
        tiles, col_tiles = cdiv(block.m, TILE), cdiv(block.n, TILE)
        triangle = self.symmetric and i == j
        out, items = new_descriptor(ds, TILE), cdiv(tiles, 2) * col_tiles
        if rows is not None and not triangle and hopper.takes(self.x, block, items):
            hopper.unmasked_gradients.launch(
                hopper.programs(self.x, items), block, ds=out, GROUP=cdiv(config.group, 2)
            )
        elif rows is not None:
            unmasked_gradients.launch(
                tiles * col_tiles, block, ds=out, GROUP=config.group, TRIANGLE=triangle,
                num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip
        chunk = 1 if rows is None else 64
        masked_gradients.launch(
            cdiv(tiles * col_tiles, chunk), block, ds=out, CHUNK=chunk,
            num_warps=8, num_stages=config.stages,
        )  # fmt: skip
        return ds


# --- kernels: forward -----------------------------------------------------------------------------


@block_kernel
def reference(
    x, cols, cols_stride, scale, out, row_ids, col_ids, ceiling, guide_x, guide_cols,
    guide_cols_stride, guide_d, row_start, col_start, m, n, d, diagonal_offset,
    BK: tl.constexpr, DIAGONAL: tl.constexpr, GUIDE_BK: tl.constexpr,
):  # fmt: skip
    """out[i] = row i's largest logit among B columns spread over the block, in log2, minus 20.

    After the rows come the largest of each B rows. Only negatives count: a positive far above them
    would push the sum of the negatives out of range. Rows past m get +inf, so their exponentials
    are 0. Subtracting 20 centres the sums in float32's range: a column's sum is relative to the
    largest reference of a group of rows, so it tends to be small.
    """
    i0 = tl.program_id(0) * B
    i = i0 + tl.arange(0, B)
    j = tl.arange(0, B) * tl.maximum(n // B, 1)
    present = j < n
    at = cols + (col_start + j).to(tl.int64) * cols_stride
    s = _spread_logits(x, at, row_start + i0, present, d, BK) * tl.load(scale)
    if row_ids is not None:
        own = tl.load(row_ids + i, mask=i < m, other=-1)
        others = tl.load(col_ids + j, mask=present, other=-2)
        present = present[None, :] & ((own[:, None] != others[None, :]) | (own < 0)[:, None])
    else:
        present = present[None, :] & (i >= 0)[:, None]
    if DIAGONAL != 0:
        present = present & (i[:, None] != (j + diagonal_offset)[None, :])
    if ceiling is not None:
        compared = s
        if guide_x is not None:
            at = guide_cols + (col_start + j).to(tl.int64) * guide_cols_stride
            compared = _spread_logits(guide_x, at, row_start + i0, j < n, guide_d, GUIDE_BK)
        present = present & ~(compared > tl.load(ceiling + i, mask=i < m, other=0.0)[:, None])
    largest = tl.max(tl.where(present, s * LOG2E, float("-inf")), 1)
    largest = tl.where(largest == float("-inf"), 0.0, largest) - 20.0
    tl.store(out + i, tl.where(i < m, largest, float("inf")))
    of_tile = tl.max(tl.where(i < m, largest, float("-inf")), 0)
    tl.store(out + tl.num_programs(0) * B + tl.program_id(0), of_tile)


@triton.jit
def _spread_logits(x, at, i0, present, d, BK: tl.constexpr):
    """x[i0:i0+B] against the columns at B addresses, without the scale."""
    s = tl.zeros((B, B), tl.float32)
    for c in tl.range(0, d, BK):
        k = c + tl.arange(0, BK)
        mask = present[:, None] & (k < d)[None, :]
        b = tl.load(at[:, None] + k[None, :], mask=mask, other=0.0)
        s = tl.dot(x.load([i0, c]), b.T, s, input_precision="tf32")
    return s


@block_kernel
def unmasked_tiles(
    x, y, scale, references, group_references, row_sums, col_sums,
    row_ranges, row_range_stride, col_ranges, col_range_stride, ceiling, guide_x, guide_y, guide_d,
    row_start, col_start, m, n, d, first_col_tile, col_tiles, diagonal_offset,
    BK: tl.constexpr, ROW_TILES: tl.constexpr, GROUP: tl.constexpr, DIAGONAL: tl.constexpr,
    GUIDE_BK: tl.constexpr, COLS: tl.constexpr, EVEN_N: tl.constexpr, TRIANGLE: tl.constexpr,
):  # fmt: skip
    """row_sums[column tile, i] and col_sums[row group, j] of 2^(logit - reference).

    A row group is the ROW_TILES tiles of one program; group_references[group] becomes its largest
    reference. Tiles that need masks add nothing. Unless EVEN_N, the last of these column tiles
    reaches past n. TRIANGLE: the block is symmetric; nothing is written left of a group's first
    tile on the diagonal, where `combine_partials` uses the columns' sums instead.
    """
    rows = BlockSide(x, guide_x, row_start, m, None, row_ranges, row_range_stride, ceiling)
    cols = BlockSide(y, guide_y, col_start, n, None, col_ranges, col_range_stride, None)
    group, tj = swizzle(tl.program_id(0), tl.cdiv(m, B * ROW_TILES), col_tiles, GROUP)
    tj += first_col_tile
    if TRIANGLE:  # noqa: SIM102 - one is known when the kernel is compiled
        if tj < group * ROW_TILES:
            return
    factor = tl.load(scale)
    j = tj * B + tl.arange(0, B)
    largest = group_reference(references, group, tl.arange(0, ROW_TILES), m, ROW_TILES)
    tl.store(group_references + group, largest)  # all programs of a group write the same
    # The columns' sums stay spread over the threads until all row tiles are in: reducing each tile
    # across a warp costs 4% of the kernel.
    col_total = tl.zeros((32, B), tl.float32)
    for r in tl.range(0, ROW_TILES, flatten=True):
        ti = group * ROW_TILES + r
        i = ti * B + tl.arange(0, B)
        acc = unmasked_logits(rows, cols, ti, tj, d, guide_d, BK, GUIDE_BK)
        own = clamped_references(references, i, largest)
        e = exponentials(acc, factor, own, rows, cols, ti, tj, i, diagonal_offset, DIAGONAL)
        if not EVEN_N:
            e = tl.where((j < n)[None, :], e, 0.0)
        tl.store(row_sums + tj.to(tl.int64) * m + i, tl.sum(e, 1), mask=i < m)
        if COLS:
            col_total += spread_col_sums(e, own, largest)
    if COLS:
        tl.store(col_sums + group.to(tl.int64) * n + j, tl.sum(col_total, 0), mask=j < n)


@block_kernel
def combine_partials(
    x, y, scale,
    row_sums, references, row_partials, row_state, row_state_stride, row_is_first, row_is_last,
    col_sums, group_references, col_partials, col_state, col_state_stride, col_is_first,
    col_is_last,
    row_ids, row_ranges, row_range_stride, col_ids, col_ranges, col_range_stride, ceiling,
    guide_x, guide_y, guide_d, row_start, col_start, m, n, d, diagonal_offset,
    GROUP_ROWS: tl.constexpr, BK: tl.constexpr, DIAGONAL: tl.constexpr, PAIRED: tl.constexpr,
    GUIDE_BK: tl.constexpr, HAS_POSITIVES: tl.constexpr, TRIANGLE: tl.constexpr,
):  # fmt: skip
    """Add a block to the running states of both sides, B rows or B columns per program.

    A row has `row_partials` sums, a column `col_partials`; GROUP_ROWS rows are a row group. Before
    a side's first block, its state holds nothing; after its last one, the state holds the results,
    as of `states.to_logsumexp`. TRIANGLE: a row's sums begin at its group's first tile on the
    diagonal; the columns' sums of the groups above give the tiles left of it.
    """
    rows = BlockSide(x, guide_x, row_start, m, row_ids, row_ranges, row_range_stride, ceiling)
    cols = BlockSide(y, guide_y, col_start, n, col_ids, col_ranges, col_range_stride, None)
    t = tl.program_id(0)
    tiles = tl.cdiv(m, B)
    above_reference = tl.full((B,), float("-inf"), tl.float32)
    above_total = tl.zeros((B,), tl.float32)
    if t < tiles:
        i = t * B + tl.arange(0, B)
        group = t * B // GROUP_ROWS
        block_reference = clamped_references(references, i, tl.load(group_references + group))
        block_total = tl.zeros((B,), tl.float32)
        for start in range(group * (GROUP_ROWS // B) if TRIANGLE else 0, row_partials, P):
            block_total += tl.sum(load_partials(row_sums, start, row_partials, i, m, P), 0)
        if TRIANGLE:  # noqa: SIM102 - one is known when the kernel is compiled
            if group > 0:
                largest = _largest_of_groups(group_references, group)
                above_total = _col_total(col_sums, group_references, largest, group, i, m)
                above_reference = tl.zeros((B,), tl.float32) + largest
        _combine_side(
            rows, cols, t, State(row_state, row_state_stride, row_is_first, row_is_last), scale,
            block_reference, block_total, above_reference, above_total, d, guide_d,
            diagonal_offset, BK, DIAGONAL, PAIRED, GUIDE_BK, HAS_POSITIVES,
        )  # fmt: skip
    else:
        t = t - tiles
        j = t * B + tl.arange(0, B)
        largest = _largest_of_groups(group_references, col_partials)
        block_total = _col_total(col_sums, group_references, largest, col_partials, j, n)
        block_reference = tl.zeros((B,), tl.float32) + largest
        _combine_side(
            cols, rows, t, State(col_state, col_state_stride, col_is_first, col_is_last), scale,
            block_reference, block_total, above_reference, above_total, d, guide_d,
            -diagonal_offset, BK, DIAGONAL, PAIRED, GUIDE_BK, HAS_POSITIVES,
        )  # fmt: skip


@triton.jit
def _largest_of_groups(group_references, groups):
    largest = tl.full((P,), float("-inf"), tl.float32)
    for start in range(0, groups, P):
        p = start + tl.arange(0, P)
        own = tl.load(group_references + p, mask=p < groups, other=float("-inf"))
        largest = tl.maximum(largest, own)
    return tl.max(largest, 0)


@triton.jit
def _col_total(sums, group_references, largest, groups, j, n):
    """Sums of columns j over the first groups of rows, relative to `largest`."""
    total = tl.zeros((B,), tl.float32)
    for start in range(0, groups, P):
        p = start + tl.arange(0, P)
        own = tl.load(group_references + p, mask=p < groups, other=float("-inf"))
        partials = load_partials(sums, start, groups, j, n, P)
        total += tl.sum(partials * tl.exp2(own - largest)[:, None], 0)
    return total


@triton.jit
def _combine_side(
    rows, cols, ti, state, scale, block_reference, block_total, above_reference, above_total,
    d, guide_d, diagonal_offset, BK: tl.constexpr, DIAGONAL: tl.constexpr, PAIRED: tl.constexpr,
    GUIDE_BK: tl.constexpr, HAS_POSITIVES: tl.constexpr,
):  # fmt: skip
    """Merge the block's sums of row tile ti and the tiles that need masks into the rows' state.

    If any row's sum left float32's range, the block's sums of this tile are dropped and all its
    column tiles recomputed.
    """
    i = ti * B + tl.arange(0, B)
    inside = i < rows.size
    largest, total, p_largest, p_total, p_sum, p_count = begin_state(
        state, i, inside, HAS_POSITIVES
    )
    bad = inside & ~((block_total >= LOWEST) & (block_total <= HIGHEST))
    some = above_reference > float("-inf")
    bad = bad | (inside & some & ~((above_total >= LOWEST) & (above_total <= HIGHEST)))
    above_reference = tl.where(some, above_reference, block_reference)  # a sum of 0 at any
    block_reference, block_total = _merge(
        block_reference, block_total, above_reference, above_total
    )  # fmt: skip
    recompute = tl.max(bad.to(tl.int32), 0) != 0
    merged, merged_total = _merge(largest, total, block_reference, block_total)
    largest = tl.where(recompute, largest, merged)
    total = tl.where(recompute, total, merged_total)
    k = tl.load(scale)
    tiles = tl.cdiv(cols.size, B)
    for start in tl.range(0, tiles, 64):
        # Check 64 tiles at once, then loop from the first to the last that is wanted.
        index = start + tl.arange(0, 64)
        masked = needs_mask(
            ti, tl.minimum(index, tiles - 1), rows, cols, diagonal_offset, DIAGONAL
        )  # fmt: skip
        wanted = (index < tiles) & (recompute | masked)
        first = tl.min(tl.where(wanted, index, tiles), 0)
        last = tl.max(tl.where(wanted, index, -1), 0)
        for tj in tl.range(first, last + 1):
            if recompute | needs_mask(ti, tj, rows, cols, diagonal_offset, DIAGONAL):
                s = logits_tile(rows, cols, ti, tj, d, BK) * k
                negative, positive = mask_tile(
                    s, rows, cols, ti, tj, diagonal_offset, guide_d, DIAGONAL, PAIRED, GUIDE_BK
                )  # fmt: skip
                largest, total = running_sum(largest, total, s * LOG2E, negative)
                if HAS_POSITIVES:
                    p_largest, p_total = running_sum(p_largest, p_total, s * LOG2E, positive)
                    p_sum += tl.sum(tl.where(positive, s, 0.0), 1)
                    p_count += tl.sum(positive.to(tl.float32), 1)
    end_state(state, i, inside, largest, total, p_largest, p_total, p_sum, p_count, HAS_POSITIVES)


@triton.jit
def begin_state(state, i, inside, HAS_POSITIVES: tl.constexpr):
    """The numbers of rows i in a running state, or of no pair if this is the first block."""
    begun = inside.to(tl.int32) > state.is_first
    numbers, stride = state.numbers, state.stride
    largest, total = load_sum(numbers, stride, 0, i, begun)
    p_largest = tl.full(i.shape, float("-inf"), tl.float32)
    p_total, p_sum = tl.zeros(i.shape, tl.float32), tl.zeros(i.shape, tl.float32)
    p_count = tl.zeros(i.shape, tl.float32)
    if HAS_POSITIVES:
        p_largest, p_total = load_sum(numbers, stride, 2, i, begun)
        p_sum = tl.load(numbers + 4 * stride + i, mask=begun, other=0.0)
        p_count = tl.load(numbers + 5 * stride + i, mask=begun, other=0.0)
    return largest, total, p_largest, p_total, p_sum, p_count


@triton.jit
def end_state(
    state, i, inside, largest, total, p_largest, p_total, p_sum, p_count,
    HAS_POSITIVES: tl.constexpr,
):  # fmt: skip
    """Write the numbers of rows i, or after the last block the results."""
    done = state.is_last != 0
    first = tl.where(done, to_logsumexp(largest, total), largest)
    if HAS_POSITIVES:
        second = tl.where(done, to_logsumexp(p_largest, p_total), total)
        third = tl.where(done, p_sum, p_largest)
        fourth = tl.where(done, p_count, p_total)
        numbers = first, second, third, fourth, p_sum, p_count
        store_rows(state.numbers, state.stride, i, numbers, inside)
    else:
        store_rows(state.numbers, state.stride, i, (first, total), inside)


@triton.jit
def _merge(old, old_total, new, new_total):
    largest = tl.maximum(old, new)
    total = old_total * tl.exp2(old - largest) + new_total * tl.exp2(new - largest)
    # A power of two moves from the sum to the reference, exactly, so that neither leaves range.
    power = tl.floor(tl.log2(total))
    return largest + power, total * tl.exp2(-power)


@triton.jit
def running_sum(largest, total, s, mask):
    """Merge a tile's numbers, in log2, into the rows' largest and sum relative to it."""
    s = tl.where(mask, s, float("-inf"))
    new = tl.maximum(largest, tl.max(s, 1))
    shift = finite(new)
    total = total * tl.exp2(largest - shift) + tl.sum(tl.exp2(s - shift[:, None]), 1)
    return new, total


# --- kernels: backward ----------------------------------------------------------------------------


@kernel
def lse_and_grad(
    results, result_stride, gradients, gradient_stride, out, extremes, size, tiles,
    HAS_POSITIVES: tl.constexpr,
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
            store_extremes(lse, inside, extremes + t, tiles)
    if HAS_POSITIVES:
        gradient = tl.load(gradients + 2 * gradient_stride + i, mask=inside, other=0.0)
        tl.store(out + 4 * size.to(tl.int64) + i, gradient, mask=inside)


@triton.jit
def needs_two_exponentials(ti, tj, rows, cols, LSE: tl.constexpr):
    """Whether the log-sum-exps of a tile lie more than SPREAD apart; ti and tj may be vectors.

    rows, cols: `Upstream`s. LSE: 0 for their first extremes, 2 for the second.
    """
    low = tl.load(rows.extremes + LSE * rows.extremes_stride + ti)
    high = tl.load(rows.extremes + (LSE + 1) * rows.extremes_stride + ti)
    if cols.extremes is not None:
        low = tl.minimum(low, tl.load(cols.extremes + LSE * cols.extremes_stride + tj))
        high = tl.maximum(high, tl.load(cols.extremes + (LSE + 1) * cols.extremes_stride + tj))
    return (high - low <= SPREAD) == 0  # infinite and NaN differences count as too large


@block_kernel
def unmasked_gradients(
    x, y, ds, scale, row_upstream, row_stride, row_extremes, row_extremes_stride,
    col_upstream, col_stride, ceiling, guide_x, guide_y, guide_d, row_start, col_start, m, n, d,
    BK: tl.constexpr, GROUP: tl.constexpr, GUIDE_BK: tl.constexpr, TRIANGLE: tl.constexpr,
):  # fmt: skip
    """dS, as if no tile needed masks or two exponentials.

    TRIANGLE: the block is symmetric; tiles above the diagonal are computed and stored twice, once
    transposed.
    """
    rows = BlockSide(x, guide_x, row_start, m, None, None, None, ceiling)
    cols = BlockSide(y, guide_y, col_start, n, None, None, None, None)
    ti, tj = swizzle(tl.program_id(0), tl.cdiv(m, B), tl.cdiv(n, B), GROUP)
    if TRIANGLE:  # noqa: SIM102 - one is known when the kernel is compiled
        if tj < ti:
            return
    i, j = ti * B + tl.arange(0, B), tj * B + tl.arange(0, B)
    acc = unmasked_logits(rows, cols, ti, tj, d, guide_d, BK, GUIDE_BK)
    reference = tl.load(row_extremes + row_extremes_stride + ti)
    row_weight = shared_weights(row_upstream, row_stride, i, m, reference)
    col_weight = None
    if col_upstream is not None:
        col_weight = shared_weights(col_upstream, col_stride, j, n, reference)
    e = unmasked_ds(acc, tl.load(scale), reference, row_weight, col_weight, rows, i).to(ds.dtype)
    ds.store([ti * B, tj * B], e)
    if TRIANGLE:  # noqa: SIM102 - one is known when the kernel is compiled
        if ti < tj:
            ds.store([tj * B, ti * B], tl.trans(e))


@block_kernel
def masked_gradients(
    x, y, ds, scale, row_upstream, row_stride, col_upstream, col_stride,
    row_extremes, row_extremes_stride, col_extremes,
    col_extremes_stride,
    row_ids, row_ranges, row_range_stride, col_ids, col_ranges, col_range_stride, ceiling,
    guide_x, guide_y, guide_d, row_start, col_start, m, n, d, diagonal_offset,
    BK: tl.constexpr, CHUNK: tl.constexpr, DIAGONAL: tl.constexpr, PAIRED: tl.constexpr,
    GUIDE_BK: tl.constexpr, HAS_POSITIVES: tl.constexpr,
):  # fmt: skip
    """dS of the tiles that need masks or two exponentials; of all without upstream of the rows.

    Each program looks at CHUNK tiles at once and leaves early if none is its own.
    """
    rows = BlockSide(x, guide_x, row_start, m, row_ids, row_ranges, row_range_stride, ceiling)
    cols = BlockSide(y, guide_y, col_start, n, col_ids, col_ranges, col_range_stride, None)
    of_rows = Upstream(row_upstream, row_stride, row_extremes, row_extremes_stride)
    of_cols = Upstream(col_upstream, col_stride, col_extremes, col_extremes_stride)
    tiles = tl.cdiv(n, B)
    start = tl.program_id(0) * CHUNK
    total = tl.cdiv(m, B) * tiles
    if row_upstream is not None:
        index = tl.minimum(start + tl.arange(0, CHUNK), total - 1)
        candidates = _is_masked(
            index // tiles, index % tiles, rows, cols, of_rows, of_cols, diagonal_offset, DIAGONAL
        )  # fmt: skip
        if tl.max(candidates.to(tl.int32), 0) == 0:
            return
    k = tl.load(scale)
    for t in tl.range(start, tl.minimum(start + CHUNK, total)):
        ti = t // tiles
        tj = t % tiles
        wanted = True
        if row_upstream is not None:
            wanted = _is_masked(ti, tj, rows, cols, of_rows, of_cols, diagonal_offset, DIAGONAL)
        if wanted:
            s = logits_tile(rows, cols, ti, tj, d, BK) * k
            negative, positive = mask_tile(
                s, rows, cols, ti, tj, diagonal_offset, guide_d, DIAGONAL, PAIRED, GUIDE_BK
            )  # fmt: skip
            g = tl.zeros((B, B), tl.float32)  # of a negative
            h = tl.zeros((B, B), tl.float32)  # of a positive
            g, h = _add_gradients(g, h, s, of_rows, ti, m, HAS_POSITIVES, 1)
            g, h = _add_gradients(g, h, s, of_cols, tj, n, HAS_POSITIVES, 0)
            g = tl.where(negative, g, tl.where(positive, h, 0.0))
            ds.store([ti * B, tj * B], g.to(ds.dtype))


@triton.jit
def _is_masked(ti, tj, rows, cols, of_rows, of_cols, diagonal_offset, DIAGONAL: tl.constexpr):
    """Whether `masked_tiles` must take a tile; ti and tj may be vectors."""
    spread = needs_two_exponentials(ti, tj, of_rows, of_cols, 0)
    return spread | needs_mask(ti, tj, rows, cols, diagonal_offset, DIAGONAL)


@triton.jit
def _add_gradients(g, h, s, upstream, tile, size, HAS_POSITIVES: tl.constexpr, AXIS: tl.constexpr):
    """g, h + one side's gradients of a tile's logits s, if they are negatives or positives."""
    if upstream.packed is not None:
        i = tile * B + tl.arange(0, B)
        g += softmax_grad(s, upstream, i, size, 0, AXIS)
        if HAS_POSITIVES:
            h += softmax_grad(s, upstream, i, size, 2, AXIS)
            of_sum = tl.load(upstream.packed + 4 * upstream.stride + i, mask=i < size, other=0.0)
            h += tl.expand_dims(of_sum, AXIS)
    return g, h


@triton.jit
def softmax_grad(s, upstream, index, size, LSE: tl.constexpr, AXIS: tl.constexpr):
    """upstream gradient * e^(s - log-sum-exp) of one side; AXIS 1: of the rows.

    LSE: the number of the upstream that is the log-sum-exp; its gradient is the next.
    """
    inside = index < size
    packed, stride = upstream.packed, upstream.stride
    lse = tl.load(packed + LSE * stride + index, mask=inside, other=float("inf"))
    gradient = tl.load(packed + (LSE + 1) * stride + index, mask=inside, other=0.0)
    e = tl.exp2((s - tl.expand_dims(lse, AXIS)) * LOG2E)
    # For a pair of the other kind the exponential may overflow; the caller masks it out.
    return e * tl.expand_dims(gradient, AXIS)
