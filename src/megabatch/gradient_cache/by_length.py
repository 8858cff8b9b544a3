"""Batches of padded sequences: sorted by length, and cut to what each micro-batch needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from megabatch.gradient_cache.batches import CutRows, Items, Leaf, leaves, mapped, with_items
from megabatch.gradient_cache.division import MicroBatch, equal_rows, equal_tokens, growth
from megabatch.gradient_cache.feed import to_device
from megabatch.gradient_cache.outputs import Key


class SortedByLength:
    """A batch of padded sequences for a GradientCache that spends little computation on padding.

        step(images, SortedByLength(tokens, lengths))

    The encoder gets the rows in order of length, the longest first, so each micro-batch has
    sequences of similar lengths, and without the columns that are padding in all of them. The loss
    gets the outputs in the batch's own order. Use it for encoders whose result for row i depends
    only on its first `lengths[i]` columns, such as a text tower with a causal mask, or with a mask
    for padding.

    There are as many micro-batches as for a batch that is not sorted, and they have nearly equal
    numbers of tokens (rows times columns): few rows if sequences are long, and many if they are
    short. `micro_batch_size` is the mean number of rows. No micro-batch has more tokens than that
    many rows of the longest sequence, so memory that grows with tokens is bounded as in a padded
    batch. If the same encoder also takes other batches, one call has different numbers of rows from
    each.
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
            multiple: the number of columns of a micro-batch is rounded up to a multiple of this
                (but not above the batch's), so that there are few different shapes to compile.
            outputs: if the encoder takes other batches too, the keys (or positions) of its outputs
                that have a row for each of these sequences. By default, all outputs that are per
                sample.

        Raises:
            TypeError, ValueError: the tensors' shapes differ, or are not those of the lengths; a
                tensor requires a gradient; a length is out of range; an `attention_mask` in the
                batch has padding on the left.
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
        for name, leaf in leaves(batch):
            if name.endswith("['attention_mask']") and isinstance(leaf, Tensor):
                _check_padding(name, leaf, lengths)
        ordered, order = found.sort(descending=True, stable=True)
        widths = (-(-ordered // multiple) * multiple).clamp(max=columns)
        values, counts = widths.unique_consecutive(return_counts=True)
        self._runs = [*zip(values.tolist(), counts.tolist(), strict=True)]
        self._columns = columns
        self.outputs = (outputs,) if isinstance(outputs, (int, str)) else tuple(outputs)
        needed = widths.tolist()
        self.rows = mapped(
            with_items(batch, len(found)),
            lambda leaf: (
                leaf.in_order(order) if isinstance(leaf, Items) else CutRows(leaf, order, needed)
            ),
        )
        self._order = order
        self._place = torch.empty_like(order)
        self._place[order] = torch.arange(len(order))

    def in_batch_order(self, output: Tensor) -> Tensor:
        """An encoder's output (rows, ...), in the batch's order."""
        return output.index_select(0, to_device(self._place, output.device))

    def in_own_order(self, rows: Tensor) -> Tensor:
        """Rows in the batch's order, such as outputs' gradients, in the encoder's order."""
        return rows.index_select(0, to_device(self._order, rows.device))

    def micro_batches(self, count: int) -> list[slice]:
        """The rows of so many micro-batches, in the encoder's order."""
        return equal_tokens(self._runs, count)

    def longer(self, count: int) -> float:
        """How many times as many tokens a micro-batch may have in another batch, at least 1.

        Its sequences are assumed to be similar, but one of them to need all columns.
        """
        return growth(self._runs, self._columns, count)


class Orders:
    """The orders in which an encoder takes its batches, and their division into micro-batches.

    An output has the rows and the order of the SortedByLength that names it, or that is the only
    batch; otherwise those of the batches that are not sorted.
    """

    def __init__(self, name: str, batches: Mapping[str, Any]) -> None:
        """`name`: of the encoder, for messages.

        Raises:
            ValueError: it takes several batches, and one of them does not name its outputs.
        """
        self.name = name
        self._sorted = {k: b for k, b in batches.items() if isinstance(b, SortedByLength)}
        if len(batches) > 1 and not all(batch.outputs for batch in self._sorted.values()):
            raise ValueError(
                f"batches: {name} takes {len(batches)}, so a SortedByLength must name its outputs "
                "(outputs=...)"
            )

    def micro_batches(self, rows: int, size: int) -> list[MicroBatch]:
        """The micro-batches; `size`: the rows of one, or their mean in sorted batches."""
        divided = equal_rows(rows, size)
        by_length = {k: batch.micro_batches(len(divided)) for k, batch in self._sorted.items()}
        return [
            MicroBatch(part, {k: parts[i] for k, parts in by_length.items()})
            for i, part in enumerate(divided)
        ]

    def rows_of(self, key: Key, micro_batch: MicroBatch) -> slice:
        """The rows that a per-sample output has in a micro-batch."""
        name = self._batch_of(key)
        return micro_batch.rows if name is None else micro_batch.of(name)

    def in_batch_order(self, key: Key, output: Tensor) -> Tensor:
        """A per-sample output of the whole batch, in the batch's order."""
        name = self._batch_of(key)
        return output if name is None else self._sorted[name].in_batch_order(output)

    def in_own_order(self, key: Key, gradient: Tensor) -> Tensor:
        """The gradient of such an output, in the order in which the encoder took the rows."""
        name = self._batch_of(key)
        return gradient if name is None else self._sorted[name].in_own_order(gradient)

    def described(self, key: Key) -> str:
        """An output for messages, with the batch that names it if batches do."""
        name, named = self._batch_of(key), any(b.outputs for b in self._sorted.values())
        by = "no SortedByLength names" if name is None else f"outputs= of {name} names"
        return f"output {key!r} of {self.name}" + f", which {by}," * named

    def check(self, per_sample: Collection[Key]) -> None:
        """Raise a ValueError if a batch names an output that is not per sample."""
        for key in (key for batch in self._sorted.values() for key in batch.outputs):
            if key not in per_sample:
                raise ValueError(
                    f"outputs: {key!r} of a SortedByLength is not a per-sample output of "
                    f"{self.name}; expected one of {', '.join(map(repr, per_sample))}"
                )

    def _batch_of(self, key: Key) -> str | None:
        """The name of the sorted batch that an output belongs to."""
        for name, batch in self._sorted.items():
            if not batch.outputs or key in batch.outputs:
                return name
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


def _check_padding(name: str, mask: Tensor, lengths: Tensor) -> None:
    """Check that no row begins with padding and has tokens where it is cut.

    A mask on another device than the lengths is not read, as the host would wait for that device.
    """
    if mask.ndim != 2 or not mask.numel() or mask.device.type not in ("cpu", lengths.device.type):
        return
    present = mask != 0
    place = torch.arange(mask.shape[1], device=mask.device)
    behind = place >= lengths.to(mask.device)[:, None]
    wrong = ~present[:, 0] & (present & behind).any(1)
    if wrong.any():
        row = int(wrong.int().argmax())
        raise ValueError(
            f"{name}: expected padding on the right, as a sequence's first columns are kept, got "
            f"it on the left in row {row}, which has tokens behind its first {int(lengths[row])} "
            'columns (tokenizer.padding_side = "right")'
        )


def _check_rows(name: str, leaf: Leaf, rows: int) -> None:
    if not isinstance(leaf, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(leaf).__name__}")
    if leaf.requires_grad:
        raise ValueError(f"{name}: it requires a gradient, which would not reach it when sorted")
    if leaf.ndim == 0 or len(leaf) != rows:
        raise ValueError(f"{name}: expected {rows} rows, as lengths has, got {(*leaf.shape,)}")
