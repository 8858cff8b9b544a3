"""Prefetching by one: a thread makes the next item while the caller uses the current one."""

from __future__ import annotations

import atexit
import functools
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")

_PATIENCE = 10  # seconds to wait for a busy thread when the process exits


def one_ahead(make: Callable[[S], T], items: Iterable[S], name: str) -> Generator[T, None, None]:
    """make(item) for each item, the next one already in progress in a thread called `name`.

    Items are drawn in the caller's thread. An exception is raised when its item is due. Closing the
    generator waits for the item in progress and ends the thread.
    """
    worker = _Worker(name)
    try:
        made = (worker.submit(make, item) for item in items)
        coming = next(made, None)
        while coming is not None:
            value = coming.result()
            coming = next(made, None)
            yield value
            del value  # before the next one is waited for
    finally:
        coming = None  # it would refer to an error whose traceback refers to this frame
        worker.stop()


class _Worker:
    """A thread that runs jobs in order.

    It is a daemon, unlike those of concurrent.futures: a job that hangs does not keep the process
    alive.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        # At exit Python kills daemons, which aborts the process if one is inside PyTorch's code.
        atexit.register(self._end, timeout=_PATIENCE)

    def submit(self, function: Callable[[S], T], item: S) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put(functools.partial(_fulfil, future, function, item))
        return future

    def stop(self) -> None:
        """Finish the jobs, then end the thread."""
        atexit.unregister(self._end)
        self._end()

    def _end(self, timeout: float | None = None) -> None:
        self._jobs.put(None)
        self._thread.join(timeout)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # drop the reference to the result, which is the caller's


def _fulfil(future: Future[T], function: Callable[[S], T], item: S) -> None:
    try:
        future.set_result(function(item))
    except BaseException as error:  # the caller waits for the future in any case
        future.set_exception(error)
        del future  # whose error refers to this frame: without a cycle it is freed with its caller
