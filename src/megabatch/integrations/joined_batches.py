"""The batches of a step as one, which stays on the host until `GradientCache` encodes its rows."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megabatch.ahead import one_ahead


class JoinedBatches:
    """A loader's batches, `count` at a time joined into one; left-over batches are dropped, as in
    OpenCLIP.

    With `ahead` a thread loads those of the next step as soon as batches of the current one have
    been encoded for the last time. So the host never holds more than `count`, apart from the
    loader's own. The loader must have processes: without any, its augmentation would draw from the
    same random generator as the step, which sets it back for the second pass.
    """

    def __init__(self, loader: Any, count: int, *, ahead: bool) -> None:
        self._loader, self._count, self._ahead = loader, count, ahead
        self.num_batches = loader.num_batches // count
        self.num_samples = loader.num_samples

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        room = threading.Semaphore(self._count)
        stop = threading.Event()

        def load(_: None) -> list[Any]:
            joined: list[Any] = []
            while len(joined) < self._count and room.acquire() and not stop.is_set():
                if (batch := next(batches, None)) is None:
                    break
                joined.append(batch)
            return joined

        steps: Generator[list[Any], None, None]
        steps = (load(None) for _ in itertools.repeat(None))
        if self._ahead:
            steps = one_ahead(load, itertools.repeat(None), "megabatch-joined-batches")
        try:
            for joined in steps:
                if len(joined) < self._count:
                    return
                named = isinstance(joined[0], dict)
                names = [*joined[0]] if named else range(len(joined[0]))
                held = {name: HeldBatches([batch[name] for batch in joined]) for name in names}
                next(iter(held.values())).when_freed = room.release
                joined.clear()
                yield held if named else (*held.values(),)
                # OpenCLIP's loop holds references to these until it gets the next ones.
                for part in held.values():
                    part.release()
        finally:
            stop.set()
            room.release(self._count)
            steps.close()


class HeldBatches:
    """Equally large batches one after another, each moved to the device when it is encoded.

    OpenCLIP's trainer moves what its loader gives; this stays on the host until `GradientCache`
    takes its rows, a batch at a time. It does so twice, and a batch is freed with the second time.

    Attributes:
        when_freed: called after each batch that is freed.
    """

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self._batches: list[Tensor | None] = [*batches]
        self._size, self._rows = len(batches[0]), sum(map(len, batches))
        self._encoded = [0] * len(batches)
        self._dtype: torch.dtype | None = None
        self.when_freed: Callable[[], None] = lambda: None

    def to(
        self, device: torch.device, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> HeldBatches:
        """Convert numbers to the dtype later, as rows are taken; `GradientCache` moves them."""
        self._dtype = dtype
        return self

    def release(self) -> None:
        """Free the batches that are still there."""
        for number in range(len(self._batches)):
            self._free(number)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, rows: slice) -> Tensor:
        number = rows.start // self._size  # no slice spans two batches
        batch = self._batches[number]
        if batch is None:
            raise RuntimeError(
                f"rows {rows.start} to {rows.stop}: encoded twice already, and freed"
            )
        self._encoded[number] += 1
        if self._encoded[number] == 2:
            self._free(number)
        start = number * self._size
        taken = batch[rows.start - start : rows.stop - start]
        return taken.to(self._dtype) if taken.is_floating_point() else taken

    def _free(self, number: int) -> None:
        if self._batches[number] is not None:
            self._batches[number] = None
            self.when_freed()
