"""From indices to tensors: the work of one of the loader's workers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from megabatch.data.order import Request
from megabatch.data.pairs import (
    ArrayDataset,
    BadSample,
    BatchTransform,
    Pair,
    PairDataset,
    PixelTransform,
    TextTransform,
    UndecodedPairs,
    caption_id,
    transformed,
)

TOKEN_CACHE = 2**26  # bytes of tokens that each of several workers keeps: 100,000 texts of 77
TOKEN_CACHE_OF_ONE = 2**29  # if a single process does everything: 800,000

#: Of a bad sample: its position in the order, index, reason and key.
BadPosition = tuple[int, int, str, str]


@dataclass
class Chunk:
    """Fetched samples, in the order of the request, without the bad ones.

    images: (n, ...), or a list of n if they are decoded late, None if n is 0; texts: (n, context)
    int64, or (n, context, 1 + k) with k negatives each, None if n is 0; indices, positions and ids
    of the captions: int64 (n,). All but the images are numpy arrays: a tensor from a worker costs a
    file descriptor, which took 2 ms.
    bad: position, index, reason and key of each bad sample.
    """

    images: Tensor | list[Any] | None
    texts: np.ndarray | None
    indices: np.ndarray
    positions: np.ndarray
    ids: np.ndarray
    bad: list[BadPosition] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.indices)

    def part(self, rows: slice) -> Chunk:
        """Some of the rows (views), without the bad samples; there is at least one row."""
        images, texts = self.images, self.texts
        assert images is not None
        assert texts is not None
        return Chunk(
            images[rows], texts[rows], self.indices[rows], self.positions[rows], self.ids[rows]
        )

    def without_images(self) -> Chunk:
        """Everything else about the samples, without the bad ones."""
        return Chunk(None, self.texts, self.indices, self.positions, self.ids)


class Fetcher:
    """Fetches, transforms and tokenises samples; runs in the workers."""

    def __init__(
        self,
        dataset: PairDataset,
        transform: Callable[[Any], Any],
        tokenizer: Callable[[list[str]], Tensor],
        seed: int,
        token_cache: int = TOKEN_CACHE,
        negatives: int = 0,
    ) -> None:
        self.negatives = negatives
        self.dataset = dataset
        self.transform = transform
        self.seed = seed
        self._tokens = CachedTokens(tokenizer, token_cache)
        self._captions: CaptionsByIndex | None = None
        self._firsts: Callable[[list[Any]], Tensor] | None = None
        if isinstance(transform, TextTransform) and getattr(dataset, "first", "image") == "text":
            self._firsts = CachedTokens(transform.texts, token_cache)
        self._pairs: PairDataset = dataset
        self._transform = transform
        if isinstance(transform, PixelTransform):
            self._pairs = UndecodedPairs(dataset)
            self._transform = functools.partial(transformed, transform=transform)

    def __getitem__(self, request: Request) -> Chunk:
        # Seeded by the draw: a sample that comes twice in an epoch is augmented differently.
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
                    pair = self._pairs[int(index)]
                    texts = [pair.caption, *chosen_negatives(pair, self.negatives, int(seed))]
                    images.append(self._first(pair, int(seed)))
                except BadSample as sample:
                    bad.append((start + offset, int(index), sample.reason, sample.key))
                    continue
                captions += texts
                ids.append(caption_id(pair.caption) if pair.id is None else pair.id)
                good.append(offset)
        return Chunk(
            self._together(images),
            self._with_negatives(self._tokens(captions).numpy()) if captions else None,
            indices[good],
            start + np.array(good, dtype=np.int64),
            np.array(ids, dtype=np.int64),
            bad,
        )

    def _first(self, pair: Pair, seed: int) -> Any:
        """A pair's image, transformed; its first text as it is if those are tokenised together."""
        if self._firsts is not None:
            return pair.image
        seed_everything(seed)
        return self._transform(pair.image)

    def _together(self, images: list[Any]) -> Tensor | list[Any] | None:
        """Transformed images, or first texts, as one tensor; files to be decoded later as they are.

        None if there is none.
        """
        if not images:
            return None
        if self._firsts is not None:
            return self._firsts(images)
        return stacked(images) if isinstance(images[0], Tensor) else images

    def _with_negatives(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens of captions (n, context), or of each with its negatives (n, context, 1 + k)."""
        if not self.negatives:
            return tokens
        each = tokens.reshape(-1, 1 + self.negatives, tokens.shape[1])
        return np.ascontiguousarray(each.transpose(0, 2, 1))


def chosen_negatives(pair: Pair, count: int, seed: int) -> list[str]:
    """So many of a pair's negatives, in their order: others with another seed if it has more.

    Raises:
        BadSample: it has fewer.
    """
    found = pair.negatives
    if len(found) < count:
        raise BadSample(f"fewer than {count} negatives", pair.key)
    if len(found) == count or not count:
        return list(found[:count])
    chosen = np.random.default_rng(seed).choice(len(found), count, replace=False)
    return [found[i] for i in sorted(chosen)]


def only_copied(dataset: PairDataset, transform: Callable[[Any], Any]) -> bool:
    """Whether samples are rows of arrays that the transform does not change.

    Then one copy is the whole work; another process would have to send that copy.
    """
    if not (isinstance(dataset, ArrayDataset) and isinstance(transform, BatchTransform)):
        return False
    row = torch.from_numpy(dataset.arrays(np.zeros(1, np.int64)))
    return transform.batch(row, torch.zeros(1, dtype=torch.int64)) is row


class CachedTokens:
    """A tokenizer with a cache: pairs come again in every epoch.

    limit: bytes of tokens that are kept; the texts themselves come on top.
    """

    def __init__(self, tokenizer: Callable[[list[str]], Tensor], limit: int) -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self._rows: dict[str, int] = {}  # of _table
        self._table: Tensor | None = None

    def __call__(self, texts: list[str]) -> Tensor:
        """Return the tokens of these texts, (n, context)."""
        new = [text for text in dict.fromkeys(texts) if text not in self._rows]
        tokens = self.tokenizer(new) if new else None
        if tokens is not None:
            new = self._add(new, tokens)  # those that did not fit
        assert self._table is not None
        found = self._table[torch.tensor([self._rows.get(text, -1) for text in texts])]
        if new:
            assert tokens is not None
            row_of = {text: row for row, text in enumerate(new, len(tokens) - len(new))}
            others = [at for at, text in enumerate(texts) if text in row_of]
            found[others] = tokens[[row_of[texts[at]] for at in others]]
        return found

    def _add(self, texts: list[str], tokens: Tensor) -> list[str]:
        """Keep the first texts' tokens, as many as fit; return the other texts."""
        if self._table is None:
            # At its full size: the system provides memory only for the part that is written.
            capacity = max(1, self.limit // max(1, tokens[0].nbytes))
            self._table = tokens.new_empty((capacity, *tokens.shape[1:]))
        known = len(self._rows)
        fit = min(len(texts), len(self._table) - known)
        self._table[known : known + fit] = tokens[:fit]
        self._rows.update(zip(texts[:fit], range(known, known + fit), strict=True))
        return texts[fit:]

    def rows(self, texts: list[str]) -> np.ndarray:
        """The rows of the table with their tokens, for `at`; int64 (n,), -1 for those not kept."""
        return np.array([self._rows.get(text, -1) for text in texts], dtype=np.int64)

    def at(self, rows: np.ndarray) -> Tensor:
        """The tokens in these rows of the table; arbitrary ones where a row is -1."""
        assert self._table is not None
        return self._table[torch.from_numpy(rows)]


class CaptionsByIndex:
    """Tokens and ids of a data set's captions, looked up by index once they are known.

    A lookup by text in each epoch would take as long as copying the images, all of it in Python,
    and so hold up the threads that launch the GPU's work.
    """

    def __init__(self, dataset: ArrayDataset, tokens: CachedTokens) -> None:
        self.dataset = dataset
        self._tokens = tokens
        self._rows = np.full(len(dataset), -1, dtype=np.int64)
        self._own_ids = getattr(dataset, "ids", None)
        self._ids = np.empty(0 if self._own_ids else len(dataset), dtype=np.int64)

    def __call__(self, indices: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return tokens (n, context) and ids, int64 (n,), of the samples with these indices."""
        rows = self._rows[indices]
        new = np.flatnonzero(rows < 0)
        if len(new) == 0:
            return self._tokens.at(rows), self._ids_at(indices)
        captions = self.dataset.texts(indices[new])
        tokens = self._tokens(captions)
        self._rows[indices[new]] = self._tokens.rows(captions)
        if self._own_ids is None:
            self._ids[indices[new]] = caption_ids(captions)
        if len(new) < len(indices):
            found = self._tokens.at(rows)
            found[torch.from_numpy(new)] = tokens
            tokens = found
        return tokens, self._ids_at(indices)

    def _ids_at(self, indices: np.ndarray) -> np.ndarray:
        return self._ids[indices] if self._own_ids is None else self._own_ids(indices)


def caption_ids(captions: Sequence[str]) -> np.ndarray:
    """`caption_id` of each, int64 (n,): the same in every process and every run."""
    return np.array([caption_id(caption) for caption in captions], dtype=np.int64)


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

    Decoded images have their channels last. To bring them into another order here takes 0.11 ms of
    1.4 ms that a worker needs for an image of 224² pixels; their normalisation does it in passing.
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
