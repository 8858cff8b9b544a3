"""One device with fused kernels: the sigmoid loss and its gradients from one sweep."""

from __future__ import annotations

import torch
from torch import Tensor

from megabatch.similarity import sweep
from megabatch.similarity.fused import backward, sigmoid
from megabatch.similarity.fused.blocks import FusedBlocks, diagonal_of, new_descriptor
from megabatch.similarity.fused.cuts import TILE, cdiv, product_parts
from megabatch.similarity.fused.tiles import NO_DIAGONAL
from megabatch.similarity.pairs import Pairs
from megabatch.similarity.tile_torch import add_product

#: float16 holds dS, up to 1, from 6e-8 on; times this, from 2e-12 on.
HALF_GAIN = 2.0**15


class SigmoidBlocks(FusedBlocks):
    """The blocks of x (m, d) against y (n, d), each visited once for its loss and gradients."""

    def __init__(self, x: Tensor, y: Tensor, pairs: Pairs, weight: Tensor | None) -> None:
        super().__init__(x, y, pairs, False, sweep.workspace(x))
        self.features, self.weight = (x, y), weight
        # A weight is any size: then dS is as small as it is.
        small = x.dtype == torch.float16 and weight is None
        self.gain = HALF_GAIN if small else 1.0

    def add(
        self,
        scale: Tensor,
        bias: Tensor,
        dx: Tensor | None,
        dy: Tensor | None,
        dscale: Tensor | None,
        dbias: Tensor | None,
    ) -> Tensor:
        """As `megabatch.similarity.sigmoid.add_blocks`."""
        x, y = self.features
        total = scale.new_zeros((), dtype=torch.float64)
        wanted = dx is not None or dy is not None or dscale is not None or dbias is not None
        for i in product_parts(len(x), self.rows):
            strip = None if dx is None else dx[i]
            if dx is None and dscale is not None:
                strip = self.x.new_zeros(x[i].shape, dtype=torch.float32)
            for j in product_parts(len(y), self.columns):
                ds, sums = self._block(i, j, scale, bias, wanted)
                total += sums[0].sum(dtype=torch.float64)
                if dbias is not None:
                    dbias += sums[1].sum(dtype=torch.float64)
                if strip is not None:
                    add_product(strip, ds, y[j], 1 / self.gain)
                if dy is not None:
                    add_product(dy[j], ds.T, x[i], 1 / self.gain)
            if strip is not None and dscale is not None:
                dscale += _inner(x[i], strip)
        return total

    def _block(
        self, i: slice, j: slice, scale: Tensor, bias: Tensor, gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """(dS (m, n) times `gain`, sums of losses and of dS (2, tiles)) of one block."""
        m, n = i.stop - i.start, j.stop - j.start
        pairs, config = self.pairs.view(i, j), self.configs[1]
        ds = self._workspace(m, n)
        tiles, columns = cdiv(m, TILE), cdiv(n, TILE)
        sums = self._empty(2, tiles * columns)
        weight = None if self.weight is None else self.weight[i]
        diagonal = diagonal_of(pairs) if pairs.crosses_diagonal(m, n) else NO_DIAGONAL
        common: dict[str, int | float | bool] = {
            "BM": TILE,
            "BN": TILE,
            "BK": config.bk,
            "num_stages": config.stages,
        }
        common |= {"DIAGONAL": diagonal, "IDS": pairs.row_ids is not None, "GAIN": self.gain}
        common |= {"WEIGHT": weight is not None, "GRADIENT": gradient}
        near, far = (r.view(s) for r, s in zip(self._ranges, (i, j), strict=True))
        place = i.start, j.start, m, n, self.d, pairs.column_start - pairs.row_start
        xd, yd = self._descriptors(config.bk)
        sigmoid.tile[(cdiv(tiles, config.rows) * columns,)](
            xd, yd, new_descriptor(ds, TILE // config.split), scale, bias, weight, sums,
            *near, *far, *place,
            R=config.rows, GROUP=config.group, SPLIT=config.split, num_warps=config.warps, **common,
        )  # fmt: skip
        sigmoid.exact[(cdiv(tiles * columns, 64),)](
            xd, yd, new_descriptor(ds, TILE), scale, bias, weight, sums,
            pairs.row_ids, pairs.column_ids, *place,
            CHUNK=64, num_warps=8, **common,
        )  # fmt: skip
        return ds, sums


def _inner(features: Tensor, total: Tensor) -> Tensor:
    """<features, total> in one launch."""
    rows, d = total.shape
    parts = total.new_empty(cdiv(rows, 16))
    backward.finish[(len(parts),)](
        total, features, total, total, parts, rows, d, total.stride(0), features.stride(0), 0,
        B=16, BD=128, INNER=True, OUT=False,
    )  # fmt: skip
    return parts.sum(dtype=torch.float64)
