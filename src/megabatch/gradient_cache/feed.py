"""Loading micro-batches to the device: the next one is prepared while one is computed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megabatch.ahead import one_ahead
from megabatch.gradient_cache.batches import (
    PLACEHOLDER_ROWS,
    Items,
    leaves,
    mapped,
    placeholder,
    take,
    tensors_in,
    with_items,
)
from megabatch.gradient_cache.division import MicroBatch

#: A micro-batch's rows of each batch; the last element is a dict of those passed by keyword.
Parts: TypeAlias = "tuple[Any, ...]"

_THREAD = "megabatch-feed"


class Feed:
    """Iterates over the micro-batches of a step's batches, on the given device if there is one.

    A thread prepares the next one while the caller works with one: it slices or decodes the rows,
    pins them and copies them on a stream of its own. Before that it waits until the GPU has
    finished with the previous one, so the device holds the rows of two micro-batches at most.
    """

    def __init__(
        self,
        named: Mapping[str, Any],
        keywords: Collection[str],
        rows: int,
        device: torch.device | None,
    ) -> None:
        """`named`: batches by name; `keywords`: names of those passed by keyword.

        `rows`: number of rows of each batch; 0 is legal.
        """
        self.named = named
        self.rows = rows
        self._keywords = keywords
        # A rank without rows still takes part in the collectives.
        self.batches = {
            name: with_items(batch, rows) if rows else placeholder(batch)
            for name, batch in named.items()
        }
        if device is not None and device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._ahead = device is not None and _worth_a_thread(self.batches, device)

    def __call__(self, micro_batches: Sequence[MicroBatch]) -> Generator[Parts, None, None]:
        """Yield the rows of each micro-batch; for an idle one (no rows), rows to be dropped.

        An error in the thread is raised here. Closing the generator (`contextlib.closing`) waits
        for the thread's end.
        """

        def load(i: int) -> Parts:
            return self._load(micro_batches[i])

        if not self._ahead:
            return (load(i) for i in range(len(micro_batches)))
        assert self.device is not None
        if self.device.type == "cuda":
            return _on_cuda(load, len(micro_batches), self.device)
        return one_ahead(load, range(len(micro_batches)), _THREAD)

    def encoded(self, rows: slice) -> int:
        """Number of rows that an encoder gets for a micro-batch's `rows`; there may be none.

        Many models cannot take zero rows, and FSDP's collectives need every rank in each forward
        pass: so an idle micro-batch has one row, or the placeholder of an empty batch.
        """
        return rows.stop - rows.start or (1 if rows.stop else PLACEHOLDER_ROWS)

    def _load(self, micro_batch: MicroBatch) -> Parts:
        loaded = {}
        for name, batch in self.batches.items():
            rows = micro_batch.of(name)
            start = 0 if micro_batch.idle else rows.start
            loaded[name] = take(batch, slice(start, start + self.encoded(rows)))
        if self.device is not None:
            loaded = mapped(loaded, functools.partial(to_device, device=self.device))
        named = {name: loaded.pop(name) for name in self._keywords}
        return (*loaded.values(), named)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move to the device; from the host asynchronously, through pinned memory."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.requires_grad:
        # Unpinned memory would be copied synchronously, at a fraction of the speed.
        tensor = tensor if tensor.is_pinned() else tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _worth_a_thread(batches: Mapping[str, Any], device: torch.device) -> bool:
    tensors = tensors_in(batches)
    if any(tensor.requires_grad for tensor in tensors):
        return False  # the move is part of the graph, which belongs to the caller's thread
    made = len(tensors) < sum(not isinstance(leaf, Items) for _, leaf in leaves(batches))
    return made or (device.type == "cuda" and any(t.device.type == "cpu" for t in tensors))


def _on_cuda(
    load: Callable[[int], Parts], count: int, device: torch.device
) -> Generator[Parts, None, None]:
    """`one_ahead`, with the loads on a CUDA stream of their own."""
    stream = _stream(device)
    # The batches' tensors on the GPU may still be being computed.
    stream.wait_stream(torch.cuda.current_stream(device))
    used: list[torch.cuda.Event] = []  # the end of the caller's work on each micro-batch

    def load_on_stream(i: int) -> tuple[Parts, torch.cuda.Event]:
        if i > 1:
            # The host may be far ahead of the GPU, which frees memory when it is done: without
            # this, inputs of many micro-batches could pile up.
            used[i - 2].synchronize()
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return load(i), stream.record_event()

    with contextlib.closing(one_ahead(load_on_stream, range(count), _THREAD)) as loaded:
        for parts, ready in loaded:
            current = torch.cuda.current_stream(device)
            current.wait_event(ready)
            for tensor in tensors_in(parts):
                if tensor.is_cuda:  # its memory belongs to the other stream
                    tensor.record_stream(current)
            yield parts
            del parts
            used.append(torch.cuda.current_stream(device).record_event())


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device: the allocator keeps separate memory for each stream."""
    return torch.cuda.Stream(device)
