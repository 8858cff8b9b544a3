"""The memory that a computation's tensors would take, counted without running it.

Fake tensors (`FakeTensorMode`) have shapes, dtypes and devices, but no values: operations on them
take no time and no memory, for any device, present or not. The counter adds up the tensors that
are alive, as an allocator would: one is freed with its last reference, including autograd's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megabatch.planning.work import Work, work_of
from megabatch.torch_internals import (
    TorchDispatchMode,
    fake_tensor_mode,
    storage_key,
    tensors_in,
)

#: CUDA's allocator rounds sizes up to multiples of this.
UNIT = 512


class MemoryCounter(TorchDispatchMode):
    """Counts the bytes of tensors that operations create, while they are alive.

    Args:
        inside: returns an operation's workspace in bytes, in addition to its results, given the
            overload that the dispatcher calls and its arguments.

    Attributes:
        live, peak: bytes now, and the maximum since `start`.
        work: of the operations so far.
    """

    def __init__(
        self, inside: Callable[[Any, Sequence[Any]], int] = lambda overload, args: 0
    ) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.work = Work()
        self._counts = self._counts_work = True
        self._inside = inside
        self._known: set[int] = set()

    def start(self) -> int:
        """Reset the peak; returns the bytes that are live now."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        if not self._counts:
            return results
        if self._counts_work:
            self.work += work_of(function, args, kwargs or {}, results)
        for result in tensors_in(results):
            self._count(result)
        self.peak = max(self.peak, self.live + self._inside(function, args))
        return results

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context neither memory nor work counts."""
        self._counts, before = False, self._counts
        try:
            yield
        finally:
            self._counts = before

    @contextmanager
    def without_work(self) -> Iterator[None]:
        """Within this context memory counts, but no work."""
        self._counts_work, before = False, self._counts_work
        try:
            yield
        finally:
            self._counts_work = before

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._known:
            return
        size = -(-storage.nbytes() // UNIT) * UNIT
        self._known.add(key)
        self.live += size
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@contextmanager
def counted(
    inside: Callable[[Any, Sequence[Any]], int] = lambda overload, args: 0,
) -> Iterator[MemoryCounter]:
    """Within this context new tensors are fake, and their memory is counted."""
    with fake_tensor_mode(allow_non_fake_inputs=True), MemoryCounter(inside) as counter:
        yield counter


def fake_copies(module: torch.nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Fake copies of a module's parameters and buffers on a device, by name; call in `counted`."""
    copies: dict[Tensor, Tensor] = {}
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for _, tensor in named:
        if tensor not in copies:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            copies[tensor] = copy.requires_grad_(tensor.requires_grad)
    return {name: copies[tensor] for name, tensor in named}
