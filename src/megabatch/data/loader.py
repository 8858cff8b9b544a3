"""Global batches of pairs in an exact order: shuffling, resuming, worker processes."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megabatch.ahead import one_ahead
from megabatch.data.collect import Collected, Memory, ahead, fill, group
from megabatch.data.fetch import (
    TOKEN_CACHE,
    TOKEN_CACHE_OF_ONE,
    BadPosition,
    Chunk,
    Fetcher,
    only_copied,
)
from megabatch.data.late import Decoder, LateImages, UndecodedPairs, keep
from megabatch.data.order import Order, Request, Requests, Share, parts_of
from megabatch.data.pairs import PairDataset
from megabatch.data.workers import WorkerLoader
from megabatch.errors import UsageError, plural

_PIECES = 64  # of a batch, over all workers (one each if there are more)


@dataclass
class Batch:
    """Pairs: images (b, ...) as transformed; texts (b, context), indices (b,), ids (b,) int64.

    Images that were decoded have their channels last in memory, as a transform leaves them.
    With k hard negatives a pair, texts are (b, context, 1 + k): its own, then its negatives.
    Images that are decoded late are decoded on access, `images[start:stop]`.
    Equal captions have equal ids, 0 <= id < 2**62; None: the ids are not known.
    """

    images: torch.Tensor | LateImages
    texts: torch.Tensor
    indices: torch.Tensor
    ids: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.indices)


class PairLoader:
    """Batches of pairs; the same (seed, epoch) gives the same batches with any number of workers.

    Iterating yields the rest of the current epoch and moves on to the next; the position belongs to
    the loader, so there is one iteration at a time. Each epoch has its own random order, of each
    sample once or, if the data set has `parts`, as often as these say. Bad samples are skipped and
    counted in `skipped`, and the following ones fill up the batch. An epoch ends when fewer than
    `batch_size` samples are left.

    With several ranks, each takes a contiguous part of every batch's rows and fetches no others.
    The batches are the same as with one rank, and the position is the same on all of them, so a run
    can be resumed with another number of ranks. Ranks do not know each other's bad samples: a
    rank's part lacks its own, and all ranks have the same number of batches.

    Args:
        dataset: the pairs; if it has `arrays` and the transform `batch`, those are used. If the
            transform changes no row of them, a thread copies them.
        batch_size: pairs in a batch of all ranks together.
        transform: image (or first text) to tensor, all of one shape. The generators of torch,
            `random` and numpy are seeded for each sample by (seed, epoch, index), and differently
            each time that the sample comes in an epoch.
        tokenizer: list of captions to (n, context) int64. Each worker caches the tokens of distinct
            captions, up to 64 MiB; without workers this process does, up to 512 MiB.
        seed: of the orders and the transform's randomness.
        workers: processes that fetch, while a thread of this one puts the next batch together; 0:
            this process does. If samples are only copied, any number above 0 stands for one thread,
            and no process is started.
        drop_last: leave out the samples at the end of an epoch that do not fill a batch; always so
            with several ranks, since some might get no row of it.
        shuffle: False: in the data set's order.
        rank: this rank, 0 <= rank < world_size.
        world_size: number of ranks that share each batch.
        late: None, or the number of rows of a batch's images that are accessed at a time. Images
            are then `LateImages`, decoded on access by further processes, as many as `workers`,
            which must be at least 1.
        pinned: images that are put together from several chunks lie in pinned memory, for copies to
            a GPU; a batch must be dropped only when its copies are complete.
        timeout: seconds without a sample from the workers after which iterating is an error; 0:
            no limit. It has no effect without worker processes.
        negatives: hard negatives of each pair, drawn by epoch and index from those that it has. A
            pair with fewer is a bad sample.

    Attributes:
        processes: the number of fetching processes; as many again decode late.
        skipped: reason to number of samples, each counted once over all epochs so far.
        skipped_first: reason to the key of the first such sample.

    Raises:
        ValueError: a number is out of its range.
        UsageError: the batch is larger than the data set or smaller than the number of ranks; from
            iterating: a whole epoch has too few usable samples for one batch, or the workers give
            no sample within `timeout`.
    """

    def __init__(
        self,
        dataset: PairDataset,
        *,
        batch_size: int,
        transform: Callable[[Any], torch.Tensor],
        tokenizer: Callable[[list[str]], torch.Tensor],
        seed: int,
        workers: int = 0,
        drop_last: bool = True,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
        timeout: float = 0,
        late: int | None = None,
        pinned: bool = False,
        negatives: int = 0,
    ) -> None:
        _check_range("batch_size", batch_size, 1)
        _check_range("negatives", negatives, 0)
        _check_range("workers", workers, 0)
        _check_range("seed", seed, 0, 2**32 - 1)
        _check_range("world_size", world_size, 1)
        _check_range("rank", rank, 0, world_size - 1)
        if world_size > 1 and not drop_last:
            raise ValueError(f"drop_last: False with {world_size} ranks; expected True")
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._order = Order(parts_of(dataset), seed, shuffle)
        self._share = Share(rank, world_size, batch_size)
        if batch_size > self._order.pairs:
            raise UsageError(
                f"the batch size {batch_size} is larger than the data set: {self._order.pairs}"
                " pairs"
            )
        if batch_size < world_size:
            raise UsageError(
                f"the batch size {batch_size} is smaller than the number of ranks, {world_size}"
            )
        self._memory = Memory(pinned=pinned)
        self.skipped: Counter[str] = Counter()
        self.skipped_first: dict[str, str] = {}
        self._bad: dict[int, None] = {}  # indices of these samples: a set, in order
        self._decoder: Decoder | None = None
        by_thread = workers > 0 and late is None and only_copied(dataset, transform)
        self.processes = 0 if by_thread else workers
        if late is None:
            token_cache = TOKEN_CACHE if self.processes else TOKEN_CACHE_OF_ONE
            fetcher = Fetcher(dataset, transform, tokenizer, seed, token_cache, negatives)
        else:
            self._decoder = Decoder(transform, workers, late, timeout)
            undecoded = UndecodedPairs(dataset)
            fetcher = Fetcher(undecoded, keep, tokenizer, seed, negatives=negatives)
        self._timeout = timeout if self.processes else 0
        self._new_chunks: Callable[[], Iterable[Chunk]] = functools.partial(
            _chunks, fetcher, self._order, self._share, workers, self._timeout
        )
        if by_thread:
            self._new_chunks = functools.partial(
                _CopyingThread, fetcher, self._order, self._share, drop_last
            )
        self._chunks: Iterable[Chunk] = self._new_chunks()

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._order.epoch

    @property
    def batches_per_epoch(self) -> int:
        """Batches in an epoch in which no sample is skipped."""
        whole, rest = divmod(self._order.pairs, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of this epoch; then the next epoch is the current one.

        The state advances before a batch is yielded: a state saved during the batch's step resumes
        with the batch after it.
        """
        order, whole_epoch, batches = self._order, self._order.position == 0, 0
        for batch in self._whole_batches() if self._share.world_size == 1 else self._own_parts():
            batches += 1
            yield batch
            del batch  # its memory is that of the batch after the next
            if order.position == 0:
                return  # that was the last one
        if order.position:  # the rest fills no batch
            self._move_to(order.pairs, [])
        if whole_epoch and batches == 0:
            raise UsageError(
                f"a whole epoch of {plural(order.pairs, 'pair')} gives no batch of "
                f"{self.batch_size}: {'; '.join(self.report())}"
            )

    def _whole_batches(self) -> Iterator[Batch]:
        """Batches of a single rank, without the bad samples, filled up by the following ones."""
        bad: list[BadPosition] = []
        for batch in self._collected(fill, self.batch_size):
            if len(batch.rows) < self.batch_size:  # the last ones
                self._move_to(self._order.pairs, bad + batch.bad)
                if len(batch.rows) and not self.drop_last:
                    yield self._batch(batch.rows)
                return
            bad = self._move_to(int(batch.rows.positions[-1]) + 1, bad + batch.bad)
            yield self._batch(batch.rows)
            del batch

    def _own_parts(self) -> Iterator[Batch]:
        """This rank's rows of each batch, without the bad samples."""
        own = self._share.of(self.batch_size)
        for batch in self._collected(group, own.stop - own.start):
            if not len(batch.rows):
                raise UsageError(
                    f"a rank's whole part of a batch, {plural(len(batch.bad), 'sample')}, is "
                    f"unusable: {'; '.join(f'{key}: {why}' for *_, why, key in batch.bad[:3])}"
                )
            self._move_to(self._order.position + self.batch_size, batch.bad)
            yield self._batch(batch.rows)
            del batch

    def _collected(
        self, collect: Callable[[Iterable[Chunk], int, Memory], Iterator[Collected]], rows: int
    ) -> Iterator[Collected]:
        """The rest of the epoch in batches of `rows`; those of processes are collected ahead."""
        stop = threading.Event()
        try:
            if isinstance(self._chunks, WorkerLoader) and self.processes:
                chunks = self._chunks.until(stop)  # starts the processes: from this thread
                yield from ahead(collect(chunks, rows, self._memory), stop)
            else:
                yield from collect(self._chunks, rows, self._memory)
        except GeneratorExit:
            raise
        except BaseException as error:
            # An interrupt may leave a message half read, or the thread at work: the next iteration
            # would wait forever. It gets new workers.
            self._chunks = self._new_chunks()
            if self._timeout and "timed out" in str(error):
                raise UsageError(
                    f"the workers delivered no sample for {self._timeout:g} s: a reader hangs"
                ) from error
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the counts of skipped samples, for JSON."""
        return {
            "epoch": self._order.epoch,
            "position": self._order.position,
            "skipped": dict(self.skipped),
            "skipped_first": dict(self.skipped_first),
            "bad": list(self._bad),
            "order": self._order.parameters(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume exactly where `state` was saved; batch size and workers may have changed.

        Raises:
            UsageError: the state belongs to other data, another seed or another kind of order.
        """
        was, now = state["order"], self._order.parameters()
        if was != now:
            differences = ", ".join(
                f"{k} was {was.get(k)}, is {now.get(k)}"
                for k in {**was, **now}
                if was.get(k) != now.get(k)
            )
            raise UsageError(f"the data cannot be resumed where they were left: {differences}")
        self._order.epoch = int(state["epoch"])
        self._order.position = int(state["position"])
        self.skipped = Counter(state["skipped"])
        self.skipped_first = dict(state["skipped_first"])
        self._bad = dict.fromkeys(state.get("bad", []))  # absent in early versions

    def report(self) -> list[str]:
        """Return lines about damaged files and skipped samples so far; empty if there are none."""
        lines = [f"damaged: {line}" for line in getattr(self.dataset, "damage", [])]
        for reason, count in self.skipped.most_common():
            lines.append(f"skipped {count} x {reason} (first: {self.skipped_first[reason]})")
        return lines

    def _batch(self, chunk: Chunk) -> Batch:
        images, texts = chunk.images, chunk.texts
        assert images is not None
        assert texts is not None
        arrays = (texts, chunk.indices, chunk.ids)
        rest = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        if isinstance(images, torch.Tensor):
            return Batch(images, *rest)
        assert self._decoder is not None
        return Batch(LateImages(images, self._decoder), *rest)

    def count_damaged(self, batch: Batch) -> None:
        """Count the images of a batch that turned out to be damaged when decoded."""
        if isinstance(batch.images, LateImages):
            for row, (reason, key) in sorted(batch.images.bad.items()):
                self._count(int(batch.indices[row]), reason, key)

    def _count(self, index: int, reason: str, key: str) -> None:
        if index not in self._bad:
            self._bad[index] = None
            self.skipped[reason] += 1
            self.skipped_first.setdefault(reason, key)

    def _move_to(self, position: int, bad: list[BadPosition]) -> list[BadPosition]:
        """Advance to `position`; count the bad samples before it and return the others.

        Samples are fetched ahead. Those from `position` on are counted only when it passes them, so
        the counts belong to the state and do not depend on the workers.
        """
        for place, index, reason, key in bad:
            if place < position:
                self._count(index, reason, key)
        self._order.position = position
        left = self._order.pairs - position
        if left < self.batch_size and (self.drop_last or left == 0):
            self._order.epoch += 1
            self._order.position = 0
        return [item for item in bad if item[0] >= position]


def _chunks(
    fetcher: Fetcher, order: Order, share: Share, workers: int, timeout: float
) -> WorkerLoader[Any]:
    """Return an iterable over the remaining chunks of the epoch, whichever it is at iter()."""
    # With workers a batch comes in pieces, so that all of them work on the next one. The pieces in
    # flight add up to one batch, and each costs this process a file descriptor and 2 to 3 ms.
    pieces = max(1, min(4, _PIECES // max(1, workers)))
    piece = rows = -(-share.batch_size // share.world_size)
    if workers:
        piece = min(rows, max(32, -(-rows // (pieces * workers))))
    requests = Requests(order, piece, share)
    return WorkerLoader(fetcher, requests, workers=workers, prefetch=pieces, timeout=timeout)


@dataclass
class _CopyingThread:
    """The remaining batches of the epoch, whichever it is at iter(), copied by a thread ahead."""

    fetcher: Fetcher
    order: Order
    share: Share
    drop_last: bool

    def __iter__(self) -> Iterator[Chunk]:
        own = self.share.of(self.share.batch_size)
        rows = own.stop - own.start
        requests: Iterable[Request] = Requests(self.order, rows, self.share)
        if self.drop_last:  # no sample is bad, so the rest of an epoch fills up no batch
            requests = (request for request in requests if len(request.draws) == rows)
        return one_ahead(self.fetcher.__getitem__, requests, "megabatch-data")


def _check_range(name: str, value: int, low: int, high: int | None = None) -> None:
    if value < low or (high is not None and value > high):
        upto = f" and at most {high}" if high is not None else ""
        raise ValueError(f"{name}: {value}; expected at least {low}{upto}")
