"""The sigmoid loss and its gradients of one device's matrix, from one sweep.

The kernels take one exponential and 1/8 root a pair. For a negative pair of logit z, with e = e^z,
the loss is log(1 + e) and dS is e / (1 + e). Both come from products (1 + a)(1 + b) = 1 + p that
are stored as p = a + b + ab. Adding the 1 would lose small terms: at SigLIP's first bias, -10, e is
5e-5 and 1 + e is off by up to 0.1% of e, by the same amount in all pairs whose features are alike.
16 pairs share a logarithm. 8 pairs share a reciprocal, which is split by 1 / (1 + a) = (1 + b) / (1
+ p).

1. `unmasked_tiles` computes a tile per program, every pair as a negative. The sums of a tile that
   holds positives, or whose products leave float32's range, are not finite.
2. `masked_tiles` adds up the sums, and recomputes such tiles pair by pair.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.eager_sigmoid import SigmoidCall
from megabatch.similarity.matrix import Matrix
from megabatch.similarity.triton.blocking import GROUP, TILE, block_shape, cdiv
from megabatch.similarity.triton.blocks import (
    KernelTiles,
    block_kernel,
    by_last_tile,
    new_descriptor,
    scale_rows,
)
from megabatch.similarity.triton.configs import launch_config
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
#: float16 holds numbers from 2^-24 to 2^16. dS, at most 1, is stored multiplied by this.
HALF_GAIN = 2.0**15
#: Tiles that a program of `masked_tiles` looks at, in a large block and in a smaller one:
#: about as many programs as a GPU has multiprocessors, each with little more than one tile of the
#: diagonal.
CHUNKS = 128, 32
LARGE = 8192


class SigmoidKernelTiles(KernelTiles):
    """Tiles whose `gradient_block` also adds the block's losses to `sums`."""

    def __init__(self, matrix: Matrix, call: SigmoidCall, sums: Tensor) -> None:
        """`sums`: as `new_sums` makes it, for all blocks of the sweep."""
        super().__init__(matrix, call.scale)
        self.call, self._sums = call, sums
        self.gain = HALF_GAIN if self.x.dtype == torch.float16 else 1.0
        weight = matrix.rows.weight
        self.weight = None if weight is None else weight.contiguous()
        if self.weight is not None and call.weight_divisor is not None:
            self.weight = self.weight / call.weight_divisor
        self.config = launch_config("sigmoid", self.features)
        tiles = cdiv(min(self.block_rows, self.m), TILE) * cdiv(min(self.block_cols, self.n), TILE)
        #: of each tile: losses, dS
        self._partials = self._empty(2 * PARTS.value * tiles)

    @staticmethod
    def new_sums(x: Tensor) -> Tensor:
        """Sums by program: losses, dS, dS times products."""
        limit = settings.workspace(x) // x.element_size()
        rows, _ = block_shape(1, 1, x.shape[1], x.element_size(), False, settings.workspace(x))
        tiles = cdiv(rows, TILE) * cdiv(max(GROUP, limit // rows), TILE)
        return x.new_zeros((3, cdiv(tiles, CHUNKS[1])), dtype=torch.float64)

    def gradient_block(self, i: slice, j: slice, rows: object, cols: object) -> Tensor | None:
        ds = self._workspace(i, j) if self.call.need.features else None
        config = self.config
        block = self._block(i, j, config.bk)
        tiles, cols = cdiv(block.m, TILE), cdiv(block.n, TILE)
        weight = None if self.weight is None else self.weight[i]
        # Sums of dS without a dS to store are rare: they have no fast kernel.
        all_masked = ds is None and (self.call.need.scale or self.call.need.bias)
        out = None if ds is None else new_descriptor(ds, TILE)
        for first, count, even in () if all_masked else by_last_tile(block.n):
            unmasked_tiles.launch(
                tiles * count, block, ds=out, partials=self._partials, bias=self.call.bias,
                weight=weight, first_col_tile=first, col_tiles=count, GROUP=config.group,
                EVEN_N=even, GAIN=self.gain, num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip
        chunk = CHUNKS[0] if tiles * cols >= LARGE else CHUNKS[1]
        masked_tiles.launch(
            cdiv(tiles * cols, chunk), block, ds=out, partials=self._partials, sums=self._sums,
            stride=self._sums.stride(0), bias=self.call.bias, weight=weight, CHUNK=chunk,
            ALL=all_masked, GAIN=self.gain, num_warps=16, num_stages=config.stages,
        )  # fmt: skip
        return ds

    def sums(self) -> Tensor:
        """(3,) float64: of losses, dS, and of dS * products if x and y are frozen."""
        total = self._sums.sum(1)
        return total if self.call.weight_divisor is None else total * self.call.weight_divisor

    def factor(self, divisor: int) -> Tensor:
        """The factor of the sums of dS times features."""
        factor = self.call.scale / (divisor * self.gain)
        return factor if self.call.weight_divisor is None else factor * self.call.weight_divisor

    def write_grad(
        self, total: Tensor, side: str, rows: slice, factor: Tensor, scale_grad: bool, out: Any
    ) -> Tensor | None:
        features = (self.x if side == "x" else self.y)[rows] if scale_grad else None
        values, place = out.values, out.place(rows)
        order = None if isinstance(place, slice) else place
        row_scale = out.row_scale if len(out.row_scale) else None
        if isinstance(place, slice):
            values = values[place]
            row_scale = None if row_scale is None else row_scale[place]
        parts = scale_rows(
            total, values, factor, values.shape[1], features=features, order=order,
            row_scale=row_scale, choose=row_scale is not None, gain=self.gain,
        )  # fmt: skip
        if parts is None:
            return None
        found = parts.sum(dtype=torch.float64)
        return found if self.call.weight_divisor is None else found * self.call.weight_divisor


# --- kernels --------------------------------------------------------------------------------------


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
    BK: tl.constexpr, GROUP: tl.constexpr, EVEN_N: tl.constexpr, DIAGONAL: tl.constexpr,
    GAIN: tl.constexpr,
):  # fmt: skip
    """dS * GAIN of a tile per program, and partials[tile]: sums of losses (in base 2) and of dS.

    The losses of a tile that needs masks are infinite. Unless EVEN_N, the last of these column
    tiles reaches past n. ds None: losses alone.
    """
    rows = BlockSide(x, None, row_start, m, None, row_ranges, row_range_stride, None)
    cols = BlockSide(y, None, col_start, n, None, col_ranges, col_range_stride, None)
    ti, tj = swizzle(tl.program_id(0), tl.cdiv(m, B), col_tiles, GROUP)
    tj += first_col_tile
    i = ti * B + tl.arange(0, B)
    k = tl.load(scale) * LOG2E
    shift = tl.load(bias) * LOG2E
    if not EVEN_N:
        shift = tl.where(tj * B + tl.arange(0, B) < n, shift, float("-inf"))[None, :]
    acc = logits_tile(rows, cols, ti, tj, d, BK)
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
    parts = partials + (ti * tl.cdiv(n, B) + tj) * (2 * PARTS) + tl.arange(0, PARTS)
    if ds is not None:
        root = tl.rsqrt(tl.fma(of_8, 1.0 / GAIN, 1.0 / GAIN))  # a division takes 7 operations
        inverse = root * root
        if weight is not None:
            inverse *= own
        inverse = _split_reciprocal(inverse, f, g)
        inverse = _split_reciprocal(inverse, c, e)
        left = tl.fma(a, b, a) * inverse  # a / (1 + a)
        right = tl.fma(a, b, b) * inverse
        gradients = _sum_of_halves(_sum_of_halves(_sum_of_halves(left + right)))
        ds.store([ti * B, tj * B], _join_halves(left, right).to(ds.dtype))
        tl.store(parts + PARTS, _sum_to_parts(tl.where((i < m)[:, None], gradients, 0.0)))
    losses = _sum_to_parts(tl.where((i < m)[:, None], loss, 0.0))
    if DIAGONAL != 0 or row_ranges is not None:
        masked = needs_mask(ti, tj, rows, cols, diagonal_offset, DIAGONAL)
        losses = tl.where(masked, float("inf"), losses)
    tl.store(parts, losses)


@block_kernel
def masked_tiles(
    x, y, ds, partials, sums, stride, scale, bias, weight, row_ids, col_ids,
    row_start, col_start, m, n, d, diagonal_offset,
    BK: tl.constexpr, CHUNK: tl.constexpr, ALL: tl.constexpr, DIAGONAL: tl.constexpr,
    GAIN: tl.constexpr,
):  # fmt: skip
    """The tiles whose partial sums are not finite, or ALL; each program looks at CHUNK tiles.

    Adds to sums[:, program] (float64) the losses, dS, and dS times the products <x, y>, the last
    from this kernel's own tiles alone. ds None: no dS is stored.
    """
    rows = BlockSide(x, None, row_start, m, row_ids, None, None, None)
    cols = BlockSide(y, None, col_start, n, col_ids, None, None, None)
    width = tl.cdiv(n, B)
    start = tl.program_id(0) * CHUNK
    end = tl.minimum(start + CHUNK, tl.cdiv(m, B) * width)
    loss_sum = tl.zeros((1,), tl.float64)
    ds_sum = tl.zeros((1,), tl.float64)
    scale_sum = tl.zeros((1,), tl.float64)
    if not ALL:
        index = start + tl.arange(0, CHUNK)
        finite = (index < end) & _is_finite(partials, tl.minimum(index, end - 1))
        parts = partials + index * (2 * PARTS)
        loss_sum += _sum_of_parts(parts, finite)
        if ds is not None:
            ds_sum += _sum_of_parts(parts + PARTS, finite)
        if tl.sum(finite.to(tl.int32), 0) == end - start:
            end = start
    factor = tl.load(scale)
    shift = tl.load(bias)
    for t in tl.range(start, end):
        ti = t // width
        tj = t % width
        wanted = True
        if not ALL:
            wanted = _is_finite(partials, t) == 0
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
def _is_finite(partials, tile):
    """Whether the sums of losses of a tile, or of a vector of tiles, are finite."""
    result = tile >= 0
    for part in tl.static_range(PARTS):
        loss = tl.load(partials + tile * (2 * PARTS) + part)
        result = result & (tl.abs(loss) < float("inf"))
    return result


@triton.jit
def _sum_of_parts(place, mask):
    total = tl.zeros((1,), tl.float64)
    for part in tl.static_range(PARTS):
        total += tl.sum(tl.load(place + part, mask=mask, other=0.0).to(tl.float64), 0)
    return total
