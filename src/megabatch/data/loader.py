"""Global batches of pairs in an exact order: shuffling, resuming, worker processes."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megabatch.ahead import one_ahead
from megabatch.data.collect import Memory, collected
from megabatch.data.fetch import TOKEN_CACHE, TOKEN_CACHE_OF_ONE, Chunk, Fetcher, many_at_once
from megabatch.data.late import Decoder, LateImages
from megabatch.data.order import Order, Requests, parts_of
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
    sample once or, if the data set has `parts`, as often as these say. An epoch ends when fewer
    than `batch_size` samples are left. Bad samples are counted in `skipped`, and their batch lacks
    them.

    With several ranks, each takes a contiguous part of every batch's rows and fetches no others.
    The batches are the same as with one rank, and the position is the same on all of them, so a run
    can be resumed with another number of ranks.

    Args:
        dataset: the pairs; if it has `arrays` and the transform `batch`, those are used.
        batch_size: pairs in a batch of all ranks together.
        transform: image (or first text) to tensor, all of one shape. The generators of torch,
            `random` and numpy are seeded for each sample by (seed, epoch, index), and differently
            each time that the sample comes in an epoch. It may have faster methods: `batch` (see
            BatchTransform), `pixels` (see `transformed`), and `texts`, a list of first texts to
            (b, ...), each row depending on its text alone, without randomness.
        tokenizer: list of captions to (n, context) int64. Each worker caches the tokens of distinct
            captions, up to 64 MiB; without workers this process does, up to 512 MiB.
        seed: of the orders and the transform's randomness.
        workers: processes that fetch, while a thread of this one puts the next batch together; 0:
            this process does. With `arrays` and `batch` any number above 0 stands for that thread,
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
            iterating: an epoch has no usable sample, one of several ranks has none in a batch, or
            the workers give no sample within `timeout`.
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
        self._decoder = None if late is None else Decoder(transform, workers, late, timeout)
        self._ahead = workers > 0
        at_once = late is None and many_at_once(dataset, transform) is not None
        self.processes = 0 if at_once else workers
        self._fetcher = Fetcher(
            *(dataset, transform, tokenizer, seed),
            token_cache=TOKEN_CACHE if self.processes else TOKEN_CACHE_OF_ONE,
            negatives=negatives,
            late=late is not None,
        )
        self._requests = Requests(
            self._order, batch_size, rank, world_size, drop_last, piece=batch_size
        )
        # With processes a batch comes in pieces, so that all of them work on the next one. The
        # pieces in flight add up to one batch; each costs this process a file descriptor and 2 ms.
        self._prefetch = max(1, min(4, _PIECES // max(1, workers)))
        if self.processes:
            piece = -(-self._requests.rows // (self._prefetch * workers))
            self._requests.piece = max(32, piece)
        self._workers: WorkerLoader[Chunk] | None = None
        self._timeout = timeout

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._order.epoch

    @property
    def batches_per_epoch(self) -> int:
        """Batches in an epoch, one that has no usable sample included."""
        whole, rest = divmod(self._order.pairs, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of this epoch; then the next epoch is the current one.

        The state advances before a batch is yielded: a state saved during the batch's step resumes
        with the batch after it.
        """
        order, whole_epoch, batches = self._order, self._order.position == 0, 0
        for chunk in self._chunks():
            self._advance(chunk)
            if len(chunk):
                batches += 1
                yield self._batch(chunk)
            elif self._requests.world_size > 1:
                first = "; ".join(f"{key}: {reason}" for _, reason, key in chunk.bad[:3])
                raise UsageError(
                    f"a rank's whole part of a batch, {plural(len(chunk.bad), 'sample')}, is "
                    f"unusable: {first}"
                )
            del chunk  # its memory is that of the batch after the next
        if order.position:  # the rest fills no batch
            order.end_epoch()
        if whole_epoch and batches == 0:
            raise UsageError(
                f"a whole epoch of {plural(order.pairs, 'pair')} has no usable one: "
                f"{'; '.join(self.report())}"
            )

    def _chunks(self) -> Iterator[Chunk]:
        """This rank's rows of the epoch's remaining batches, without the bad samples.

        With `workers` a thread puts the next one together while the caller uses the one before it:
        32,768 images take seconds to receive and to copy, during which the GPU would wait.
        """
        stop = threading.Event()  # so that the thread ends early if the loop breaks off
        if not self.processes:
            chunks: Iterator[Chunk] = map(self._fetcher, self._requests)
        else:
            self._workers = self._workers or WorkerLoader(
                self._fetcher,
                self._requests,
                workers=self.processes,
                prefetch=self._prefetch,
                timeout=self._timeout,
            )
            chunks = self._workers.run(stop)  # the processes start from this thread
        batches = collected(chunks, self._requests.rows, self._memory)
        if not self._ahead:
            yield from batches
            return
        coming = one_ahead(lambda _: next(batches, None), itertools.repeat(None), "megabatch-data")
        try:
            while (batch := next(coming)) is not None:
                yield batch
                del batch
        except GeneratorExit:
            raise
        except BaseException as error:
            # An interrupt may leave a message half read: the next loop gets new workers.
            self._workers = None
            if self._timeout and "timed out" in str(error):
                raise UsageError(
                    f"the workers delivered no sample for {self._timeout:g} s: a reader hangs"
                ) from error
            raise
        finally:
            stop.set()
            coming.close()

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
        changed = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        if changed:
            found = ", ".join(f"{name} was {was.get(name)}, is {now.get(name)}" for name in changed)
            raise UsageError(f"the data cannot be resumed where they were left: {found}")
        self._order.epoch = int(state["epoch"])
        self._order.position = int(state["position"])
        self.skipped = Counter(state["skipped"])
        self.skipped_first = dict(state["skipped_first"])
        self._bad = dict.fromkeys(state["bad"])

    def report(self) -> list[str]:
        """Return lines about damaged files and skipped samples so far; empty if there are none."""
        lines = [f"damaged: {line}" for line in getattr(self.dataset, "damage", [])]
        for reason, count in self.skipped.most_common():
            lines.append(f"skipped {count} x {reason} (first: {self.skipped_first[reason]})")
        return lines

    def _batch(self, chunk: Chunk) -> Batch:
        images: Any = chunk.images
        if self._decoder is not None:
            images = LateImages(images, self._decoder)
        arrays: Any = (chunk.texts, chunk.indices, chunk.ids)
        return Batch(images, *map(torch.from_numpy, arrays))

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

    def _advance(self, chunk: Chunk) -> None:
        """Count a batch's bad samples, and move to the batch after it."""
        for bad in chunk.bad:
            self._count(*bad)
        self._order.position += self.batch_size
        left = self._order.pairs - self._order.position
        if left < (self.batch_size if self.drop_last else 1):
            self._order.end_epoch()


def _check_range(name: str, value: int, low: int, high: int | None = None) -> None:
    if value < low or (high is not None and value > high):
        upto = f" and at most {high}" if high is not None else ""
        raise ValueError(f"{name}: {value}; expected at least {low}{upto}")
