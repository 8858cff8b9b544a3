"""One device with fused kernels: the same interface as `sweep.Blocks`, far fewer launches.

States and pulls are laid out as `tile_torch` documents, with a state's references in base 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megabatch.similarity.fused import backward, forward
from megabatch.similarity.fused.configs import TILE, backward_config, forward_config
from megabatch.similarity.fused.tiles import DROPPED, NO_DIAGONAL, POSITIVE
from megabatch.similarity.pairs import PAIRED, PLAIN, Pairs
from megabatch.similarity.tile_torch import add_product

#: A block's side is a multiple, so that only its last tiles may be partly empty.
GROUP = 4 * TILE
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
        self.width = x.shape[1]
        self.x = _aligned(x)
        self.y = self.x if y is x else _aligned(y)
        self.pairs, self.symmetric = pairs, symmetric
        self.d = self.x.shape[1]
        self.configs = forward_config(x), backward_config(x)
        # dS of one block, in the features' dtype, is most of the workspace.
        side = int(math.sqrt(workspace / x.element_size()))
        self.rows = self.columns = max(GROUP, side // GROUP * GROUP)
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
                self._forward_block(i, j, scale, rows[:, i], None if other is None else other[:, j])

    def _forward_block(
        self, i: slice, j: slice, scale: Tensor, rows: Tensor, columns: Tensor | None
    ) -> None:
        m, n = i.stop - i.start, j.stop - j.start
        pairs, config = self.pairs.view(i, j), self.configs[0]
        row_tiles, column_tiles = triton.cdiv(m, TILE), triton.cdiv(n, TILE)
        programs = row_tiles + (0 if columns is None else column_tiles)
        flags = rows.new_ones(row_tiles + column_tiles, dtype=torch.int32)
        row_flags, column_flags = flags[:row_tiles], flags[row_tiles:]
        other = rows if columns is None else columns  # the kernels then never touch it
        diagonal = _diagonal(pairs) if pairs.crosses_diagonal(m, n) else NO_DIAGONAL
        offset = pairs.column_start - pairs.row_start
        xd, yd = self._descriptors(config.bk)
        if not self._masked:
            row_sums, column_sums, references, tops = self._sums(
                i, j, scale, diagonal != NO_DIAGONAL, offset, columns is not None
            )
            forward.merge[(programs,)](
                row_sums, references, rows, rows.stride(0), row_flags, len(row_sums), m,
                column_sums, tops, other, other.stride(0), column_flags, len(tops), n,
                SIZE=config.rows * TILE, B=TILE, P=32,
            )  # fmt: skip
        forward.exact[(programs,)](
            xd, yd, scale, rows, rows.stride(0), row_flags, other, other.stride(0), column_flags,
            pairs.row_ids, pairs.column_ids, pairs.ceiling, i.start, j.start, m, n, self.d, offset,
            BM=TILE, BN=TILE, BK=config.bk, DIAGONAL=diagonal, **self._kinds(),
            POSITIVES=rows.shape[0] == 6, num_warps=8, num_stages=config.stages,
        )  # fmt: skip

    def _sums(
        self, i: slice, j: slice, scale: Tensor, diagonal: bool, offset: int, columns: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(row sums, column sums, the rows' references, their groups' largest) of one block."""
        m, n = i.stop - i.start, j.stop - j.start
        config = self.configs[0]
        groups, tiles = triton.cdiv(m, config.rows * TILE), triton.cdiv(n, TILE)
        references = self._empty(groups * config.rows * TILE)
        tops, row_sums, column_sums = (
            self._empty(groups), self._empty(tiles, m), self._empty(groups, n)
        )  # fmt: skip
        xd, yd = self._descriptors(config.bk)
        common = {"BM": TILE, "BN": TILE, "BK": config.bk, "DIAGONAL": diagonal}
        common |= {"num_warps": config.warps, "num_stages": config.stages}
        forward.reference[(groups * config.rows,)](
            xd, self.y, self.y.stride(0), scale, references, i.start, j.start, m, n, self.d, offset,
            **common,
        )  # fmt: skip
        # The last column tile apart where it reaches past the end: a mask costs the others 4%.
        whole = n // TILE
        for first, count, even in ((0, whole, True), (whole, tiles - whole, False)):
            if count:
                forward.tile[(groups * count,)](
                    xd, yd, scale, references, tops, row_sums, column_sums,
                    i.start, j.start, m, n, self.d, first, count, offset,
                    R=config.rows, GROUP=config.group, COLUMNS=columns, EVEN=even, **common,
                )  # fmt: skip
        return row_sums, column_sums, references, tops

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
        near = _Side.of(None if rows is None else rows[:, i], scale)
        far = _Side.of(columns, scale)
        for j in _slices(self.y.shape[0], self.columns):
            if self.symmetric and j.start < i.start:
                continue
            ds = self._gradient_block(i, j, scale, near, far.view(j))
            if dx is not None:
                add_product(dx, ds, self.y[j])
            if dy is not None and not (self.symmetric and i == j):
                add_product(dy[j], ds.T, self.x[i])

    def _gradient_block(
        self, i: slice, j: slice, scale: Tensor, rows: _Side, columns: _Side
    ) -> Tensor:
        """dS (m, n) of one block, in the features' dtype, in the workspace."""
        m, n = i.stop - i.start, j.stop - j.start
        pairs, config = self.pairs.view(i, j), self.configs[1]
        ds = self._workspace(m, n)
        tiles, column_tiles = triton.cdiv(m, TILE), triton.cdiv(n, TILE)
        common = {"BM": TILE, "BN": TILE, "BK": config.bk, "COLUMNS": columns.wanted}
        common |= {"num_stages": config.stages}
        xd, yd = self._descriptors(config.bk)
        pulls = rows.pull, rows.stride, columns.pull, columns.stride
        everything = self._masked or not rows.wanted
        if not everything:
            backward.tile[(triton.cdiv(tiles, config.rows) * column_tiles,)](
                xd, yd, _descriptor(ds, TILE // config.split), scale, *pulls,
                i.start, j.start, m, n, self.d, R=config.rows, GROUP=config.group,
                SPLIT=config.split, num_warps=config.warps, **common,
            )  # fmt: skip
        chunk = 1 if everything else 64
        backward.exact[(triton.cdiv(tiles * column_tiles, chunk),)](
            xd, yd, _descriptor(ds, TILE), scale, *pulls,
            rows.extremes, rows.tiles, columns.extremes, columns.tiles,
            pairs.row_ids, pairs.column_ids, pairs.ceiling,
            i.start, j.start, m, n, self.d, pairs.column_start - pairs.row_start,
            CHUNK=chunk, ALL=everything, ROWS=rows.wanted, **self._kinds(), LIMIT=SPREAD,
            DIAGONAL=_diagonal(pairs) if pairs.crosses_diagonal(m, n) else NO_DIAGONAL,
            POSITIVES=rows.positives or columns.positives, num_warps=8, **common,
        )  # fmt: skip
        return ds

    def _workspace(self, m: int, n: int) -> Tensor:
        stride = triton.cdiv(n, 64) * 64  # rows that a descriptor and a fast product can take
        if self._ds is None or self._ds.numel() < m * stride:
            self._ds = self.x.new_empty(m * stride)
        return self._ds[: m * stride].view(m, stride)[:, :n]

    # --- around the sweep -------------------------------------------------------------------

    def _empty(self, *shape: int) -> Tensor:
        return self.x.new_empty(shape, dtype=torch.float32)

    def _descriptors(self, columns: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        return _descriptor(self.x, columns), _descriptor(self.y, columns)

    def _kinds(self) -> dict[str, bool]:
        return {
            "IDS": self.pairs.row_ids is not None,
            "OWN": self.pairs.diagonal == PAIRED,
            "CEILING": self.pairs.ceiling is not None,
        }

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
        size, d = len(features), self.width
        block = 16
        # The gradient of features that are stored by columns is stored so too.
        target = out if out is None or out.stride(1) == 1 else out.new_empty(out.shape)
        parts = total.new_zeros(max(1, triton.cdiv(size, block)))
        if size:
            backward.finish[(triton.cdiv(size, block),)](
                total, features, total if target is None else target, factor, parts, size, d,
                total.stride(0), features.stride(0), 0 if target is None else target.stride(0),
                B=block, BD=128, INNER=inner, OUT=out is not None,
            )  # fmt: skip
        if out is not None and target is not None and target is not out:
            out.copy_(target)
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
