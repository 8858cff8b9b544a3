"""The loader's worker processes: their start and end, and a DataLoader that notices their death."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from megabatch.errors import UsageError

S = TypeVar("S")
T = TypeVar("T")

#: Seconds of waiting after which DataLoader checks that its processes are alive.
CHECK_INTERVAL = 5.0


class WorkerLoader(Generic[S, T]):
    """make(item) for items, by worker processes that persist from loop to loop.

    It notices within 5 s that one of its processes is gone. A plain DataLoader only checks when its
    timeout is over, which may be ten minutes: the signal that would tell it at once reaches the
    main thread alone, and has no effect if somebody else has asked for the process's exit status.

    workers: processes, at least 1; prefetch: items in flight for each; timeout: seconds without a
    result after which iterating raises a UsageError, 0: no limit.
    """

    def __init__(
        self, make: Callable[[S], T], *, workers: int, prefetch: int, timeout: float
    ) -> None:
        self._items: _Items[S] = _Items()
        self.loader: DataLoader[Any] = DataLoader(
            _Same(),  # type: ignore[arg-type]
            sampler=self._items,
            batch_size=None,
            collate_fn=make,  # type: ignore[arg-type]
            num_workers=workers,
            persistent_workers=True,
            prefetch_factor=prefetch,
            timeout=min(timeout, CHECK_INTERVAL),
            worker_init_fn=_leave_signals_to_the_parent,
            # Its own: otherwise each epoch would draw a number from the trainer's generator.
            generator=torch.Generator(),
        )
        self.timeout = timeout

    def run(self, items: Iterable[S], stop: threading.Event | None = None) -> Iterator[T]:
        """The results in order; the processes start here, not with the first next().

        If `stop` is set, they end early: after the next one, or within 5 s.
        """
        self._items.items = items
        return self._within(iter(self.loader), stop or threading.Event())

    def _within(self, results: Iterator[T], stop: threading.Event) -> Iterator[T]:
        end = time.monotonic() + self.timeout
        while not stop.is_set():
            try:
                result = next(results)
            except StopIteration:
                return
            except RuntimeError as error:
                if "timed out" not in str(error):
                    raise
                if time.monotonic() >= end and not stop.is_set():
                    told = f"the workers gave no sample for {self.timeout:g} s: one hangs"
                    raise UsageError(told) from error
            else:
                yield result
                del result  # before waiting for the next one
                end = time.monotonic() + self.timeout


class _Items(Generic[S]):
    """The items of the next loop, as a sampler."""

    items: Iterable[S] = ()

    def __iter__(self) -> Iterator[S]:
        return iter(self.items)


class _Same:
    """Each item as it is, as a data set."""

    def __getitem__(self, item: Any) -> Any:
        return item


def _leave_signals_to_the_parent(worker: int) -> None:
    """End only when the parent says so.

    A signal that asks for an orderly end lets the parent finish its step and save, for which it
    still needs the workers. Terminals, `timeout` and schedulers send theirs to whole groups of
    processes; the parent's own SIGTERM, at the end of its work, must be distinguished from those.
    """
    for name in ("SIGINT", "SIGUSR1"):  # Windows has no SIGUSR1
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS and Windows
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_on_sigterm_of, args=(os.getppid(),), daemon=True).start()


def _end_on_sigterm_of(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
