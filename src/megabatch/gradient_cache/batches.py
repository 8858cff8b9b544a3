"""Batches as encoders take them: tensors, or nested mappings, lists and tuples of tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _leaves(batch: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, each with its path for messages; None is passed over."""
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _leaves(value, f"{name}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for i, value in enumerate(batch):
            yield from _leaves(value, f"{name}[{i}]")
    elif batch is not None:
        raise TypeError(
            f"{name}: expected a tensor, or a mapping, list or tuple of tensors, "
            f"got {type(batch).__name__}"
        )


def tensors_in(batch: Any) -> list[Tensor]:
    """All tensors of a nested batch."""
    return [tensor for _, tensor in _leaves(batch, "batch")]


def batch_size(batches: tuple[Any, ...]) -> int:
    """The number of rows that all tensors of all batches share, at least 1.

    Raises:
        TypeError: something in a batch is neither a tensor nor a container of tensors.
        ValueError: a batch without tensors or without rows, or two numbers of rows.
    """
    size, first = 0, ""
    for i, batch in enumerate(batches):
        leaves = list(_leaves(batch, f"batch {i}"))
        if not leaves:
            raise ValueError(f"batch {i}: expected tensors, got none")
        for name, tensor in leaves:
            if tensor.ndim == 0:
                raise ValueError(f"{name}: expected a dimension of samples, got shape ()")
            if len(tensor) == 0:
                raise ValueError(f"{name}: expected at least one row, got shape {(*tensor.shape,)}")
            if first and len(tensor) != size:
                raise ValueError(f"{name}: expected {size} rows as in {first}, got {len(tensor)}")
            size, first = len(tensor), first or name
    return size


def take(batch: Any, rows: slice) -> Any:
    """The given rows of every tensor in the batch, in containers of the same types (views)."""
    if isinstance(batch, Tensor):
        return batch[rows]
    if isinstance(batch, Mapping):
        part = {key: take(value, rows) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return part
        same_type = copy.copy(batch)  # a Hugging Face BatchEncoding stays one
        same_type.update(part)
        return same_type
    if isinstance(batch, (list, tuple)):
        values = [take(value, rows) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def agree_on_count(count: int, group: Any) -> int:
    """The largest `count` of all ranks; without communication in one process or for "local"."""
    if group == "local" or not (dist.is_available() and dist.is_initialized()):
        return count
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    largest = torch.tensor(count, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return int(largest)
