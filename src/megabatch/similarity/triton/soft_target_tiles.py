"""Blocks of soft targets of one device's matrix, by `soft_target_forward` and `_backward`."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megabatch.similarity import states
from megabatch.similarity.backends import capability
from megabatch.similarity.matrix import Matrix
from megabatch.similarity.tiles import State
from megabatch.similarity.triton import soft_target_backward, soft_target_forward
from megabatch.similarity.triton.blocking import TILE, cdiv
from megabatch.similarity.triton.blocks import Upstream, new_descriptor
from megabatch.similarity.triton.softmax import SoftmaxKernelTiles
from megabatch.similarity.triton.tiles import LN2, LOG2E, NO_DIAGONAL

#: Launch of the kernels: the accumulators of two tiles take the registers of eight warps.
WARPS, GROUP = 8, 32
#: Bytes of each row's features per step of a tile's products, and steps in shared memory at once:
#: in the forward pass, whose steps are of both products, and in the backward pass.
BYTES, STAGES, BACKWARD_STAGES = 128, 3, 4
#: On GPUs other than Hopper's, which may have 99 KiB of shared memory.
BYTES_ELSEWHERE, STAGES_ELSEWHERE = 64, 2
#: Numbers of an upstream that are log-sum-exps, whose spread in a tile counts.
SPREAD_LSES = (0, 2)
CHUNK = soft_target_forward.CHUNK.value


class SoftTargetKernelTiles(SoftmaxKernelTiles):
    """Tiles whose upstream is an `Upstream`."""

    def __init__(self, matrix: Matrix, scale: Tensor, teacher_scale: Tensor) -> None:
        super().__init__(matrix, scale)
        self.numbers, self.teacher_scale = states.TARGETS, teacher_scale
        hopper = self.x.is_cuda and capability(self.x.device)[0] == 9
        self._stages = (STAGES, BACKWARD_STAGES) if hopper else (STAGES_ELSEWHERE,) * 2
        self._bk = (BYTES if hopper else BYTES_ELSEWHERE) // self.x.element_size()

    def _forward_block(self, i: slice, j: slice, rows: State, cols: State | None) -> None:
        block = self._block(i, j, self._bk)
        block.set_states(rows, cols)
        m, n = block.m, block.n
        row_tiles, col_tiles = cdiv(m, TILE), cdiv(n, TILE)
        row_partials = self._empty(soft_target_forward.PARTS, col_tiles, m)
        col_partials = self._empty(soft_target_forward.PARTS, row_tiles, n)
        flags = self.x.new_empty(row_tiles * col_tiles, dtype=torch.int32)
        own = self._empty(2, m)
        if block.diagonal != NO_DIAGONAL:
            own.fill_(-torch.inf)
        soft_target_forward.unmasked_forward.launch(
            row_tiles * col_tiles, block, teacher_scale=self.teacher_scale,
            row_partials=row_partials, col_partials=col_partials, flags=flags,
            GROUP=GROUP, EVEN=m % TILE == 0 and n % TILE == 0,
            num_warps=WARPS, num_stages=self._stages[0],
        )  # fmt: skip
        soft_target_forward.masked_forward.launch(
            cdiv(row_tiles * col_tiles, CHUNK), block, teacher_scale=self.teacher_scale,
            row_partials=row_partials, col_partials=col_partials, flags=flags,
            own=own, stride=own.stride(0), num_warps=WARPS, num_stages=self._stages[0],
        )  # fmt: skip
        soft_target_forward.combine_partials.launch(
            row_tiles + (0 if cols is None else col_tiles), block, row_partials=row_partials,
            col_partials=col_partials, own=own, stride=own.stride(0),
        )  # fmt: skip

    def merge(self, parts: Tensor) -> Tensor:
        return _in_base(states.merge_targets(_in_base(parts, LN2)), LOG2E)

    def write_results(self, parts: Tensor, out: Tensor) -> None:
        states.to_target_results(states.merge_targets(_in_base(parts, LN2)), out)

    def make_upstream(self, results: Tensor, gradient: Tensor) -> Upstream:
        return Upstream.of(states.target_upstream(results, gradient), SPREAD_LSES)

    def unpack_upstream(self, packed: Tensor | None) -> Upstream | None:
        return None if packed is None else Upstream.of(packed, SPREAD_LSES)

    def gradient_block(
        self, i: slice, j: slice, rows: Upstream | None, cols: Upstream | None
    ) -> Tensor:
        block, ds = self._block(i, j, self._bk), self._workspace(i, j)
        block.set_upstreams(
            self._without_gradient(block.m) if rows is None else rows.view(i),
            self._without_gradient(block.n) if cols is None else cols.view(j),
        )
        tiles, out = cdiv(block.m, TILE) * cdiv(block.n, TILE), new_descriptor(ds, TILE)
        soft_target_backward.unmasked_backward.launch(
            tiles, block, ds=out, teacher_scale=self.teacher_scale, GROUP=GROUP,
            num_warps=WARPS, num_stages=self._stages[1],
        )  # fmt: skip
        soft_target_backward.masked_backward.launch(
            cdiv(tiles, CHUNK), block, ds=out, teacher_scale=self.teacher_scale,
            num_warps=WARPS, num_stages=self._stages[0],
        )  # fmt: skip
        return ds

    def _without_gradient(self, size: int) -> Upstream:
        """The upstream of a side that has none: gradients of 0, and log-sum-exps of +inf.

        At a finite one an exponential could overflow, and infinity times 0 is NaN.
        """
        packed = self._empty(states.TARGETS.upstream, size).zero_()
        for lse in SPREAD_LSES:
            packed[lse] = torch.inf
        return Upstream.of(packed, SPREAD_LSES)


def _in_base(state: Tensor, factor: tl.constexpr) -> Tensor:
    """A copy of a state, or of several, with references and terms in another base.

    `factor`: LN2 for base e, LOG2E for base 2.
    """
    factors = state.new_ones(states.TARGETS.state, 1)
    factors[[0, 2, 6, 8, 9]] = factor.value
    return state * factors
