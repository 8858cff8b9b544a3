"""Batches put together from the chunks that workers send, by a thread ahead of their use."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megabatch.ahead import one_ahead
from megabatch.data.fetch import BadPosition, Chunk, channels_last


class Collected(NamedTuple):
    """The rows of a batch, and the bad samples that came with them."""

    rows: Chunk
    bad: list[BadPosition]


def fill(chunks: Iterable[Chunk], size: int, memory: Memory) -> Iterator[Collected]:
    """Yield batches of `size` good samples; lastly those that are left, possibly none."""
    batch, bad = Assembly(size, memory), list[BadPosition]()
    for chunk in chunks:
        bad += chunk.bad
        rest: Chunk | None = chunk
        while rest is not None:
            rest = batch.add(rest)
            if len(batch) == size:
                yield Collected(batch.chunk(), bad)
                batch, bad = Assembly(size, memory), []
        del chunk  # before waiting for the next one
    yield Collected(batch.chunk(), bad)


def group(chunks: Iterable[Chunk], size: int, memory: Memory) -> Iterator[Collected]:
    """Yield batches of `size` samples without the bad ones among them; no chunk is in two."""
    batch, bad = Assembly(size, memory), list[BadPosition]()
    for chunk in chunks:
        bad += chunk.bad
        batch.add(chunk)
        del chunk  # before waiting for the next one
        if len(batch) + len(bad) == size:
            yield Collected(batch.chunk(), bad)
            batch, bad = Assembly(size, memory), []


def ahead(batches: Iterator[Collected], stop: threading.Event) -> Generator[Collected, None, None]:
    """The same batches, each put together by a thread while the caller uses the one before it.

    A batch of 32,768 images takes seconds to receive and to copy, during which the GPU would wait.
    When this generator is closed, it sets `stop`, so that whoever makes the batches can end early.
    """
    made = one_ahead(lambda _: next(batches, None), itertools.repeat(None), "megabatch-batches")
    try:
        for batch in made:
            if batch is None:
                return
            yield batch
            del batch
    finally:
        stop.set()
        made.close()


class Assembly:
    """The rows of one batch, each chunk copied when it comes, which frees its shared memory."""

    def __init__(self, size: int, memory: Memory) -> None:
        self.size = size
        self._memory = memory
        self._count = 0
        self._parts: list[Chunk] = []  # without their images, if there are several
        self._images: Tensor | list[Any] | None = None

    def __len__(self) -> int:
        return self._count

    def add(self, chunk: Chunk) -> Chunk | None:
        """Add as many rows as the batch lacks; return the others, if any."""
        room = self.size - self._count
        if len(chunk) > room:
            self.add(chunk.part(slice(room)))
            return chunk.part(slice(room, None))
        if len(chunk) == self.size:  # alone: not copied
            self._images = chunk.images
        elif len(chunk):
            self._copy(chunk)
        if len(chunk):
            self._parts.append(chunk.without_images())
            self._count += len(chunk)
        return None

    def _copy(self, chunk: Chunk) -> None:
        images = chunk.images
        if isinstance(images, Tensor):
            if self._images is None:
                self._images = self._memory.like(images, self.size)
            self._images[self._count : self._count + len(chunk)] = images
        else:
            self._images = [*(self._images or ()), *(images or ())]

    def chunk(self) -> Chunk:
        """All rows so far."""
        parts = self._parts
        if not parts:
            nothing = np.empty(0, dtype=np.int64)
            return Chunk(None, None, nothing, nothing, nothing)
        assert self._images is not None
        return Chunk(
            self._images[: self._count],
            np.concatenate([part.texts for part in parts if part.texts is not None]),
            np.concatenate([part.indices for part in parts]),
            np.concatenate([part.positions for part in parts]),
            np.concatenate([part.ids for part in parts]),
        )


class Memory:
    """Memory of batches, used again when no tensor refers to it any more.

    Fresh memory comes from the system page by page, cleared, and in a virtual machine possibly from
    its host: copying images into it took 16 to 290 µs for each image of 151 kB, into memory that
    has been used before 12 µs. So as much is kept as was ever in use at a time.

    pinned: GPUs copy from it without a copy into pinned memory first. The copies must be complete
        before the last tensor that refers to it goes, as they are at the end of a training step.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._free: list[np.ndarray] = []

    def like(self, images: Tensor, count: int) -> Tensor:
        """An uninitialised tensor of `count` images, with these images' order in memory."""
        if images.ndim == 4 and channels_last(images):
            _, c, h, w = images.shape
            return self.empty((count, h, w, c), images.dtype).permute(0, 3, 1, 2)
        return self.empty((count, *images.shape[1:]), images.dtype)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        size = torch.empty(shape, dtype=dtype, device="meta").nbytes
        if self._free and len(self._free[0]) != size:
            self._free.clear()  # of another kind of batches
        memory = self._free.pop() if self._free else self._allocate(size)
        lent = memory.view()  # the tensor and its views refer to this object
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    def _allocate(self, size: int) -> np.ndarray:
        memory = np.empty(size, np.uint8)  # NumPy asks for huge pages, unlike torch
        if self._pinned and size:
            # torch's own allocator of pinned memory rounds up to the next power of two.
            pin(memory)
        return memory


def pin(memory: np.ndarray) -> None:
    """Lock memory in place, for fast copies to a GPU; it stays as it is if that fails."""
    runtime = torch.cuda.cudart()
    place = memory.ctypes.data
    if runtime.cudaHostRegister(place, memory.nbytes, 0) == runtime.cudaError.success:
        weakref.finalize(memory, runtime.cudaHostUnregister, place).atexit = False
        return
    with contextlib.suppress(RuntimeError):  # the next launch would report it
        torch.zeros(1, device="cuda")
