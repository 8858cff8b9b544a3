"""Late decoding: images stay encoded on the host until their micro-batch comes.

A million images of 224 pixels are 150 GB in uint8, and 50 GB as JPEG files. The loader's workers
only read these. Other processes decode and transform them two micro-batches ahead of their use, in
each pass of gradient caching again, with the same random augmentation.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from megabatch.data.fetch import random_state_kept, seed_everything, stacked
from megabatch.data.images import DeferredImage, transformed
from megabatch.data.pairs import BadSample, EncodedImage, PairDataset
from megabatch.data.workers import WorkerLoader
from megabatch.errors import UsageError

_LARGEST_PIECE = 64  # images that a worker decodes for one message


class DecodingStopped(UsageError):
    """The decoding processes are gone or give nothing; possibly only this rank knows."""

    exit_code = 1  # not a mistake in the command


def mean_bytes(dataset: PairDataset, samples: int = 256) -> float:
    """Mean bytes of an undecoded image, over samples spread evenly over a data set."""
    sizes = [0]
    for index in np.unique(np.linspace(0, len(dataset) - 1, samples).astype(int)).tolist():
        with contextlib.suppress(BadSample):
            image: Any = dataset[index].image
            sizes.append(len(image.data if isinstance(image, EncodedImage) else image.tobytes()))
    return sum(sizes) / max(1, len(sizes) - 1)


class Decoded(NamedTuple):
    """A piece of a batch: rows (n, ...), and offset, reason and key of each damaged one."""

    rows: Tensor
    bad: list[tuple[int, str, str]]


def decode(transform: Callable[[Any], Tensor], piece: Sequence[DeferredImage]) -> Decoded:
    """Decode and transform images, with the results of the loader's early decoding."""
    rows, bad = [], []
    with random_state_kept():
        for offset, sample in enumerate(piece):
            seed_everything(sample.seed)
            try:
                rows.append(transformed(transform, sample.image))
            except BadSample as damaged:
                bad.append((offset, damaged.reason, damaged.key))
                rows.append(transform(Image.new("RGB", (64, 64))))
    return Decoded(stacked(rows), bad)


class Decoder:
    """Processes that decode and transform images, of one batch at a time.

    They are two times `micro_batch_size` rows ahead; the rest is as for PairLoader.
    """

    def __init__(
        self,
        transform: Callable[[Any], Tensor],
        workers: int,
        micro_batch_size: int,
        timeout: float,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers: {workers}; expected at least 1 to decode late")
        self._piece = max(1, min(_LARGEST_PIECE, -(-micro_batch_size // workers)))
        self._processes = WorkerLoader(
            functools.partial(decode, transform),
            workers=workers,
            prefetch=max(2, -(-2 * micro_batch_size // (self._piece * workers))),
            timeout=timeout,
        )

    def start(self, images: Sequence[DeferredImage], first: int) -> Iterator[Decoded]:
        """Decode the images from number `first` on, and drop the previous work."""
        starts = range(first, len(images), self._piece)
        return self._processes.run([images[i : i + self._piece] for i in starts])


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Errors of the processes in one line."""
    try:
        yield
    except (UsageError, RuntimeError, OSError) as error:
        # The last line: an error in a process begins with its traceback.
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise DecodingStopped(f"decoding: {reason}") from error


class LateImages:
    """The images of a batch, `images[start:stop]` decoded and transformed on access.

    If they are accessed from first to last, pass after pass, they are decoded ahead: those of the
    first pass from the start, those of the second while the loss is computed. Any other order works
    too, but waits. There is at least one image.

    A damaged image becomes a black one and is listed in `bad`: the caller must leave its pair out
    of the loss.

    Attributes:
        bad: row to (reason, key), of the rows seen so far.
    """

    _coming: Iterator[Decoded]
    _received: int  # rows, so far
    _returned: int
    _rest: Tensor  # received, not returned

    def __init__(self, images: Sequence[DeferredImage], decoder: Decoder) -> None:
        self.images = images
        self.bad: dict[int, tuple[str, str]] = {}
        self._decoder = decoder
        self._passes = 0
        self._go_to(0)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(len(self))
        if start >= stop:
            return self[:1][:0]
        if start != self._returned:
            self._go_to(start)
        parts, missing = [], stop - start
        while missing:
            if not len(self._rest):
                self._rest = self._receive()
            part, self._rest = self._rest[:missing], self._rest[missing:]
            missing -= len(part)
            parts.append(part)
        self._returned = stop
        if stop == len(self):
            self._passes += 1
            # Gradient caching makes two passes, unless the batch is a single micro-batch.
            if self._passes == 1 and start:
                self._go_to(0)
        return torch.cat(parts)

    def _go_to(self, row: int) -> None:
        self._returned = self._received = row
        self._rest = torch.empty(0)
        with _told():
            self._coming = self._decoder.start(self.images, row)

    def _receive(self) -> Tensor:
        with _told():
            piece = next(self._coming)
        for offset, reason, key in piece.bad:
            self.bad[self._received + offset] = reason, key
        self._received += len(piece.rows)
        return piece.rows
