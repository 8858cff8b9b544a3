"""From indices to tensors: the work of one of the loader's workers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from megabatch.data.images import DeferredImage, transformed
from megabatch.data.order import Request
from megabatch.data.pairs import BadSample, Pair, PairDataset, caption_id


@dataclass
class Chunk:
    """Fetched samples, in the order of the request, without the bad ones.

    images: (n, ...), or a dict of such tensors, or a list of n if they are decoded late, None if n
    is 0; texts: (n, context) int64, or (n, context, 1 + k) with k negatives each, None if n is 0;
    indices, and ids of the captions: int64 (n,); bad: index, reason and key of each bad sample.
    All but the images are numpy arrays: a tensor from a worker costs a file descriptor and 2 ms.
    """

    images: Tensor | dict[str, Tensor] | list[Any] | None
    texts: np.ndarray | None
    indices: np.ndarray
    ids: np.ndarray
    bad: list[tuple[int, str, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.indices)


class Fetcher:
    """Fetches, transforms and tokenises samples, in the workers; late: images are not decoded."""

    def __init__(
        self,
        dataset: PairDataset,
        transform: Any,
        tokenizer: Callable[[list[str]], Tensor],
        seed: int,
        negatives: int = 0,
        late: bool = False,
    ) -> None:
        self.dataset = dataset
        self.transform = transform
        self.tokenizer = tokenizer
        self.seed = seed
        self.negatives = negatives
        # Then one thread does the work: another process would have to send what it has copied.
        self.many_at_once = hasattr(dataset, "arrays") and hasattr(transform, "batch") and not late
        # What is done with a first input, and then with those of a chunk together.
        self._prepare: Callable[[Any], Any] = functools.partial(transformed, transform)
        self._stacked: Callable[[list[Any]], Any] = getattr(transform, "collate", stacked)
        if late:
            self._prepare, self._stacked = DeferredImage.keep, list
        elif getattr(dataset, "first", "image") == "text" and hasattr(transform, "texts"):
            self._prepare, self._stacked = str, transform.texts

    def __call__(self, request: Request) -> Chunk:
        """Fetch samples; seeds depend on draws, so one that comes twice in an epoch differs."""
        seeds = sample_seeds(self.seed, request.epoch, request.draws)
        indices = request.draws % len(self.dataset)
        return (self._together if self.many_at_once else self._one_by_one)(indices, seeds)

    def _together(self, indices: np.ndarray, seeds: np.ndarray) -> Chunk:
        source: Any = self.dataset
        images = torch.from_numpy(source.arrays(indices))
        images = self.transform.batch(images, torch.from_numpy(seeds))
        captions = source.texts(indices)
        ids = np.array([*map(caption_id, captions)], np.int64)
        return Chunk(images, self.tokenizer(captions).numpy(), indices, ids)

    def _one_by_one(self, indices: np.ndarray, seeds: np.ndarray) -> Chunk:
        firsts: list[Any] = []
        captions, ids, good, bad = [], [], [], []
        with random_state_kept():
            for offset, (index, seed) in enumerate(zip(indices.tolist(), seeds, strict=True)):
                try:
                    pair = self.dataset[index]
                    texts = [pair.caption]
                    if self.negatives:
                        texts += chosen_negatives(pair, self.negatives, int(seed))
                    seed_everything(int(seed))
                    firsts.append(self._prepare(pair.image))
                except BadSample as sample:
                    bad.append((index, sample.reason, sample.key))
                    continue
                captions += texts
                ids.append(caption_id(pair.caption) if pair.id is None else pair.id)
                good.append(offset)
        if not good:
            nothing = np.empty(0, dtype=np.int64)
            return Chunk(None, None, nothing, nothing, bad)
        tokens = self.tokenizer(captions).numpy()
        if self.negatives:  # (n * (1 + k), context) to (n, context, 1 + k)
            each = tokens.reshape(-1, 1 + self.negatives, tokens.shape[1])
            tokens = np.ascontiguousarray(each.transpose(0, 2, 1))
        images = self._stacked(firsts)
        return Chunk(images, tokens, indices[good], np.array(ids, dtype=np.int64), bad)


def chosen_negatives(pair: Pair, count: int, seed: int) -> list[str]:
    """So many of a pair's negatives, in their order, by the seed; BadSample if it has fewer."""
    if len(pair.negatives) < count:
        raise BadSample(f"fewer than {count} negatives", pair.key)
    chosen = np.random.default_rng(seed).permutation(len(pair.negatives))[:count]
    return [pair.negatives[i] for i in sorted(chosen)]


def sample_seeds(seed: int, epoch: int, draws: np.ndarray) -> np.ndarray:
    """Return an int64 seed >= 0 for each draw, a function of seed, epoch and draw alone.

    The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), applied to the draws from a start
    that is a hash of seed and epoch.
    """
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    start = np.frombuffer(digest[:8], dtype="<u8")
    z = start + draws.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def seed_everything(seed: int) -> None:
    """Seed the generators on the CPU: torchvision's transforms use torch's, others the rest."""
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


def stacked(images: list[Tensor]) -> Tensor:
    """Images (c, h, w) as one tensor (n, c, h, w), in the order that they have in memory.

    Decoded images have their channels last. Another order takes 0.11 ms of the 1.4 ms that a worker
    needs for an image of 224² pixels; their normalisation on the device does it in passing.
    """
    # default_collate stacks, in a worker into shared memory: nothing is copied again to be sent.
    last = channels_last(images[0])
    rows: Tensor = default_collate([image.permute(1, 2, 0) for image in images] if last else images)
    return rows.permute(0, 3, 1, 2) if last else rows


def channels_last(images: Tensor) -> bool:
    """Whether the channels of images (..., c, h, w), several, are last in memory, without gaps."""
    if images.ndim < 3 or images.is_contiguous():
        return False
    return images.movedim(-3, -1).is_contiguous()
