"""A batch put together from the chunks that workers send, in memory that is used again."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megabatch.data.fetch import Chunk, channels_last


def collected(chunks: Iterable[Chunk], size: int, memory: Memory) -> Iterator[Chunk]:
    """Yield batches of `size` samples, of which the bad ones are left out.

    No chunk has samples of two batches. Images are copied chunk by chunk, which frees the shared
    memory in which a worker has sent them; those of a chunk that is a whole batch are not.
    """
    images: Any = None
    parts: list[Chunk] = []  # without their images
    rows = 0
    for chunk in chunks:
        first, rows = rows, rows + len(chunk)
        if isinstance(chunk.images, Tensor) and len(chunk) < size:
            images = memory.like(chunk.images, size) if images is None else images
            images[first:rows] = chunk.images
        elif isinstance(chunk.images, dict) and len(chunk) < size:
            images = images or {k: memory.like(t, size, k) for k, t in chunk.images.items()}
            for name, tensor in chunk.images.items():
                images[name][first:rows] = tensor
            del tensor
        elif chunk.images is not None:
            images = chunk.images if images is None else [*images, *chunk.images]
        parts.append(replace(chunk, images=None))
        del chunk  # before waiting for the next one
        bad = [*itertools.chain.from_iterable(part.bad for part in parts)]
        if rows + len(bad) < size:
            continue
        if isinstance(images, dict):
            images = {name: tensor[:rows] for name, tensor in images.items()}
        elif images is not None:
            images = images[:rows]
        texts = [part.texts for part in parts if part.texts is not None]
        yield Chunk(
            images,
            np.concatenate(texts) if texts else None,
            np.concatenate([part.indices for part in parts]),
            np.concatenate([part.ids for part in parts]),
            bad,
        )
        images, parts, rows = None, [], 0


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
        self._free: defaultdict[str, list[np.ndarray]] = defaultdict(list)

    def like(self, images: Tensor, count: int, name: str = "") -> Tensor:
        """An uninitialised tensor of `count` images, with these images' order in memory.

        `name`: of the tensor, if a batch has several.
        """
        free = self._free[name]
        last = channels_last(images)
        rows = images.movedim(1, -1) if last else images
        size = count * rows[0].nbytes
        if free and len(free[0]) != size:
            free.clear()  # of another kind of batches
        memory = free.pop() if free else self._allocate(size)
        lent = memory.view()  # the tensor and its views refer to this object
        weakref.finalize(lent, free.append, memory).atexit = False
        made = torch.from_numpy(lent).view(images.dtype).view(count, *rows.shape[1:])
        return made.movedim(-1, 1) if last else made

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
