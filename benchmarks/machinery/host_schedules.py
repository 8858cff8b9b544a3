"""The schedules that benchmarks/two_hosts.py compares, and the losses that run by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

import megabatch
from machinery import parallel
from megabatch.similarity import dense

Around = Callable[[int], AbstractContextManager[None]]


class Schedule(NamedTuple):
    """A schedule: a context, given the bytes of all ranks' features; the loss."""

    around: Around = lambda size: nullcontext()
    loss: str = "CLIP"  #: of `LOSSES`
    uneven: bool = False  #: every second rank has a quarter of its rows less
    right: bool = True  #: its result is


def no_grid(around: Around) -> Around:
    """The same by all ranks together, which several hosts would otherwise do as a grid."""

    @contextmanager
    def both(size: int) -> Iterator[None]:
        with parallel.in_columns(0), around(size):
            yield

    return both


#: The schedules that are measured, a line each.
SCHEDULES = {
    "default": Schedule(),
    "gathered": Schedule(no_grid(lambda size: nullcontext())),
    "gathered in rounds": Schedule(no_grid(lambda size: parallel.gathering_up_to(size - 1))),
    "gathered, no overlap": Schedule(no_grid(lambda size: parallel.without_overlap())),
    "no transfers": Schedule(no_grid(lambda size: parallel.without_transfers()), right=False),
    "unequal shards": Schedule(uneven=True),
    "NT-Xent": Schedule(loss="NT-Xent"),
    "NT-Xent, gathered": Schedule(no_grid(lambda size: nullcontext()), loss="NT-Xent"),
    "NT-Xent, unequal shards": Schedule(loss="NT-Xent", uneven=True),
}
#: Schedules whose grid's shape is reported.
GRIDS = ("default", "gathered")


def nt_xent(group: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    loss = megabatch.NTXentLoss(1.0, group=group)
    return lambda x, y, scale: loss(x, y, temperature=1 / scale)


def dense_nt_xent(x: Tensor, y: Tensor, scale: float) -> Tensor:
    both = torch.cat([x, y])
    logits = (scale * both @ both.T).fill_diagonal_(-torch.inf)
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(both)).roll(len(x)))


#: Losses of this library for a group, and as dense expressions.
LOSSES: dict[str, tuple[Callable[[Any], Any], Callable[..., Tensor]]] = {
    "CLIP": (lambda group: megabatch.ClipLoss(group=group), dense.clip_loss),
    "NT-Xent": (nt_xent, dense_nt_xent),
}


def shard(schedule: str, rank: int, rows: int) -> slice:
    """The rows of a rank among `rows` of each."""
    less = rows // 4 if SCHEDULES[schedule].uneven and rank % 2 else 0
    return slice(rank * rows, (rank + 1) * rows - less)
