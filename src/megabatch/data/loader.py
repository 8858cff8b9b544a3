"""Global batches of pairs in an exact order: shuffling, resuming, worker processes."""

from __future__ import annotations

import functools
import itertools
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megabatch.ahead import one_ahead
from megabatch.data.collect import Memory, collected
from megabatch.data.fetch import Chunk, Fetcher
from megabatch.data.late import Decoder, LateImages
from megabatch.data.order import Request, largest_batch, order_of
from megabatch.data.pairs import PairDataset
from megabatch.data.workers import WorkerLoader
from megabatch.errors import UsageError

_PIECES = 64  # of a batch, over all workers (one each if there are more)


@dataclass
class Batch:
    """Pairs: images (b, ...) as transformed; texts (b, context), indices (b,), ids (b,) int64.

    Images that were decoded have their channels last in memory, as a transform leaves them. Those
    that are decoded late are decoded on access, `images[start:stop]`. Those of any shape are a dict
    of tensors (b, ...), as their transform collates them.
    With k hard negatives a pair, texts are (b, context, 1 + k): its own, then its negatives.
    Equal captions have equal ids, 0 <= id < 2**62; None: the ids are not known.
    """

    images: torch.Tensor | dict[str, torch.Tensor] | LateImages
    texts: torch.Tensor
    indices: torch.Tensor
    ids: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.indices)


class PairLoader:
    """Batches of pairs; the same (seed, epoch) gives the same batches with any number of workers.

    Iterating yields the rest of the current epoch and moves on to the next; the position belongs to
    the loader, so there is one iteration at a time. Each epoch has its own random order, of each
    sample once or as often as the data set's `parts` say, and ends when fewer than `batch_size`
    samples are left, of each part if `batches` of the data set are of one part. Bad samples are
    counted, and their batch lacks them. Each rank takes a contiguous part of every batch's rows, so
    a run can resume with another number of ranks.

    Args:
        dataset: the pairs; if it has `arrays` and the transform `batch`, those are used.
        batch_size: pairs in a batch of all ranks together.
        transform: image (or first text) to tensor, all of one shape. The generators of torch,
            `random` and numpy are seeded for each sample by (seed, epoch, index), and differently
            each time that the sample comes in an epoch. It may have faster methods: `batch` (see
            PairDataset), `pixels` (see `transformed`), and `texts`, of a list of first texts to
            (b, ...), without randomness; and `collate`, of a list of whatever it returns to a dict
            of tensors (b, ...), of the same shapes but for b in each call.
        tokenizer: list of captions to (n, context) int64.
        seed: of the orders and the transform's randomness, 0 <= seed < 2**32.
        workers: processes that fetch, while a thread of this one puts the next batch together; 0:
            this process does. With `arrays` and `batch` any number above 0 stands for the thread.
        rank: this rank, 0 <= rank < world_size.
        world_size: number of ranks that share each batch.
        timeout: seconds without a sample from the workers until an error; 0: no limit.
        late: None, or the number of rows of a batch's images that are accessed at a time. Images
            are then `LateImages`, decoded by further processes, as many as `workers`, at least 1.
        pinned: images that are put together from several chunks lie in pinned memory, for copies to
            a GPU; a batch must be dropped only when its copies are complete.
        negatives: hard negatives of each pair, drawn by epoch and index from those that it has. A
            pair with fewer is a bad sample.

    Attributes:
        processes: the number of fetching processes; as many again decode late.
        skipped: reason to number of samples, each counted once over all epochs so far.
        skipped_first: reason to the key of the first such sample.

    Raises:
        UsageError: the batch is larger than an epoch or smaller than the number of ranks; from
            iterating: a batch has no usable sample on this rank, or the workers give none in time.
    """

    def __init__(
        self,
        dataset: PairDataset,
        *,
        batch_size: int,
        transform: Callable[[Any], Any],
        tokenizer: Callable[[list[str]], torch.Tensor],
        seed: int,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        timeout: float = 0,
        late: int | None = None,
        pinned: bool = False,
        negatives: int = 0,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        most, which = largest_batch(dataset)
        if not 0 <= rank < world_size <= batch_size <= most:
            raise UsageError(
                f"rank {rank}, world_size {world_size}, batch_size {batch_size}, {most} pairs: "
                f"expected rank < world_size <= batch_size <= pairs ({which})"
            )
        self._order = order_of(dataset, batch_size, seed)
        self._rows = range(batch_size * rank // world_size, batch_size * (rank + 1) // world_size)
        self._memory = Memory(pinned=pinned)
        self.skipped: Counter[str] = Counter()
        self.skipped_first: dict[str, str] = {}
        self._bad: dict[int, None] = {}  # indices of these samples: a set, in order
        self._decoder = None if late is None else Decoder(transform, workers, late, timeout)
        self._fetcher = Fetcher(
            dataset, transform, tokenizer, seed, negatives=negatives, late=late is not None
        )
        self._ahead = workers > 0
        self.processes = 0 if self._fetcher.many_at_once else workers
        # With processes a batch comes in pieces, so that all of them work on the next one. The
        # pieces in flight add up to one batch; each costs this process a file descriptor and 2 ms.
        prefetch = max(1, min(4, _PIECES // max(1, workers)))
        pieces = prefetch * self.processes
        self._piece = max(32, -(-len(self._rows) // pieces)) if pieces else len(self._rows)
        self._workers: WorkerLoader[Request, Chunk] | None = None
        self._new_workers = functools.partial(
            WorkerLoader, self._fetcher, workers=workers, prefetch=prefetch, timeout=timeout
        )

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._order.epoch

    @property
    def batches_per_epoch(self) -> int:
        """Batches in an epoch."""
        return self._order.pairs // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of this epoch; then the next epoch is the current one.

        The state advances before a batch is yielded: a state saved during the batch's step resumes
        with the batch after it.
        """
        for chunk in self._chunks():
            for bad in chunk.bad:
                self._count(*bad)
            self._order.position += self.batch_size
            if self._order.position + self.batch_size > self._order.pairs:
                self._order.end_epoch()
            if not len(chunk):
                first = "; ".join(f"{key}: {reason}" for _, reason, key in chunk.bad[:3])
                raise UsageError(
                    f"no sample of a batch can be used, of {len(chunk.bad):,} on this rank: {first}"
                )
            images: Any = chunk.images
            if self._decoder is not None:
                images = LateImages(images, self._decoder)
            arrays: Any = (chunk.texts, chunk.indices, chunk.ids)
            yield Batch(images, *map(torch.from_numpy, arrays))
            del chunk, images, arrays  # their memory is that of the batch after the next
        if self._order.position:  # the rest fills no batch
            self._order.end_epoch()

    def _chunks(self) -> Iterator[Chunk]:
        """This rank's rows of the epoch's remaining batches, without the bad samples.

        With `workers` a thread puts the next one together while the caller uses the one before it:
        32,768 images take seconds to receive and to copy, during which the GPU would wait.
        """
        stop = threading.Event()  # so that the thread ends early if the loop breaks off
        requests = self._order.requests(self.batch_size, self._rows, self._piece)
        if self.processes:
            self._workers = self._workers or self._new_workers()
            chunks = self._workers.run(requests, stop)  # the processes start from this thread
        else:
            chunks = map(self._fetcher, requests)
        batches = collected(chunks, len(self._rows), self._memory)
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
        except BaseException:
            # An interrupt may leave a message half read: the next loop gets new workers.
            self._workers = None
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
        """Resume exactly where `state` was saved; workers, ranks and batch size may have changed.

        Raises:
            UsageError: the state belongs to other data, another seed, other factors or batches;
                the batch size has changed, and batches are of one source.
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

    def source_of(self, batch: Batch) -> int | None:
        """The number, from 0, of a batch's part of the data set; None if it is from all."""
        ends = list(itertools.accumulate(part.size for part in self._order.parts))
        return bisect_right(ends, int(batch.indices[0])) if self._order.block > 1 else None

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
