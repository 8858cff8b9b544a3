"""A DataLoader that looks after its processes while it waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader

T = TypeVar("T")

#: Seconds of waiting after which DataLoader looks whether its processes live.
LOOK = 5.0


class WatchedLoader(DataLoader[T]):
    """A DataLoader with a `timeout` that notices within 5 s that one of its processes is gone.

    DataLoader looks when it gives up waiting, so with a timeout of ten minutes after ten minutes:
    the signal by which it would know at once reaches the main thread alone, and comes to nothing
    where somebody else has asked for the process's exit status.
    """

    def __init__(self, dataset: Any, *, timeout: float, **options: Any) -> None:
        super().__init__(dataset, timeout=min(timeout, LOOK), **options)
        self._patience = timeout

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        # The processes begin now, not with the first next().
        return _patiently(super().__iter__(), self._patience)


def _patiently(coming: Iterator[T], timeout: float) -> Iterator[T]:
    end = time.monotonic() + timeout
    while True:
        try:
            item = next(coming)
        except StopIteration:
            return
        except RuntimeError as error:
            if "timed out" not in str(error) or time.monotonic() >= end:
                raise
        else:
            yield item
            del item  # before the next one is waited for
            end = time.monotonic() + timeout
