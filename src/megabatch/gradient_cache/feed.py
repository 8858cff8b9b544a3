"""Micro-batches on their way to the device: the next one is prepared while one is computed on."""

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
    leaves,
    mapped,
    placeholder,
    take,
    tensors_in,
)

#: Of each batch the rows of one micro-batch; last, a dict of those that go by keyword.
Parts: TypeAlias = "tuple[Any, ...]"

_THREAD = "megabatch-feed"


class Feed:
    """Gives the micro-batches of a step's batches, on the device where one is given.

    A thread makes the next one ready while the caller works with one: it takes or decodes the rows,
    pins them and copies them on a stream of their own. No third one is on the device by then: the
    thread waits until the GPU is done with the one before. So the device holds the rows of two
    micro-batches, whatever the batch.
    """

    def __init__(
        self,
        named: Mapping[str, Any],
        keywords: Collection[str],
        rows: int,
        device: torch.device | None,
    ) -> None:
        """Take batches by name, some of which go to the encoder by keyword.

        `rows`: how many each batch has; none is legal.
        """
        self.named = named
        self.rows = rows
        positional = [batch for name, batch in named.items() if name not in keywords]
        batches = (*positional, {name: named[name] for name in keywords})
        # Without a row of its own a rank takes part all the same in what ranks do together.
        self.batches = batches if rows else tuple(placeholder(batch) for batch in batches)
        if device is not None and device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._ahead = device is not None and _gains_by_a_thread(self.batches, device)

    def __call__(self, micro_batches: Sequence[slice]) -> Generator[Parts, None, None]:
        """The rows of each micro-batch; for an idle one (no rows) rows that nobody keeps.

        An error on the way surfaces here, as it was raised. Close it (`contextlib.closing`): the
        thread has ended then.
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
        """How many rows an encoder gets for the micro-batch `rows`; an idle one has none itself.

        Many models cannot take zero rows, and FSDP's collectives need every rank in each forward
        pass: so an idle micro-batch is one row, or an empty batch's placeholder.
        """
        return rows.stop - rows.start or (1 if rows.stop else PLACEHOLDER_ROWS)

    def _load(self, rows: slice) -> Parts:
        start = 0 if rows.start == rows.stop else rows.start
        taken = slice(start, start + self.encoded(rows))
        parts = tuple(take(batch, taken) for batch in self.batches)
        if self.device is None:
            return parts
        move = functools.partial(_to_device, device=self.device)
        return tuple(mapped(part, move) for part in parts)


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; from the host by way of pinned memory, without waiting."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.requires_grad:
        # Unpinned memory would be copied before this returns, at a fraction of the speed.
        tensor = tensor if tensor.is_pinned() else tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _gains_by_a_thread(batches: Parts, device: torch.device) -> bool:
    tensors = tensors_in(batches)
    if any(tensor.requires_grad for tensor in tensors):
        return False  # moving them is part of the graph, which belongs to the caller's thread
    made = len(tensors) < sum(1 for _ in leaves(batches))
    return made or (device.type == "cuda" and any(t.device.type == "cpu" for t in tensors))


def _on_cuda(
    load: Callable[[int], Parts], count: int, device: torch.device
) -> Generator[Parts, None, None]:
    """As `one_ahead`; what is done on the GPU meanwhile goes on a stream of its own."""
    stream = _stream(device)
    # What the batches hold on the GPU may still be in the making.
    stream.wait_stream(torch.cuda.current_stream(device))
    used: list[torch.cuda.Event] = []  # for each micro-batch that the caller has used: when it had

    def load_on_stream(i: int) -> tuple[Parts, torch.cuda.Event]:
        if i > 1:
            # The caller's host may be far ahead of its GPU, and memory is free only once the GPU is
            # done: without this, inputs of many micro-batches could pile up.
            used[i - 2].synchronize()
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return load(i), stream.record_event()

    with contextlib.closing(one_ahead(load_on_stream, range(count), _THREAD)) as loaded:
        for parts, ready in loaded:
            current = torch.cuda.current_stream(device)
            current.wait_event(ready)
            for tensor in tensors_in(parts):
                if tensor.is_cuda:  # its memory is the other stream's
                    tensor.record_stream(current)
            yield parts
            del parts
            used.append(torch.cuda.current_stream(device).record_event())


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: each new one would have memory of its own in the allocator."""
    return torch.cuda.Stream(device)
