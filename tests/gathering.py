"""A bound on the features that are gathered at once, while a check runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megabatch.similarity import settings


@contextmanager
def gathering_up_to(size: int) -> Iterator[None]:
    """Gather so many bytes of all ranks' features at once."""
    before = settings.set_gather(size)
    try:
        yield
    finally:
        settings.set_gather(before)
