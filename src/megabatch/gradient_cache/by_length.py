"""Batches of padded sequences: sorted by length, and cut to what each micro-batch needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from megabatch.gradient_cache.batches import CutRows, Leaf, leaves, mapped
from megabatch.gradient_cache.feed import to_device
from megabatch.gradient_cache.outputs import Key


class SortedByLength:
    """A batch of padded sequences for a GradientCache, in which little is computed on padding.

        step(images, SortedByLength(tokens, lengths))

    The encoder gets the rows in order of their lengths, the longest first, so each micro-batch
    has sequences of similar lengths; and without the columns that all of them have as padding.
    The loss gets the outputs in the batch's own order. It is right for encoders whose result for a
    row depends on its first `lengths[i]` columns alone, as of a text tower with a causal mask, or
    with a mask for padding.

    With the longest first, the first micro-batch needs the most memory.
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
                Tensors of one dimension are sorted and not cut.
            lengths: integers (rows,), from 1 to the number of columns.
            multiple: columns are cut to multiples of this, at most their number, so that there are
                few different shapes to compile.
            outputs: if the encoder takes other batches, too: the keys (or positions) of its outputs
                that have a row for each of these sequences. By default, all that are per sample.

        Raises:
            TypeError, ValueError: the tensors' shapes differ, or are not those of the lengths; a
                tensor requires a gradient; a length is out of range.
        """
        columns = _columns(batch, lengths)
        if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
            raise ValueError(f"multiple: expected an int of at least 1, got {multiple!r}")
        found = lengths.detach().cpu().to(torch.int64)
        if len(found) and not 1 <= int(found.min()) <= int(found.max()) <= columns:
            raise ValueError(
                f"lengths: expected 1 to {columns}, the number of columns, got {int(found.min())} "
                f"to {int(found.max())}"
            )
        ordered, order = found.sort(descending=True, stable=True)
        widths = (-(-ordered // multiple) * multiple).clamp(max=columns).tolist()
        self.outputs = (outputs,) if isinstance(outputs, (int, str)) else tuple(outputs)
        self.rows = mapped(batch, lambda tensor: CutRows(tensor, order, widths))
        self._order = order
        self._place = torch.empty_like(order)
        self._place[order] = torch.arange(len(order))

    def in_batch_order(self, output: Tensor) -> Tensor:
        """An encoder's output (rows, ...), in the batch's order."""
        return output.index_select(0, to_device(self._place, output.device))

    def in_own_order(self, rows: Tensor) -> Tensor:
        """Rows in the batch's order, such as outputs' gradients, in the encoder's order."""
        return rows.index_select(0, to_device(self._order, rows.device))


class Orders:
    """The orders of an encoder's outputs, from those of its batches."""

    def __init__(self, name: str, batches: Mapping[str, Any]) -> None:
        """`name`: of the encoder, for messages.

        Raises:
            ValueError: it takes several batches, and one of them does not name its outputs.
        """
        self.name = name
        self._batches = [b for b in batches.values() if isinstance(b, SortedByLength)]
        if len(batches) > 1 and not all(batch.outputs for batch in self._batches):
            raise ValueError(
                f"batches: {name} takes {len(batches)}, so a SortedByLength must name its outputs "
                "(outputs=...)"
            )

    def in_batch_order(self, key: Key, output: Tensor) -> Tensor:
        """A per-sample output of the whole batch, in the batch's order."""
        batch = self._batch_of(key)
        return output if batch is None else batch.in_batch_order(output)

    def in_own_order(self, key: Key, gradient: Tensor) -> Tensor:
        """The gradient of such an output, in the order in which the encoder took the rows."""
        batch = self._batch_of(key)
        return gradient if batch is None else batch.in_own_order(gradient)

    def check(self, per_sample: Collection[Key]) -> None:
        """Raise a ValueError if a batch names an output that is not per sample."""
        for key in (key for batch in self._batches for key in batch.outputs):
            if key not in per_sample:
                raise ValueError(
                    f"outputs: {key!r} of a SortedByLength is no per-sample output of {self.name}; "
                    f"expected one of {', '.join(map(repr, per_sample))}"
                )

    def _batch_of(self, key: Key) -> SortedByLength | None:
        for batch in self._batches:
            if not batch.outputs or key in batch.outputs:
                return batch
        return None


def in_encoders_order(batches: Mapping[str, Any]) -> dict[str, Any]:
    """The batches, with the sorted ones as nested `Rows`."""
    return {
        name: batch.rows if isinstance(batch, SortedByLength) else batch
        for name, batch in batches.items()
    }


def _columns(batch: Any, lengths: Tensor) -> int:
    """The number of columns of a batch's tensors, 1 if all have one dimension; checks shapes."""
    if not isinstance(lengths, Tensor) or lengths.is_floating_point() or lengths.ndim != 1:
        got = f"{lengths.dtype} {(*lengths.shape,)}" if isinstance(lengths, Tensor) else lengths
        raise TypeError(f"lengths: expected a tensor of integers (rows,), got {got!r}")
    columns: dict[int, str] = {}
    for name, leaf in leaves(batch):
        _check_rows(name, leaf, len(lengths))
        if isinstance(leaf, Tensor) and leaf.ndim > 1:
            columns.setdefault(leaf.shape[1], name)
    if len(columns) != 1:
        found = ", ".join(f"{name} with {count}" for count, name in columns.items())
        raise ValueError(
            f"batch: expected tensors with one number of columns, got {found or 'none'}"
        )
    return next(iter(columns))


def _check_rows(name: str, leaf: Leaf, rows: int) -> None:
    if not isinstance(leaf, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(leaf).__name__}")
    if leaf.requires_grad:
        raise ValueError(f"{name}: it requires a gradient, which would not reach it when sorted")
    if leaf.ndim == 0 or len(leaf) != rows:
        raise ValueError(f"{name}: expected {rows} rows, as lengths has, got {(*leaf.shape,)}")
