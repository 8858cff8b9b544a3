"""Prefetching by one: a thread makes the next item while the caller uses the current one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def one_ahead(make: Callable[[S], T], items: Iterable[S], name: str) -> Generator[T, None, None]:
    """make(item) for each item, the next one already in progress in a thread called `name`_0.

    Items are drawn in the caller's thread. An exception is raised when its item is due. Closing the
    generator waits for the item in progress and ends the thread.
    """
    with ThreadPoolExecutor(1, name) as thread:
        made = (thread.submit(make, item) for item in items)
        try:
            coming = next(made, None)
            while coming is not None:
                value = coming.result()
                coming = next(made, None)
                yield value
                del value  # before the next one is waited for
        finally:
            coming = None  # it would refer to an error whose traceback refers to this frame
