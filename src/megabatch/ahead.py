"""One thing ahead: a thread makes the next one while the caller works with the one before."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")

_PATIENCE = 10  # seconds, with a thread that is at work when the process ends


def one_ahead(make: Callable[[S], T], items: Iterable[S], name: str) -> Generator[T, None, None]:
    """make(item) for each item; a thread called `name` is at the next one meanwhile.

    Items are taken in the caller's thread. An error surfaces when its turn comes. Closing the
    generator waits for what is being made, and ends the thread.
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
        worker.stop()


class _Worker:
    """One thread that does one thing after another.

    A daemon, unlike those of concurrent.futures: one that hangs does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        # Python kills daemons as it ends, which in the middle of PyTorch's code aborts the process.
        atexit.register(self._end, timeout=_PATIENCE)

    def submit(self, function: Callable[[S], T], item: S) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put(lambda: _fulfil(future, function, item))
        return future

    def stop(self) -> None:
        """Wait for what is being done, and end."""
        atexit.unregister(self._end)
        self._end()

    def _end(self, timeout: float | None = None) -> None:
        self._jobs.put(None)
        self._thread.join(timeout)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # what it made is the caller's alone


def _fulfil(future: Future[T], function: Callable[[S], T], item: S) -> None:
    try:
        future.set_result(function(item))
    except BaseException as error:  # whatever it is, the caller waits for it
        future.set_exception(error)
