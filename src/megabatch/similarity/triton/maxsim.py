"""Blocks of late interaction's logits in Triton kernels, for `eager_maxsim`.

A program holds a tile of queries' tokens and passes over documents. Products of tokens exist in
registers only; the largest of each query's token and document remains. The backward pass computes
a block's products again and keeps where the largest are. Then the gradient of a query's token is a
sum of documents' tokens, and that of a document's token a sum of queries' tokens: for the latter,
each document's list of queries' tokens is put into the order of `GROUP`s of the document's tokens,
so that a small product of a group adds up its part of the list. A product of the whole list for
each group would do as many times the work as there are groups.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.eager import BUFFERS, buffer_views
from megabatch.similarity.eager_maxsim import MaxSimTiles
from megabatch.similarity.matrix import PAIRED, Matrix
from megabatch.similarity.tiles import State
from megabatch.similarity.triton.blocking import TILE, cdiv
from megabatch.similarity.triton.blocks import aligned, block_diagonal
from megabatch.similarity.triton.launch import Descriptor, kernel
from megabatch.similarity.triton.scores import COLS, OWN, ROWS, merge_scores, score_gradients
from megabatch.similarity.triton.softmax import BinaryStates, new_upstream

#: Queries and documents of a block of logits.
BLOCK = 4096
#: Documents that a program of `largest_products` passes over.
DOCUMENTS = 16
#: Tokens of documents whose gradients a program computes.
GROUP = tl.constexpr(32)
#: Numbers that a program of `order_tokens` handles at once.
STEP = 4096
B = tl.constexpr(TILE)


class MaxSimKernelTiles(BinaryStates, MaxSimTiles):
    """Tiles in 16-bit types. Queries' tokens are padded to fill tiles."""

    def __init__(self, matrix: Matrix, scale: Tensor, saved: Tensor) -> None:
        super().__init__(matrix, scale, saved)
        self.x, self.y, self.width = self.x.contiguous(), self.y.contiguous(), self.x.shape[2]
        self.half_ds = self.x.dtype == torch.float16
        self._piece, self._padded = piece_of(self.x.shape[1])
        missing, x = self._padded - self.x.shape[1], self.x
        x = F.pad(x, (0, 0, 0, missing)) if missing else x
        self._tokens_x = aligned(x.flatten(0, 1))
        self._tokens_y = aligned(self.y.flatten(0, 1))
        self._width = triton.next_power_of_2(max(16, self._tokens_x.shape[1]))

    def _block_shape(self) -> tuple[int, int]:
        rows = cols = BLOCK
        pair = 4 * BUFFERS + 6 * piece_of(self.x.shape[1])[1]
        while rows > 16 and rows * cols * pair > settings.workspace(self.x):
            rows, cols = cols, rows // 2
        return max(rows, cols), min(rows, cols)

    @classmethod
    def places_form(
        cls, x: Tensor, y: Tensor, queries: int, documents: int
    ) -> tuple[tuple[int, int], torch.dtype]:
        kind = torch.int16 if y.shape[1] < 1 << 15 else torch.int32
        return (documents, queries * piece_of(x.shape[1])[1]), kind

    def _sums(self, i: slice, j: slice, out: Tensor, places: Tensor | None = None) -> Tensor:
        m, n, lengths = self._padded * len(out), j.stop - j.start, self.matrix.cols.lengths
        pieces = self._padded // self._piece
        sums = out if pieces == 1 else out.new_empty(len(out) * pieces, n)
        tiles, tokens, length = cdiv(m, TILE), 64 if places is None else 128, self.y.shape[1]
        largest_products.launch(
            tiles * cdiv(n, DOCUMENTS),
            x=Descriptor(self._tokens_x, [TILE, self._width]),
            y=Descriptor(self._tokens_y, [tokens, self._width]),
            lengths=None if lengths is None else lengths[j],
            out=sums, stride=sums.stride(0), places=places,
            row_start=i.start * self._padded, m=m, tiles=tiles,
            col_start=j.start, n=n, length=length, PIECE=self._piece, COUNT=DOCUMENTS,
            TOKENS=tokens, WHOLE=lengths is None and length % tokens == 0,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        if pieces > 1:
            torch.sum(sums.view(len(out), pieces, n), 1, out=out)
        return out

    # --- blocks of logits ---------------------------------------------------------------------

    def forward_block(self, i: slice, j: slice, rows: State, cols: State | None) -> None:
        out, _ = self._place(i, j)
        scores = self._sums(i, j, out, self._saved_places.get((i.start, j.start)))
        side, count = cols or rows, cdiv(i.stop - i.start, OWN.value)
        if cols is not None:
            count += cdiv(j.stop - j.start, OWN.value)
        merge_scores.launch(
            count,
            row_state=rows.numbers, row_state_stride=rows.stride,
            row_is_first=rows.is_first, row_is_last=rows.is_last,
            col_state=side.numbers, col_state_stride=side.stride,
            col_is_first=side.is_first, col_is_last=side.is_last,
            **self._scores(i, j, scores),
        )  # fmt: skip

    def gradient_block(
        self, i: slice, j: slice, rows: Tensor | None, cols: Tensor | None
    ) -> Tensor:
        scores, _ = self._place(i, j)
        if not self._find_places(i, j):
            self._sums(i, j, scores, self._places)
        m, n = scores.shape
        ds = buffer_views(self._scratch, i, j)[0]
        self._transposed = scores.new_empty(n, m)
        rows, cols = rows if rows is None else rows[:, i], cols if cols is None else cols[:, j]
        score_gradients.launch(
            cdiv(m, ROWS.value) * cdiv(n, COLS.value), ds=ds, transposed=self._transposed,
            row_upstream=rows, row_stride=0 if rows is None else rows.stride(0),
            col_upstream=cols, col_stride=0 if cols is None else cols.stride(0),
            **self._scores(i, j, scores),
        )  # fmt: skip
        return ds

    def _scores(self, i: slice, j: slice, scores: Tensor) -> dict[str, Any]:
        """Arguments of both kernels."""
        block, (m, n) = self.matrix.view(i, j), scores.shape
        return {
            "scores": scores, "stride": n, "weight": block.rows.weight, "scale": self.scale,
            "row_ids": block.rows.ids, "col_ids": block.cols.ids, "ceiling": block.rows.ceiling,
            "m": m, "n": n, "diagonal_offset": block.col_start - block.row_start,
            "DIAGONAL": block_diagonal(block), "PAIRED": block.diagonal == PAIRED,
            "HAS_POSITIVES": block.has_positives,
        }  # fmt: skip

    def make_upstream(self, results: Tensor, gradient: Tensor) -> Tensor:
        packed: Tensor = new_upstream(results, gradient).packed
        return packed

    # --- gradients of tokens ------------------------------------------------------------------

    def add_gradients(
        self,
        i: slice,
        j: slice,
        ds: Tensor,
        totals: tuple[Tensor | None, Tensor | None],
        overwrite: tuple[bool, bool],
    ) -> None:
        (dx, dy), m, n, length = totals, self._padded * len(ds), len(ds.T), self.y.shape[1]
        common: dict[str, Any] = {
            "m": m, "length": length, "padded": self._padded, "d": self._tokens_x.shape[1],
            "WIDTH": self._width, "FULL": self._width == self._tokens_x.shape[1],
        }  # fmt: skip
        if dx is not None:
            query_gradients.launch(
                cdiv(m, 64), y=self._tokens_y[j.start * length :], dx=dx, out_d=dx.shape[2],
                row_is_first=int(overwrite[0]), places=self._places, ds=ds, stride=ds.stride(0),
                n=n, tokens=self.x.shape[1], TOKENS=64, UNROLL=4, **common, num_warps=2,
            )  # fmt: skip
        if dy is not None:
            groups = cdiv(length, GROUP.value)
            starts = ds.new_empty(n, groups + 1, dtype=torch.int32)
            order = ds.new_empty(n, m, dtype=torch.int32)
            bins = triton.next_power_of_2(groups)
            order_tokens.launch(
                n, places=self._places, order=order, starts=starts, m=m, groups=groups,
                BINS=bins, TOKENS=max(16, STEP // bins),
            )  # fmt: skip
            document_gradients.launch(
                n * groups, x=self._tokens_x[i.start * self._padded :], dy=dy,
                out_d=dy.shape[2], col_is_first=int(overwrite[1]), order=order, starts=starts,
                ds=self._transposed, stride=len(ds), groups=groups, **common, num_stages=3,
            )  # fmt: skip


@functools.lru_cache(1024)  # a step needs the same few
def piece_of(tokens: int) -> tuple[int, int]:
    """Tokens of a piece of a query, which a tile holds whole, and of a query in whole pieces."""
    padded, piece = min((cdiv(tokens, piece) * piece, -piece) for piece in (16, 32, 64, 128))
    return -piece, padded


@triton.jit
def larger(a, b):
    """The larger of two numbers, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def merge_tile(
    largest, at, q, y, row, k, size,
    MASKED: tl.constexpr, PLACES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Merge the products with a document's tokens from k on into the largest and their places."""
    s = tl.dot(q, y.load([row + k, 0]).T)
    column = tl.arange(0, TOKENS)
    if MASKED:
        s = tl.where((k + column < size)[None, :], s, float("-inf"))
    top = tl.reduce(s, 1, larger)
    if PLACES:
        here = tl.min(tl.where(s == top[:, None], column[None, :], TOKENS - 1), 1)
        at = tl.where(top <= largest, at, k + here)
    return larger(largest, top), at


@kernel
def largest_products(
    x, y, lengths, out, stride, places, row_start, m, tiles, col_start, n, length,
    PIECE: tl.constexpr, COUNT: tl.constexpr, TOKENS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """out[piece, j] = sum over a piece's tokens of the largest product with document j's tokens."""
    pid = tl.program_id(0)
    ti, first = pid % tiles, pid // tiles * COUNT
    q = x.load([row_start + ti * B, 0])
    t = ti * B + tl.arange(0, B)
    piece = ti * (B // PIECE) + tl.arange(0, B // PIECE)
    PLACES: tl.constexpr = places is not None
    for j in range(first, tl.minimum(first + COUNT, n)):
        size = length
        if lengths is not None:
            size = tl.minimum(tl.load(lengths + j), length).to(tl.int32)
        largest = tl.full((B,), float("-inf"), tl.float32)
        at = tl.zeros((B,), tl.int32)
        row = (col_start + j) * length
        whole = size // TOKENS * TOKENS
        for k in range(0, whole, TOKENS):
            largest, at = merge_tile(largest, at, q, y, row, k, size, False, PLACES, TOKENS)
        if not WHOLE and whole < size:
            largest, at = merge_tile(largest, at, q, y, row, whole, size, True, PLACES, TOKENS)
        sums = tl.sum(tl.reshape(largest, (B // PIECE, PIECE)), 1)
        tl.store(out + piece.to(tl.int64) * stride + j, sums, mask=piece * PIECE < m)
        if PLACES:
            at = tl.minimum(at, tl.maximum(size - 1, 0))  # of NaN
            to = places + tl.cast(m, tl.int64) * j + t
            tl.store(to, at.to(places.dtype.element_ty), mask=t < m)


@kernel
def query_gradients(
    y, dx, out_d, row_is_first, places, ds, stride, m, n, length, padded, tokens, d,
    WIDTH: tl.constexpr, FULL: tl.constexpr, TOKENS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Add to dx the sums over documents of ds times the tokens with the largest products."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    query, token = t // padded, t % padded
    inside = (t < m) & (token < tokens)
    total = tl.zeros((TOKENS, WIDTH), tl.float32)
    for j in tl.range(0, n, loop_unroll_factor=UNROLL):
        at = tl.load(places + tl.cast(m, tl.int64) * j + t, mask=inside, other=0)
        weight = tl.load(ds + query.to(tl.int64) * stride + j, mask=inside, other=0.0)
        row = (j * length + at).to(tl.int64) * d
        found = load_rows(y, row, d, WIDTH, FULL)
        total += weight[:, None] * found
    add_rows(dx, query * tokens + token, out_d, total, inside, row_is_first, WIDTH)


@kernel
def order_tokens(
    places, order, starts, m, groups, BINS: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Each document's list of queries' tokens, in the order of groups of the document's tokens.

    An entry of `order` is a query's token, and in the upper 8 bits the place within the group. The
    part of group g is that from starts[g] to starts[g + 1].
    """
    document, group = tl.program_id(0), tl.arange(0, BINS)
    base = tl.cast(m, tl.int64) * document
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, m, TOKENS):
        t = first + tl.arange(0, TOKENS)
        at = tl.load(places + base + t, mask=t < m, other=BINS * GROUP).to(tl.int32)
        counts += tl.sum((at[:, None] // GROUP == group[None, :]).to(tl.int32), 0)
    start = tl.cumsum(counts, 0) - counts
    to = starts + document * (groups + 1) + group
    tl.store(to, start, mask=group < groups)
    tl.store(to + 1, start + counts, mask=group == groups - 1)
    for first in range(0, m, TOKENS):
        t = first + tl.arange(0, TOKENS)
        at = tl.load(places + base + t, mask=t < m, other=BINS * GROUP).to(tl.int32)
        own = (at[:, None] // GROUP == group[None, :]).to(tl.int32)
        position = tl.sum((tl.cumsum(own, 0) - 1 + start[None, :]) * own, 1)
        tl.store(order + base + position, t | (at % GROUP << 24), mask=t < m)
        start += tl.sum(own, 0)


@kernel
def document_gradients(
    x, dy, out_d, col_is_first, order, starts, ds, stride, groups, m, length, padded, d,
    WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Add to dy the sums over queries' tokens, times ds, that have their largest product there."""
    document, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    at = starts + document * (groups + 1) + group
    begin, end = tl.load(at), tl.load(at + 1)
    own = tl.arange(0, GROUP)
    total = tl.zeros((GROUP, WIDTH), tl.float32)
    for first in range(begin, end, B):
        entry = first + tl.arange(0, B)
        some = entry < end
        packed = tl.load(order + tl.cast(m, tl.int64) * document + entry, mask=some, other=0)
        t = packed & 0xFFFFFF
        weight = tl.load(
            ds + tl.cast(stride, tl.int64) * document + t // padded, mask=some, other=0.0
        )
        found = load_rows(x, t.to(tl.int64) * d, d, WIDTH, FULL)
        chosen = tl.where(own[:, None] == (packed >> 24)[None, :], weight[None, :], 0.0)
        total = tl.dot(chosen.to(found.dtype), found, total)
    row = group * GROUP + own
    inside = row < length
    add_rows(dy, document * length + row, out_d, total, inside, col_is_first, WIDTH)


@triton.jit
def load_rows(features, start, d, WIDTH: tl.constexpr, FULL: tl.constexpr):
    """Rows that begin at `start`, (rows, WIDTH), zeros where they end.

    FULL: they do not end before, so that the loads need no mask, which makes them slower.
    """
    column = tl.arange(0, WIDTH)
    place = features + start[:, None] + column[None, :]
    if FULL:
        return tl.load(place)
    return tl.load(place, mask=(column < d)[None, :], other=0.0)


@triton.jit
def add_rows(out, row, d, total, mask, is_first, WIDTH: tl.constexpr):
    """Add (rows, WIDTH) to these rows of `out`, of width d; is_first: write them."""
    column = tl.arange(0, WIDTH)
    to = out + row.to(tl.int64)[:, None] * d + column[None, :]
    mask = mask[:, None] & (column < d)[None, :]
    before = tl.load(to, mask=mask.to(tl.int32) > is_first, other=0.0)
    tl.store(to, before + total, mask=mask)
