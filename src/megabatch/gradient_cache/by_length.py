"""Padded sequences in order of length: their micro-batches, of nearly equal numbers of tokens."""

from __future__ import annotations

import bisect
import itertools
import sys
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megabatch.gradient_cache.batches import leaves, mapped, named_tensors, to_device

#: Of an encoder's output: a position in a tuple, or a mapping's key.
Key: TypeAlias = "int | str"
#: Lengths of sorted sequences: a number of columns, and how many rows need it, the longest first.
Runs: TypeAlias = "Sequence[tuple[int, int]]"


class SortedByLength:
    """A batch of padded sequences for a GradientCache that spends little computation on padding.

        step(images, SortedByLength(tokens, lengths))

    The encoder gets the rows in order of length, the longest first, without the columns that are
    padding in all rows of a micro-batch. The loss gets the outputs in the batch's own order. Use it
    for encoders whose result for row i depends only on its first `lengths[i]` columns, such as a
    text tower with a causal mask, or with a mask for padding.

    Micro-batches have nearly equal numbers of tokens (rows times columns): `micro_batch_size` is
    the mean number of rows, and none has more tokens than that many rows of the longest sequence.
    If the same encoder also takes other batches, one call has different numbers of rows from each.
    """

    def __init__(
        self,
        batch: Any,
        lengths: Tensor,
        *,
        multiple: int = 8,
        outputs: Key | Collection[Key] = (),
    ) -> None:
        """Find the order of the rows.

        Args:
            batch: a tensor (rows, columns, ...), or nested mappings, lists and tuples of tensors.
                Tensors of one dimension, and lists with an item for each row, are sorted but not
                cut.
            lengths: integers (rows,), from 1 to the number of columns.
            multiple: a micro-batch's number of columns is rounded up to a multiple of this (but not
                above the batch's), so that there are few different shapes to compile.
            outputs: if the encoder takes other batches too, the keys (or positions) of its outputs
                with a row for each of these sequences. By default, all that are per sample.

        Raises:
            TypeError, ValueError: the tensors' shapes differ, or are not those of the lengths; a
                length is out of range; an `attention_mask` in the batch has padding on the left.
        """
        columns = _columns(batch, lengths)
        if not isinstance(multiple, int) or multiple < 1:
            raise ValueError(f"multiple: expected an int of at least 1, got {multiple!r}")
        found = lengths.detach().cpu().to(torch.int64)
        if len(found) and not 1 <= int(found.min()) <= int(found.max()) <= columns:
            got = f"{int(found.min())} to {int(found.max())}"
            raise ValueError(f"lengths: expected 1 to {columns}, the number of columns, got {got}")
        for name, leaf in leaves(batch):
            if name.endswith("['attention_mask']"):
                _check_padding(name, leaf, lengths)
        ordered, order = found.sort(descending=True, stable=True)
        widths = (-(-ordered // multiple) * multiple).clamp(max=columns)
        values, counts = widths.unique_consecutive(return_counts=True)
        self.batch = batch
        self.outputs = (outputs,) if isinstance(outputs, (int, str)) else tuple(outputs)
        self._columns = columns
        self.runs = [*zip(values.tolist(), counts.tolist(), strict=True)]
        self._widths = widths.tolist()
        self._order = order
        # Not a second sort, which is slow where other processes keep the cores busy.
        self._place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))

    def take(self, rows: slice) -> Any:
        """Some rows in the encoder's order, at least one, with as many columns as the first needs.

        Tensors with one dimension stay as they are.
        """
        order, width = self._order[rows], self._widths[rows.start]

        def taken(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return type(leaf)(leaf[i] for i in order.tolist())
            cut = leaf[:, :width] if leaf.ndim > 1 else leaf
            return cut.index_select(0, to_device(order, leaf.device))

        return mapped(self.batch, taken, len(self._order))

    def in_batch_order(self, output: Tensor) -> Tensor:
        """An encoder's output (rows, ...), in the batch's order."""
        return output.index_select(0, to_device(self._place, output.device))

    def in_own_order(self, rows: Tensor) -> Tensor:
        """Rows in the batch's order, such as outputs' gradients, in the encoder's order."""
        return rows.index_select(0, to_device(self._order, rows.device))

    def longer(self, count: int) -> float:
        """How many times as many tokens a micro-batch may have in a similar batch; see `growth`."""
        return growth(self.runs, self._columns, count)


def up_to_last(present: Tensor) -> Tensor:
    """Columns up to each row's last one that is true, int64 (n,); of (n, columns), bool.

    All for a row without any: attention to nothing but padding is an average over all of it.
    """
    return present.shape[1] - present.flip(1).view(torch.uint8).argmax(1)


def tokens_by_length(name: str, batch: Any) -> Any:
    """A batch of token ids (rows, columns) in order of the lengths in its `attention_mask`.

    Without a mask all rows have the same length. A batch that has neither is returned as it is.
    """
    tensors = {} if isinstance(batch, SortedByLength) else named_tensors(batch, name)
    flat = {path: t for path, t in tensors.items() if t.ndim == 2}
    masks = [t for path, t in flat.items() if path.endswith("['attention_mask']")]
    ids = [t for t in flat.values() if t.dtype in (torch.int32, torch.int64)]
    if not (masks or ids):
        return batch
    tokens = (masks or ids)[0]
    others = [path for path, t in tensors.items() if t.ndim > 1 and t.shape[:2] != tokens.shape]
    if others:
        raise ValueError(
            f"micro_batch_tokens: expected tensors of shape {(*tokens.shape,)} or with one "
            f"dimension beside the token ids, got {' and '.join(others)} with "
            f"{(*tensors[others[0]].shape,)}; use micro_batch_size, or an encoder for each"
        )
    return SortedByLength(batch, up_to_last((tokens != 0) | (not masks)))


def _columns(batch: Any, lengths: Tensor) -> int:
    """The number of columns of a batch's tensors; checks their shapes."""
    if not isinstance(lengths, Tensor) or lengths.is_floating_point() or lengths.ndim != 1:
        got = f"{lengths.dtype} {(*lengths.shape,)}" if isinstance(lengths, Tensor) else lengths
        raise TypeError(f"lengths: expected a tensor of integers (rows,), got {got!r}")
    columns: dict[int, str] = {}
    for name, leaf in leaves(batch):
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != lengths.shape:
            got = f"shape {(*leaf.shape,)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(
                f"{name}: expected a tensor of {len(lengths)} rows, as lengths has, got {got}"
            )
        if leaf.ndim > 1:
            columns.setdefault(leaf.shape[1], name)
    if len(columns) != 1:
        got = ", ".join(f"{name} with {count}" for count, name in columns.items()) or "none"
        raise ValueError(f"batch: expected tensors with one number of columns, got {got}")
    return next(iter(columns))


def _check_padding(name: str, mask: Tensor, lengths: Tensor) -> None:
    """Check that no row begins with padding and has tokens where it is cut; waits for no device."""
    if mask.ndim != 2 or mask.device.type not in ("cpu", lengths.device.type):
        return
    present = mask != 0
    place = torch.arange(mask.shape[1], device=mask.device)
    behind = place >= lengths.to(mask.device)[:, None]
    if (~present[:, 0] & (present & behind).any(1)).any():
        raise ValueError(
            f"{name}: expected padding on the right, as a sequence's first columns are kept, got "
            'it on the left (tokenizer.padding_side = "right")'
        )


# --- the rows of micro-batches: equally many, or of equal numbers of tokens ----------------------


def equal_rows(rows: int, size: int) -> list[slice]:
    """Micro-batches of `size` rows; the last one may have fewer."""
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def equal_tokens(runs: Runs, count: int, limit: int | None = None) -> list[slice]:
    """Divide sequences into `count` micro-batches, the largest with as few tokens as possible.

    A micro-batch has at least one row; its tokens are rows times the columns of the first one.
    `limit`: of tokens, which only single rows exceed; `count` is at least `fewest_micro_batches`.
    """
    found = equal_token_runs(runs, count, limit)
    sizes = [size for size, _, number in found for _ in range(number)]
    ends = itertools.accumulate(sizes)
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def equal_token_runs(
    runs: Runs, count: int, limit: int | None = None
) -> list[tuple[int, int, int]]:
    """Runs of equal micro-batches of `equal_tokens`: rows, columns of the first row, and number."""
    spare = sum(n for _, n in runs) - count  # beyond a row for each micro-batch
    return _packed(runs, fewest_tokens(runs, count, limit), spare)


def fewest_tokens(runs: Runs, count: int, limit: int | None = None) -> int:
    """The tokens of the largest micro-batch in `equal_tokens`; 0 without any row.

    `limit`: see there; rows that exceed it do not count.
    """
    if not runs:
        return 0
    longest = runs[0][0]
    most = -(-sum(n for _, n in runs) // count) * longest  # as with equal rows
    least = longest if limit is None else min(longest, limit)

    def suffices(tokens: int) -> bool:  # with more tokens in each micro-batch, fewer are needed
        return fewest_micro_batches(runs, tokens) <= count

    return least + bisect.bisect_left(range(least, most), True, key=suffices)


def full_micro_batches(runs: Runs, limit: int) -> list[slice]:
    """Divide sequences into micro-batches with as many rows as the limit of tokens allows.

    Their rows follow from the first one's columns alone, but for the last micro-batch, so the same
    shapes return from batch to batch: libraries prepare kernels for each new one.
    """
    rows = sum(n for _, n in runs)
    sizes = [size for size, _, number in _packed(runs, limit) for _ in range(number)]
    ends = itertools.accumulate(sizes)
    return [slice(end - size, min(end, rows)) for size, end in zip(sizes, ends, strict=True)]


def fewest_micro_batches(runs: Runs, limit: int) -> int:
    """How many micro-batches there are at least, if only single rows have more tokens."""
    return sum(number for *_, number in _packed(runs, limit))


def growth(runs: Runs, columns: int, count: int) -> float:
    """How many times as many tokens the largest micro-batch has if one row needs all `columns`."""
    if not runs:
        return 1.0
    (longest, n), *others = runs
    longer = [(columns, 1), (longest, n - 1), *others]
    return fewest_tokens(longer, count) / fewest_tokens(runs, count)


def _packed(runs: Runs, limit: int, spare: int = sys.maxsize) -> list[tuple[int, int, int]]:
    """As `equal_token_runs`, with at most `limit` tokens each, and `spare` more rows than parts.

    A row with more is a micro-batch of its own.
    """
    found: list[tuple[int, int, int]] = []
    start = end = 0
    for columns, n in runs:
        end += n
        while start < end:
            size = max(1, min(limit // columns, 1 + spare))
            number = -(-(end - start) // size)  # the last of them may reach into the next run
            if size > 1:
                number = min(number, spare // (size - 1))
            found.append((size, columns, number))
            spare -= number * (size - 1)
            start += number * size
    return found
