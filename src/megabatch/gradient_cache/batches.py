"""An encoder's batches: their forms, and what is done with all of their tensors.

A batch is a tensor, or nested mappings, lists and tuples of tensors. Instead of a tensor there may
be an object that makes its rows on access, with `len(rows)` and `rows[slice] -> Tensor`, such as
compressed images: the same rows each time, without the global generators of torch, Python or NumPy,
perhaps in another thread than the caller's. Beside them there may be lists or tuples with an item
for each row, such as captions. Anything else in a batch, such as a string or a flag, is passed to
the encoder unchanged with each micro-batch.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

#: With two rows batch normalisation has statistics, and an output per sample is no single number.
PLACEHOLDER_ROWS = 2


def leaves(batch: Any, name: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield the tensors, and other objects with rows, of a batch with their paths for messages."""
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from leaves(value, f"{name}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for i, value in enumerate(batch):
            yield from leaves(value, f"{name}[{i}]")
    elif _has_rows(batch):
        yield name, batch


def mapped(batch: Any, function: Callable[[Any], Any], rows: int = 0) -> Any:
    """Apply `function` to each leaf of the batch, in containers of the same types.

    `rows`: also to each list or tuple with an item for each of so many rows.
    """
    if isinstance(batch, Mapping):
        part = {key: mapped(value, function, rows) for key, value in batch.items()}
        plain = type(batch) is dict or not isinstance(batch, MutableMapping)
        return part if plain else filled(batch, part)
    if isinstance(batch, (list, tuple)) and not _has_items(batch, rows):
        values = [mapped(value, function, rows) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return function(batch) if _has_rows(batch) else batch


def _has_items(values: Sequence[Any], rows: int) -> bool:
    """Whether a list or tuple has an item for each row; with tensors inside it is a container."""
    named = hasattr(values, "_fields")
    return len(values) == rows > 0 and not named and next(leaves(values), None) is None


def _has_rows(value: Any) -> bool:
    text = isinstance(value, (str, bytes, bytearray, memoryview))
    return not text and hasattr(value, "__len__") and hasattr(value, "__getitem__")


def filled(mapping: Any, items: Mapping[Any, Any]) -> Any:
    """Copy a mapping, keeping its class, with these items instead of its own.

    For Hugging Face's BatchEncoding and ModelOutput (the latter has no `update`).
    """
    copied = copy.copy(mapping)
    for key, value in items.items():
        copied[key] = value
    return copied


def named_tensors(batch: Any, name: str = "batch") -> dict[str, Tensor]:
    """All tensors of a nested batch by their paths."""
    return {path: leaf for path, leaf in leaves(batch, name) if isinstance(leaf, Tensor)}


def batch_size(batches: Mapping[str, Any]) -> int:
    """The number of rows, common to all leaves of the batches; names are for messages."""
    size, first = 0, ""
    for name, leaf in itertools.chain.from_iterable(leaves(b, n) for n, b in batches.items()):
        if isinstance(leaf, Tensor) and leaf.ndim == 0:
            raise ValueError(f"{name}: expected a dimension of samples, got shape ()")
        if first and len(leaf) != size:
            raise ValueError(f"{name}: expected {size} rows as in {first}, got {len(leaf)}")
        size, first = len(leaf), first or name
    if not first:
        raise ValueError(f"{' and '.join(batches)}: expected tensors, got none")
    return size


def take(batch: Any, rows: slice, of: int) -> Any:
    """Slice every leaf (views), in containers of the same types; the batch has `of` rows."""
    return mapped(batch, lambda leaf: _taken(leaf, rows), of)


def _taken(leaf: Any, rows: slice) -> Any:
    part = leaf[rows]
    if isinstance(leaf, (Tensor, list, tuple)):
        return part
    count = rows.stop - rows.start
    if not isinstance(part, Tensor) or part.shape[:1] != (count,):
        got = f"shape {(*part.shape,)}" if isinstance(part, Tensor) else type(part).__name__
        wanted = f"{type(leaf).__name__}[{rows.start}:{rows.stop}]"
        raise ValueError(f"batch: expected {wanted} to be a tensor of {count} rows, got {got}")
    return part


def placeholder(batch: Any) -> Any:
    """Rows of ones in the form of a batch that has no rows.

    Ones are legal tokens, and attention masks that do not mask everything.
    """
    empty = take(batch, slice(0, 0), 0)
    return mapped(empty, lambda tensor: tensor.new_ones((PLACEHOLDER_ROWS, *tensor.shape[1:])))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move to the device; from the host asynchronously, through pinned memory."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.requires_grad:
        # Unpinned memory would be copied synchronously, at a fraction of the speed.
        tensor = tensor if tensor.is_pinned() else tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
