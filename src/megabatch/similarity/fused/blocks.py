"""One device with fused kernels: the same interface as `sweep.Blocks`, far fewer launches.

States and pulls are laid out as `tile_torch` documents, with a state's references in base 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megabatch.similarity.fused import backward, forward
from megabatch.similarity.fused.configs import TILE, backward_config, forward_config
from megabatch.similarity.fused.tiles import (
    COLUMNS,
    DROPPED,
    NO_CEILING,
    NO_DIAGONAL,
    POSITIVE,
    ROWS,
)
from megabatch.similarity.pairs import PAIRED, PLAIN, Pairs

SAMPLES = 128
#: Largest difference of log2 log-sum-exps that share one exponential's reference.
SPREAD = 80.0
#: float16 holds dS from 2^-24 to 2^16: upstream gradients are brought to this size. At most six
#: terms of it meet in one dS, and a probability of 1 / 4M still is a normal number.
HALF_SIZE = 4096.0


class FusedBlocks:
    """The blocks of x (m, d) against y (n, d) on one GPU; see `sweep.Blocks`."""

    #: A state's reference times this is a natural logarithm.
    unit = math.log(2)

    def __init__(self, x: Tensor, y: Tensor, pairs: Pairs, symmetric: bool, workspace: int) -> None:
        self.features = x, y
        self.x = _aligned(x)
        self.y = self.x if y is x else _aligned(y)
        self.pairs, self.symmetric = pairs, symmetric
        self.d = self.x.shape[1]
        # dS of one block, in the features' dtype, is most of the workspace.
        side = int(math.sqrt(workspace / x.element_size()))
        self.rows = self.columns = max(TILE * 4, side // (TILE * 4) * (TILE * 4))
        self._ds: Tensor | None = None
        self._masked = pairs.row_ids is not None or pairs.ceiling is not None

    # --- forward ----------------------------------------------------------------------------

    def forward(self, scale: Tensor, rows: Tensor, columns: Tensor | None) -> None:
        """Merge all blocks into the states of the rows and, unless None, of the columns."""
        # The forward's workspace is one sum a tile and row: larger blocks fit.
        step = self.rows if self.symmetric else 2 * self.rows
        for i in _slices(self.x.shape[0], step):
            for j in _slices(self.y.shape[0], step):
                if self.symmetric and j.start < i.start:
                    continue
                other = rows if self.symmetric and i != j else columns
                self._forward_block(i, j, scale, rows, other)

    def _forward_block(
        self, i: slice, j: slice, scale: Tensor, rows: Tensor, columns: Tensor | None
    ) -> None:
        x, y, pairs = self.x[i], self.y[j], self.pairs.view(i, j)
        row_flags, column_flags = (
            torch.ones(triton.cdiv(len(t), TILE), dtype=torch.int32, device=x.device)
            for t in (x, y)
        )
        if not self._masked:
            self._fast_forward(
                x, y, scale, pairs, rows[:, i], columns if columns is None else columns[:, j],
                row_flags, column_flags,
            )  # fmt: skip
        self._exact_forward(x, y, scale, pairs, rows[:, i], row_flags, swapped=False)
        if columns is not None:
            self._exact_forward(y, x, scale, pairs, columns[:, j], column_flags, swapped=True)

    def _fast_forward(
        self,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        pairs: Pairs,
        rows: Tensor,
        columns: Tensor | None,
        row_flags: Tensor,
        column_flags: Tensor,
    ) -> None:
        (m, d), n = x.shape, len(y)
        config = forward_config(x)
        group = TILE * config.rows
        groups = triton.cdiv(m, group)
        launch = {"num_warps": config.warps, "num_stages": config.stages}
        tiles = {"BM": TILE, "BN": TILE, "BK": config.bk}
        offset = pairs.column_start - pairs.row_start
        diagonal = pairs.crosses_diagonal(m, n)
        xd, yd = _descriptor(x, config.bk), _descriptor(y, config.bk)

        references = self._references(x, y, scale, pairs, groups * group, launch, tiles)
        tops = references.view(groups, group)
        tops = tops.masked_fill(tops == math.inf, -math.inf).amax(1)
        # A row far below its group would vanish in the columns' weights.
        references = references.maximum((tops - 100).repeat_interleave(group))

        row_sums = x.new_empty((triton.cdiv(n, TILE), m), dtype=torch.float32)
        column_sums = x.new_empty((groups, n), dtype=torch.float32)
        whole = n // TILE
        for first, last, even in ((0, whole, True), (whole, triton.cdiv(n, TILE), False)):
            if first == last:
                continue
            forward.tile[(groups * (last - first),)](
                xd, yd, scale, references, row_sums, column_sums,
                m, whole * TILE if even else n, d, first, offset,
                **tiles, R=config.rows, GROUP=config.group, DIAGONAL=diagonal,
                COLUMNS=columns is not None, EVEN=even, **launch,
            )  # fmt: skip
        forward.merge[(len(row_flags),)](
            row_sums, references, rows, rows.stride(0), row_flags, len(row_sums), m,
            B=TILE, P=32, COMMON=False,
        )  # fmt: skip
        if columns is not None:
            forward.merge[(len(column_flags),)](
                column_sums, tops, columns, columns.stride(0), column_flags, groups, n,
                B=TILE, P=32, COMMON=True,
            )  # fmt: skip

    def _references(
        self,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        pairs: Pairs,
        size: int,
        launch: dict[str, int],
        tiles: dict[str, int],
    ) -> Tensor:
        """A reference a row, from a sample of the columns spread over the block."""
        m, n = len(x), len(y)
        index = torch.arange(SAMPLES, device=x.device) * max(1, n // SAMPLES)
        sample = y[index.clamp(max=n - 1)]
        index = torch.where(index < n, index + pairs.column_start, -1)
        references = x.new_empty(size, dtype=torch.float32)
        forward.reference[(size // TILE,)](
            _descriptor(x, tiles["BK"]), _descriptor(sample, tiles["BK"]), index, scale, references,
            m, x.shape[1], pairs.row_start, **tiles, DIAGONAL=pairs.diagonal != PLAIN, **launch,
        )  # fmt: skip
        return references

    def _exact_forward(
        self,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        pairs: Pairs,
        state: Tensor,
        flags: Tensor,
        swapped: bool,
    ) -> None:
        """The rows of one side: flagged tiles, tiles on the diagonal, all tiles with masks."""
        config = forward_config(x)
        row_ids, column_ids, ceiling, offset, kinds = _masks(pairs, swapped)
        forward.exact[(len(flags),)](
            _descriptor(x, config.bk), _descriptor(y, config.bk), scale, state, state.stride(0),
            flags, row_ids, column_ids, ceiling, len(x), len(y), x.shape[1], offset,
            BM=TILE, BN=TILE, BK=config.bk, **kinds,
            DIAGONAL=_diagonal(pairs) if pairs.crosses_diagonal(*_shape(x, y, swapped)) else 0,
            POSITIVES=state.shape[0] == 6, num_warps=8, num_stages=config.stages,
        )  # fmt: skip

    # --- backward ---------------------------------------------------------------------------

    def backward(
        self,
        i: slice,
        scale: Tensor,
        rows: Tensor | None,
        columns: Tensor | None,
        dx: Tensor | None,
        dy: Tensor | None,
    ) -> None:
        """Add the gradients of one strip of rows `i`: dx holds that strip, dy all columns.

        With `symmetric`, dx and dy are views of one gradient of all rows, `columns` is `rows`.
        """
        x = self.x[i]
        near = _Side.of(None if rows is None else rows[:, i], scale)
        far = _Side.of(columns, scale)
        for j in _slices(self.y.shape[0], self.columns):
            if self.symmetric and j.start < i.start:
                continue
            y = self.y[j]
            ds = self._gradient_block(x, y, scale, self.pairs.view(i, j), near, far.view(j))
            if dx is not None:
                _add_product(dx, ds, y)
            if dy is not None and not (self.symmetric and i == j):
                _add_product(dy[j], ds.T, x)

    def _gradient_block(
        self, x: Tensor, y: Tensor, scale: Tensor, pairs: Pairs, rows: _Side, columns: _Side
    ) -> Tensor:
        """dS (m, n) of one block, in the features' dtype, in the workspace."""
        m, n = len(x), len(y)
        config = backward_config(x)
        ds = self._workspace(m, n)
        tiles = triton.cdiv(m, TILE) * triton.cdiv(n, TILE)
        row_ids, column_ids, ceiling, offset, kinds = _masks(pairs, swapped=False)
        common = {
            "BM": TILE,
            "BN": TILE,
            "BK": config.bk,
            "COLUMNS": columns.wanted,
            "DIAGONAL": _diagonal(pairs) if pairs.crosses_diagonal(m, n) else NO_DIAGONAL,
            "LIMIT": SPREAD,
            "num_stages": config.stages,
        }
        descriptors = _descriptor(x, config.bk), _descriptor(y, config.bk), _descriptor(ds, TILE)
        sides = (
            rows.pull, rows.stride, columns.pull, columns.stride,
            rows.extremes, rows.tiles, columns.extremes, columns.tiles,
        )  # fmt: skip
        everything = self._masked or not rows.wanted
        if not everything:
            backward.tile[(tiles,)](
                *descriptors, scale, *sides, m, n, x.shape[1], offset,
                GROUP=config.group, num_warps=config.warps, **common,
            )  # fmt: skip
        chunk = 1 if everything else 16
        backward.exact[(triton.cdiv(tiles, chunk),)](
            *descriptors, scale, *sides, row_ids, column_ids, ceiling, m, n, x.shape[1], offset,
            CHUNK=chunk, ALL=everything, ROWS=rows.wanted, **kinds,
            POSITIVES=rows.positives or columns.positives, num_warps=8, **common,
        )  # fmt: skip
        return ds

    def _workspace(self, m: int, n: int) -> Tensor:
        stride = triton.cdiv(n, 64) * 64  # rows that a descriptor and a fast product can take
        if self._ds is None or self._ds.numel() < m * stride:
            self._ds = self.x.new_empty(m * stride)
        return self._ds[: m * stride].view(m, stride)[:, :n]

    # --- around the sweep -------------------------------------------------------------------

    def accumulator(self, rows: int) -> Tensor:
        """Zeros for the gradients of `rows` rows."""
        return self.x.new_zeros((rows, self.d), dtype=torch.float32)

    def prepare(self, rows: Tensor | None, columns: Tensor | None) -> Tensor | None:
        """Bring pulls into dS's range, in place; returns what gradients are to be multiplied by."""
        if self.x.dtype != torch.float16:
            return None
        parts = [p[1::2].abs().amax() for p in (rows, columns) if p is not None and p.numel()]
        parts += [p[4].abs().amax() for p in (rows, columns) if p is not None and len(p) == 5]
        if not parts:
            return None
        size = torch.stack(parts).amax()
        size = torch.where(size == 0, torch.ones_like(size), size) / HALF_SIZE
        for p in (rows, columns):
            if p is not None:
                p[1::2] /= size
                p[4:] /= size
        return size

    def finish(
        self, total: Tensor, side: str, rows: slice, factor: Tensor, inner: bool, out: Tensor | None
    ) -> Tensor | None:
        """out = factor * total in out's dtype; <features, total> if `inner` is wanted.

        `total` belongs to these `rows` of the features of `side`, "x" or "y".
        """
        features = (self.x if side == "x" else self.y)[rows]
        size, d = len(features), self.features[0].shape[1]
        block = 16
        parts = total.new_zeros(max(1, triton.cdiv(size, block)))
        if size:
            backward.finish[(triton.cdiv(size, block),)](
                total, features, total if out is None else out, factor, parts, size, d,
                total.stride(0), features.stride(0), 0 if out is None else out.stride(0),
                B=block, BD=128, INNER=inner, OUT=out is not None,
            )  # fmt: skip
        return parts.sum() if inner else None


class _Side(NamedTuple):
    """One side's pull, and its tiles' smallest and largest log-sum-exps."""

    wanted: bool
    pull: Tensor
    extremes: Tensor
    stride: int = 0
    tiles: int = 0
    positives: bool = False

    @classmethod
    def of(cls, pull: Tensor | None, placeholder: Tensor) -> _Side:
        """None: a side without upstream gradients; the kernels never read the placeholder."""
        if pull is None:
            return cls(False, placeholder, placeholder)
        tiles = triton.cdiv(pull.shape[1], TILE)
        extremes = pull.new_empty(2, tiles)
        backward.extremes[(tiles,)](pull, extremes, pull.shape[1], tiles, B=TILE)
        return cls(True, pull, extremes, pull.stride(0), tiles, len(pull) == 5)

    def view(self, columns: slice) -> _Side:
        """These columns, whole tiles but for the last."""
        if not self.wanted:
            return self
        return self._replace(
            pull=self.pull[:, columns], extremes=self.extremes[:, columns.start // TILE :]
        )


def _slices(n: int, step: int) -> Iterator[slice]:
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def _aligned(x: Tensor) -> Tensor:
    """Rows of 16-byte multiples, as a descriptor wants them: else a zero-padded copy."""
    unit = 16 // x.element_size()
    if x.shape[1] % unit:
        return F.pad(x, (0, -x.shape[1] % unit))
    if x.stride(1) != 1 or x.stride(0) % unit or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _descriptor(x: Tensor, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [TILE, columns])


def _diagonal(pairs: Pairs) -> int:
    if pairs.diagonal == PLAIN:
        return NO_DIAGONAL
    return POSITIVE if pairs.diagonal == PAIRED else DROPPED


def _shape(x: Tensor, y: Tensor, swapped: bool) -> tuple[int, int]:
    return (len(y), len(x)) if swapped else (len(x), len(y))


def _masks(
    pairs: Pairs, swapped: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, int, dict[str, object]]:
    """(row ids, column ids, ceiling, i - j of pairs (i, i), the kernels' constants)."""
    if swapped:
        pairs = replace(
            pairs,
            row_ids=pairs.column_ids,
            column_ids=pairs.row_ids,
            row_start=pairs.column_start,
            column_start=pairs.row_start,
        )
    side = NO_CEILING if pairs.ceiling is None else COLUMNS if swapped else ROWS
    kinds: dict[str, object] = {"IDS": pairs.row_ids is not None, "CEILING": side}
    offset = pairs.column_start - pairs.row_start
    return pairs.row_ids, pairs.column_ids, pairs.ceiling, offset, kinds


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == torch.float32 or not left.is_cuda:
        total.addmm_(left.float(), right.float())
    else:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
