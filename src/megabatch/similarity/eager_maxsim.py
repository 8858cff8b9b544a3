"""Blocks of late interaction's logits in torch operations, on any device.

The logit of a query and a document is the sum over the query's tokens of the largest product with a
token of the document (Khattab and Zaharia 2020, arXiv 2004.12832, equation 3). A block of logits is
computed from tiles of tokens' products; what follows is the same as for other logits. The backward
pass needs the *places* of the largest products: for each query's token and document, a token of the
document.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.eager import BUFFERS, SoftmaxTiles, logits, whole_groups
from megabatch.similarity.matrix import Matrix, strips

#: Queries and documents of a block of logits.
BLOCK = 256
#: Tokens of queries and of documents of a tile of products, as in `eager.block_shape`.
TILE = 512, 1024
#: Bytes for a query's token and a document of a block: the place, its gradient, and both in the
#: order of the documents' tokens.
PLACE_BYTES = 40
#: Wider tokens do not fit into the kernels' shared memory, beside a tile of others.
WIDEST = 256


class MaxSimTiles(SoftmaxTiles):
    """The blocks of queries x (m, l, d) against documents y (n, k, d)."""

    _places: Tensor  #: of the block that `gradient_block` computed

    def __init__(self, matrix: Matrix, scale: Tensor, saved: Tensor) -> None:
        """`saved`: for the logits and places of the first blocks, which the backward pass reads."""
        self._saved_places: dict[tuple[int, int], Tensor] = {}
        super().__init__(matrix, scale, saved)

    @classmethod
    def saved_numbers(cls, x: Tensor, y: Tensor, limit: int) -> int:
        """Size of `saved` for all blocks, or for those that fit into half of `limit` bytes."""
        item = accumulator_dtype(x.dtype).itemsize
        shape, kind = cls.places_form(x, y, x.shape[0], y.shape[0])
        whole = x.shape[0] * y.shape[0] + math.prod(shape) * kind.itemsize // item
        return min(whole + 64, limit // 2 // item)

    @classmethod
    def places_form(
        cls, x: Tensor, y: Tensor, queries: int, documents: int
    ) -> tuple[tuple[int, int], torch.dtype]:
        """Shape and dtype of the places of so many queries like x and documents like y."""
        return (queries * x.shape[1], documents), torch.int32

    def _block_shape(self) -> tuple[int, int]:
        (_, queries, width), documents = self.x.shape, self.y.shape[1]
        item = accumulator_dtype(self.x.dtype).itemsize
        size, limit = BLOCK, settings.workspace(self.x)
        pair = BUFFERS * item + PLACE_BYTES * queries
        row = item * width * (queries + documents)
        while size > 1 and size * (size * pair + row) > limit:
            size //= 2
        return size, size

    def _saved_blocks(self, saved: Tensor) -> dict[tuple[int, int], Tensor]:
        blocks: dict[tuple[int, int], Tensor] = {}
        used = 0
        for i in self.row_blocks():
            for j in self.col_blocks(i):
                m, n, at = i.stop - i.start, j.stop - j.start, (i.start, j.start)
                shape, kind = self.places_form(self.x, self.y, m, n)
                count, start = math.prod(shape), _aligned(used + m * n)
                end = _aligned(start + -(-count * kind.itemsize // saved.element_size()))
                if end > saved.numel():
                    return blocks
                blocks[at] = saved[used : used + m * n].view(m, n)
                self._saved_places[at] = saved[start:end].view(kind)[:count].view(shape)
                used = end
        return blocks

    def scores(self, i: slice, j: slice) -> Tensor:
        """The logits of a block without scale and weights, (m, n), in which equal columns tie."""
        m, n = i.stop - i.start, j.stop - j.start
        return self._sums(i, j, self.x.new_empty(m, n, dtype=accumulator_dtype(self.x.dtype)))

    def _logits(self, i: slice, j: slice, out: Tensor) -> Tensor:
        places = self._saved_places.get((i.start, j.start))
        return self._weighted(self._sums(i, j, out, places), i).mul_(self.scale)

    def gradient_block(
        self, i: slice, j: slice, rows: Tensor | None, cols: Tensor | None
    ) -> Tensor:
        """The gradient of a block's sums without the scale: dS times the rows' weights."""
        return self._weighted(super().gradient_block(i, j, rows, cols), i)

    def _logits_again(self, i: slice, j: slice) -> tuple[Tensor, Tensor]:
        s, scratch = self._place(i, j)
        if not self._find_places(i, j):
            s = self._weighted(self._sums(i, j, s, self._places), i).mul_(self.scale)
        return s, scratch

    def _find_places(self, i: slice, j: slice) -> bool:
        """Set `_places` to a block's; whether they are saved, and not to be computed again."""
        saved = self._saved_places.get((i.start, j.start))
        if saved is not None:
            self._places = saved
            return True
        shape, kind = self.places_form(self.x, self.y, i.stop - i.start, j.stop - j.start)
        self._places = self.x.new_empty(shape, dtype=kind)
        return False

    def _weighted(self, sums: Tensor, i: slice) -> Tensor:
        """`sums` of the rows `i`, in place, times their weights."""
        weight = self.matrix.rows.weight
        return sums if weight is None else sums.mul_(weight[i, None])

    def _sums(self, i: slice, j: slice, out: Tensor, places: Tensor | None = None) -> Tensor:
        """Sums of the largest products, (m, n), written to `out`; their places to `places`."""
        x, y, lengths = self._tokens(self.x[i]), self.y[j], self.matrix.cols.lengths
        if places is not None:
            places.zero_()
        for docs in strips(len(y), max(1, TILE[1] // y.shape[1])):
            count = docs.stop - docs.start
            largest = x.new_full((len(x), count), -torch.inf, dtype=out.dtype)
            for k in strips(y.shape[1], TILE[1]):
                tokens, padding = self._tokens(y[docs, k]), None
                size, tokens = len(tokens), whole_groups(tokens)
                if lengths is not None:
                    positions = torch.arange(k.start, k.stop, device=y.device)
                    padding = positions >= lengths[j][docs, None]
                for rows in strips(len(x), TILE[0]):
                    products = logits(x[rows], tokens)[:, :size].unflatten(1, (count, -1))
                    if padding is not None:
                        products.masked_fill_(padding, -torch.inf)
                    found = None if places is None else places[rows, docs]
                    _merge_largest(largest[rows], found, products, k.start)
            # In float64, as the order of the sum differs between columns, and with padding.
            sums = largest.unflatten(0, (-1, self.x.shape[1])).sum(1, dtype=torch.float64)
            out[:, docs] = sums
        return out

    def add_gradients(
        self,
        i: slice,
        j: slice,
        ds: Tensor,
        totals: tuple[Tensor | None, Tensor | None],
        overwrite: tuple[bool, bool],
    ) -> None:
        """ds: as of `gradient_block`."""
        for total, new in zip(totals, overwrite, strict=True):
            if new and total is not None:
                total.zero_()
        dx, dy = totals
        x, y = (features.to(ds.dtype).flatten(0, 1) for features in (self.x[i], self.y[j]))
        n, length = ds.shape[1], self.y.shape[1]
        weights = ds.repeat_interleave(self.x.shape[1], 0)
        rows_of_y = self._places + length * torch.arange(n, device=ds.device, dtype=torch.int32)
        if dx is not None:
            found = F.embedding_bag(rows_of_y, y, per_sample_weights=weights, mode="sum")
            dx.flatten(0, 1).add_(found)
        if dy is not None:
            keys, order = rows_of_y.flatten().sort()
            starts = torch.searchsorted(keys, torch.arange(len(y), device=ds.device))
            weights = weights.flatten()[order]
            found = F.embedding_bag(order // n, x, starts, per_sample_weights=weights, mode="sum")
            dy.flatten(0, 1).add_(found)

    @staticmethod
    def _tokens(features: Tensor) -> Tensor:
        """Features (m, l, d) as (m * l, d), in the dtype of the products' factors."""
        flat = features.flatten(0, 1)
        return flat if flat.is_cuda else flat.to(accumulator_dtype(flat.dtype))


def _aligned(index: int) -> int:
    """The next index at an address that divides by 16 bytes, as fast loads need."""
    return -(-index // 4) * 4


def _merge_largest(largest: Tensor, places: Tensor | None, products: Tensor, start: int) -> None:
    """Merge products (l, n, k) with tokens from `start` on into the largest and their places."""
    if places is None:
        torch.maximum(largest, products.amax(2), out=largest)
        return
    values, found = products.max(2)
    larger = ~(values <= largest)  # NaN included
    largest.copy_(torch.where(larger, values, largest))
    places.copy_(torch.where(larger, found + start, places))
