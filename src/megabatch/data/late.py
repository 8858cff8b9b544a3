"""Images that stay files on the host until their micro-batch comes.

A million images of 224 pixels are 600 GB of float32 numbers, and 50 GB of JPEG files. With late
decoding the loader's workers only read the files; others decode and transform them, two
micro-batches ahead of their use, in each pass of gradient caching anew, with the same random
augmentation: its seed is kept with the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from megabatch.data.fetch import (
    begin_worker,
    random_state_kept,
    seed_everything,
)
from megabatch.data.pairs import BadSample, EncodedImage, Pair, PairDataset, undecoded
from megabatch.data.watched import WatchedLoader
from megabatch.errors import UsageError

_LARGEST_PIECE = 64  # images that a worker decodes at a time: each piece is a message


class DecodingStopped(UsageError):
    """The processes that decode are gone or silent; a process may be the only one to know."""

    exit_code = 1  # not a mistake in the command


@dataclass(frozen=True)
class Later:
    """An image to be decoded when its turn comes, and the seed of its augmentation.

    image: a file, or what a source gave that has no files.
    """

    image: EncodedImage | Image.Image
    seed: int

    @property
    def nbytes(self) -> int:
        """Of the file, or of the pixels."""
        if isinstance(self.image, EncodedImage):
            return len(self.image.data)
        return self.image.width * self.image.height * len(self.image.getbands())


class UndecodedPairs:
    """A data set whose pairs have an `EncodedImage` where it would decode a file."""

    def __init__(self, dataset: PairDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Pair:
        with undecoded():
            return self.dataset[index]


def keep(image: EncodedImage | Image.Image) -> Later:
    """In the place of a transform: keeps the image, and the seed that it would have drawn from."""
    return Later(image, torch.initial_seed())


def mean_bytes(dataset: PairDataset, samples: int = 256) -> float:
    """Mean bytes of an image as it waits on the host, over samples from all parts of a data set."""
    pairs, sizes = UndecodedPairs(dataset), []
    for index in np.unique(np.linspace(0, len(dataset) - 1, samples).astype(int)):
        try:
            sizes.append(Later(pairs[int(index)].image, 0).nbytes)  # type: ignore[arg-type]
        except BadSample:
            continue
    return float(np.mean(sizes)) if sizes else 0.0


class Decoder:
    """Processes that decode and transform; one batch at a time.

    Args:
        transform: image to tensor; draws from generators that are seeded for each image.
        workers: processes, at least 1.
        micro_batch_size: rows that are asked for at a time; two such are in the making.
        timeout: seconds without a sample after which it is an error; 0: wait for good.
    """

    def __init__(
        self,
        transform: Callable[[Any], Tensor],
        workers: int,
        micro_batch_size: int,
        timeout: float = 0,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers: {workers}; expected at least 1 to decode late")
        piece = max(1, min(_LARGEST_PIECE, -(-micro_batch_size // workers)))
        self._timeout = timeout
        self._pieces = _Pieces(piece)
        self._loader: WatchedLoader[Any] = WatchedLoader(
            _Work(transform),  # a map from pieces, not from numbers
            sampler=self._pieces,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=workers,
            persistent_workers=True,
            prefetch_factor=max(2, -(-2 * micro_batch_size // (piece * workers))),
            timeout=timeout,
            worker_init_fn=begin_worker,
            generator=torch.Generator(),  # its own, not the trainer's
        )

    def start(self, images: Sequence[Later], first: int) -> Iterator[Decoded]:
        """Begin to decode the images from number `first` on; what was being decoded is dropped."""
        self._pieces.images, self._pieces.first = images, first
        with _failures(self._timeout):
            return self._guarded(iter(self._loader))

    def _guarded(self, pieces: Iterator[Decoded]) -> Iterator[Decoded]:
        while True:
            with _failures(self._timeout):
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece


class LateImages:
    """The images of a batch, `images[start:stop]` decoded and transformed when asked for.

    Asked for from first to last, pass after pass, they are made ahead: those of the first pass from
    the start, those of the second while the loss is computed. Out of turn it works too, and waits.
    There is at least one.

    An image that turns out to be damaged is a black picture, and is told in `bad`: the caller has
    to leave its pair out of the loss.

    Attributes:
        bad: row to (reason, key), of the rows seen so far.
    """

    def __init__(self, images: Sequence[Later], decoder: Decoder) -> None:
        self.images = images
        self.bad: dict[int, tuple[str, str]] = {}
        self._decoder = decoder
        self._passes = 0
        self._at = self._received = 0  # the rows given and received so far
        self._left = torch.empty(0)
        self._coming = decoder.start(images, 0)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(len(self))
        if start >= stop:
            return self[:1][:0]
        if start != self._at:
            self._go_to(start)
        parts, missing = [], stop - start
        while missing:
            if not len(self._left):
                self._left = self._receive()
            part, self._left = self._left[:missing], self._left[missing:]
            missing -= len(part)
            parts.append(part)
        self._at = stop
        if stop == len(self):
            self._passes += 1
            if self._passes == 1 and start:  # gradient caching comes twice, but for a whole batch
                self._go_to(0)
        return torch.cat(parts)

    def _go_to(self, row: int) -> None:
        self._at = self._received = row
        self._left = torch.empty(0)
        self._coming = self._decoder.start(self.images, row)

    def _receive(self) -> Tensor:
        piece = next(self._coming)
        for offset, reason, key in piece.bad:
            self.bad[self._received + offset] = reason, key
        self._received += len(piece.rows)
        return piece.rows


class Decoded(NamedTuple):
    """A piece of a batch: rows (n, ...), and of the damaged ones offset, reason and key."""

    rows: Tensor
    bad: list[tuple[int, str, str]]


def decode(piece: Sequence[Later], transform: Callable[[Any], Tensor]) -> Decoded:
    """Decode and transform images as the loader's own workers do it early."""
    rows, bad = [], []
    with random_state_kept():
        for offset, later in enumerate(piece):
            image = later.image
            try:
                image = image.decode() if isinstance(image, EncodedImage) else image
            except BadSample as sample:
                bad.append((offset, sample.reason, sample.key))
                image = _blank()
            seed_everything(later.seed)
            rows.append(transform(image))
    return Decoded(torch.stack(rows), bad)


class _Work:
    """What one process does."""

    def __init__(self, transform: Callable[[Any], Tensor]) -> None:
        self.transform = transform

    def __getitem__(self, piece: Sequence[Later]) -> Decoded:
        return decode(piece, self.transform)


class _Pieces:
    """The pieces of a batch from some row on: the sampler that DataLoader wants."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.images: Sequence[Later] = ()
        self.first = 0

    def __iter__(self) -> Iterator[Sequence[Later]]:
        images = self.images
        for start in range(self.first, len(images), self.size):
            yield images[start : start + self.size]


@contextlib.contextmanager
def _failures(timeout: float) -> Iterator[None]:
    """Turn what DataLoader says of its processes into one line."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        # The last line: of an error in a process its traceback comes first.
        reason = f"decoding: {(str(error).strip() or type(error).__name__).splitlines()[-1]}"
        if timeout and "timed out" in str(error):
            reason = f"the workers gave no decoded image for {timeout:g} s: one hangs"
        raise DecodingStopped(reason) from error


def _blank() -> Image.Image:
    return Image.new("RGB", (64, 64))


def _unchanged(piece: Any) -> Any:
    return piece
