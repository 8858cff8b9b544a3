"""From indices to tensors: what one worker of the loader does."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from megabatch.data.pairs import (
    ArrayDataset,
    BadSample,
    BatchTransform,
    PairDataset,
    TextTransform,
    caption_id,
)
from megabatch.data.remembered import CaptionsByIndex, RememberedTokens

_M_MMAP_THRESHOLD = -3  # glibc's malloc.h
_MAPPED_FROM = 2**20  # bytes
REMEMBERED = 2**26  # bytes of tokens that each of several workers keeps: 100,000 texts of 77
REMEMBERED_BY_ONE = 2**29  # where one process does it all: 800,000


BadPosition = tuple[int, str, str]  # of one bad sample: position in the order, reason, key


class Request(NamedTuple):
    """What to fetch: `draws` stand at `start`, `start + 1`, ... of an epoch's order.

    A draw below the data set's length is the index of a sample; each time that the epoch comes back
    to the sample, its draw is larger by that length.
    """

    epoch: int
    start: int
    draws: np.ndarray


@dataclass
class Chunk:
    """Fetched samples, in the order asked for, without the bad ones.

    images: (n, ...), or a list of n where they are decoded late, None where n is 0; texts: (n,
    context) int64, None where n is 0, indices, positions and ids of the captions: int64 (n,), all
    numpy (a tensor would cost a file descriptor on its way from a worker, which took 2 ms);
    bad: position, reason and key of each bad sample.
    """

    images: torch.Tensor | list[Any] | None
    texts: np.ndarray | None
    indices: np.ndarray
    positions: np.ndarray
    ids: np.ndarray
    bad: list[BadPosition] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.indices)


class Fetcher:
    """Fetches, transforms and tokenises samples; runs in the workers."""

    def __init__(
        self,
        dataset: PairDataset,
        transform: Callable[[Any], Any],
        tokenizer: Callable[[list[str]], torch.Tensor],
        seed: int,
        remembered: int = REMEMBERED,
    ) -> None:
        self.dataset = dataset
        self.transform = transform
        self.seed = seed
        self._tokens = RememberedTokens(tokenizer, remembered)
        self._captions: CaptionsByIndex | None = None
        self._firsts: Callable[[list[Any]], torch.Tensor] | None = None
        if isinstance(transform, TextTransform) and getattr(dataset, "first", "image") == "text":
            self._firsts = RememberedTokens(transform.texts, remembered)

    def __getitem__(self, request: Request) -> Chunk:
        # Of the draw: a sample that comes twice in an epoch is not augmented alike.
        seeds = sample_seeds(self.seed, request.epoch, request.draws)
        indices = request.draws % len(self.dataset)
        if isinstance(self.dataset, ArrayDataset) and isinstance(self.transform, BatchTransform):
            arrays = torch.from_numpy(self.dataset.arrays(indices))
            images = self.transform.batch(arrays, torch.from_numpy(seeds))
            if self._captions is None:
                self._captions = CaptionsByIndex(self.dataset, self._tokens)
            texts, ids = self._captions(indices)
            positions = request.start + np.arange(len(indices))
            return Chunk(images, texts.numpy(), indices, positions, ids)
        return self._one_by_one(request.start, indices, seeds)

    def _one_by_one(self, start: int, indices: np.ndarray, seeds: np.ndarray) -> Chunk:
        images: list[Any] = []
        captions, ids, good, bad = [], [], [], []
        with random_state_kept():
            for offset, (index, seed) in enumerate(zip(indices, seeds, strict=True)):
                try:
                    pair = self.dataset[int(index)]
                except BadSample as sample:
                    bad.append((start + offset, sample.reason, sample.key))
                    continue
                if self._firsts is None:
                    seed_everything(int(seed))
                    images.append(self.transform(pair.image))
                else:
                    images.append(pair.image)
                captions.append(pair.caption)
                ids.append(caption_id(pair.caption) if pair.id is None else pair.id)
                good.append(offset)
        return Chunk(
            (self._firsts or _stacked)(images) if images else None,
            self._tokens(captions).numpy() if captions else None,
            indices[good],
            start + np.array(good, dtype=np.int64),
            np.array(ids, dtype=np.int64),
            bad,
        )


def only_copied(dataset: PairDataset, transform: Callable[[Any], Any]) -> bool:
    """Whether samples are rows of arrays that the transform leaves as they are.

    Then all there is to do is to copy them once; a process elsewhere would have to send the copy.
    """
    if not (isinstance(dataset, ArrayDataset) and isinstance(transform, BatchTransform)):
        return False
    row = torch.from_numpy(dataset.arrays(np.zeros(1, np.int64)))
    return transform.batch(row, torch.zeros(1, dtype=torch.int64)) is row


def sample_seeds(seed: int, epoch: int, draws: np.ndarray) -> np.ndarray:
    """Return an int64 seed >= 0 for each draw, a function of seed, epoch and draw alone.

    The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), applied to the draws from a start
    that a hash of seed and epoch gives.
    """
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    start = np.frombuffer(digest[:8], dtype="<u8")
    z = start + draws.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def seed_everything(seed: int) -> None:
    """Seed what transforms draw from, on the CPU: torchvision uses torch, others the rest."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the process's random state: without workers it is the trainer's own."""
    saved = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])


def join(chunks: Sequence[Chunk]) -> Chunk:
    """Put chunks together, in order."""
    full = [chunk for chunk in chunks if len(chunk)]
    if len(full) == 1:
        return full[0]
    return Chunk(
        _joined([c.images for c in full if c.images is not None]) if full else None,
        np.concatenate([c.texts for c in full if c.texts is not None]) if full else None,
        np.concatenate([c.indices for c in full]) if full else np.empty(0, dtype=np.int64),
        np.concatenate([c.positions for c in full]) if full else np.empty(0, dtype=np.int64),
        np.concatenate([c.ids for c in full]) if full else np.empty(0, dtype=np.int64),
    )


def _stacked(images: list[Any]) -> torch.Tensor | list[Any]:
    return torch.stack(images) if isinstance(images[0], torch.Tensor) else images


def _joined(parts: list[Any]) -> torch.Tensor | list[Any]:
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    return [image for part in parts for image in part]


def begin_worker(worker: int) -> None:
    """What each process that fetches or decodes does first."""
    _leave_signals_to_the_parent()
    _give_memory_back()


def _leave_signals_to_the_parent() -> None:
    """End when the parent says so.

    A signal that asks for an orderly end lets the parent finish its step and save, for which it
    still needs the workers. Terminals, `timeout` and schedulers send theirs to whole groups of
    processes; a SIGTERM of the parent's own, which comes when it is done, is to be told from those.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told, args=(os.getppid(),), daemon=True).start()


def _end_when_told(by: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != by:
        pass
    os._exit(0)


def _give_memory_back() -> None:
    """Let glibc map each large block by itself, so that freeing it gives it back to the system.

    By default it soon takes blocks of up to 32 MiB from its heap, where smaller ones that live on
    keep it from shrinking: workers that stack 32 images of 224² pixels grew to 1 GB each.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
