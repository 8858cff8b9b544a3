"""The loader's worker processes: their start and end, and a DataLoader that notices their death."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

T = TypeVar("T")

#: Seconds of waiting after which DataLoader checks that its processes are alive.
CHECK_INTERVAL = 5.0

_M_MMAP_THRESHOLD = -3  # glibc's malloc.h
_MAPPED_FROM = 2**20  # bytes


class WorkerLoader(DataLoader[T]):
    """`dataset[item]` for each item of a sampler, computed by worker processes.

    It notices within 5 s that one of its processes is gone. A plain DataLoader only checks when its
    timeout is over, which may be ten minutes: the signal that would tell it at once reaches the
    main thread alone, and has no effect if somebody else has asked for the process's exit status.

    Args:
        dataset: a map from the sampler's items, which need not be numbers.
        sampler: iterated anew at each iter().
        workers: processes; 0: none, the items are computed in this one. Otherwise they start at
            iter(), not with the first next(), and persist.
        prefetch: items in flight per worker.
        timeout: seconds without a result after which iterating raises a RuntimeError; 0: no limit.
    """

    def __init__(
        self, dataset: Any, sampler: Iterable[Any], *, workers: int, prefetch: int, timeout: float
    ) -> None:
        super().__init__(
            dataset,
            sampler=sampler,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=prefetch if workers else None,
            timeout=min(timeout, CHECK_INTERVAL),
            worker_init_fn=begin_worker,
            # Its own: otherwise each epoch would draw a number from the trainer's generator.
            generator=torch.Generator(),
        )
        self._timeout = timeout

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        return self.until(threading.Event())

    def until(self, stop: threading.Event) -> Iterator[T]:
        """As iter(), but end early if `stop` is set: after the next item, or within 5 s."""
        return _within(super().__iter__(), self._timeout, stop)


def _within(items: Iterator[T], timeout: float, stop: threading.Event) -> Iterator[T]:
    end = time.monotonic() + timeout
    while not stop.is_set():
        try:
            item = next(items)
        except StopIteration:
            return
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise
            if time.monotonic() >= end and not stop.is_set():
                raise
        else:
            yield item
            del item  # before waiting for the next one
            end = time.monotonic() + timeout


def _unchanged(item: Any) -> Any:
    return item


def begin_worker(worker: int) -> None:
    """Prepare a worker process: its signals and its memory."""
    _leave_signals_to_the_parent()
    _return_freed_memory()


def _leave_signals_to_the_parent() -> None:
    """End only when the parent says so.

    A signal that asks for an orderly end lets the parent finish its step and save, for which it
    still needs the workers. Terminals, `timeout` and schedulers send theirs to whole groups of
    processes; the parent's own SIGTERM, at the end of its work, must be distinguished from those.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_on_sigterm_of, args=(os.getppid(),), daemon=True).start()


def _end_on_sigterm_of(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def _return_freed_memory() -> None:
    """Let glibc map each large block by itself, so that freeing it returns it to the system.

    By default it soon takes blocks of up to 32 MiB from its heap, where smaller ones that live on
    keep it from shrinking: workers that stack 32 images of 224² pixels grew to 1 GB each.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
