"""Between machines, a timeout names the ranks that did not come."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megabatch import similarity
from megabatch.errors import CommunicationError
from megabatch.similarity.distributed import control
from megabatch.similarity.distributed.waiting import WaitingRanks, ranges
from megabatch.similarity.eager_softmax import SoftmaxTiles
from tests.similarity.distributed.processes import join, new_store, start

SIZE = 4
TIMEOUT = 4


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([3], "3"), ([2, 1], "1, 2"), ([0, 1, 2, 5, 7, 8, 9, 10], "0 to 2, 5, 7 to 10")],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert ranges(ranks) == words


def worker(rank: int, size: int, port: int, folder: Path, absent: list[int], where: str) -> None:
    """As if each rank were on a machine of its own: absent ones come late, then not at all.

    where: "handshake", or "transfer", before which they stop.
    """
    join(rank, size, port)
    control.sockets = lambda *_: None  # type: ignore[assignment]
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    similarity.logsumexp(x, y, group=group)
    if rank in absent:
        time.sleep(TIMEOUT / 4)  # the others wait, and say so
    similarity.logsumexp(x, y, group=group)

    def stop(*_: object) -> None:
        until = time.monotonic() + 60
        while len(list(folder.iterdir())) < size - len(absent) and time.monotonic() < until:
            time.sleep(0.1)
        os._exit(0)

    if rank in absent:
        if where == "transfer":
            SoftmaxTiles.forward = stop  # type: ignore[assignment,method-assign]
            similarity.logsumexp(x, y, group=group)
        stop()
    try:
        similarity.logsumexp(x, y, group=group)
    except CommunicationError as error:
        (folder / str(rank)).write_text(str(error))
    os._exit(0)


@pytest.mark.parametrize(
    ("absent", "where", "words"),
    [([1], "handshake", "rank 1"), ([2, 3], "transfer", "ranks 2, 3")],
)
def test_a_timeout_names_the_missing_ranks(
    tmp_path: Path, absent: list[int], where: str, words: str
) -> None:
    for process in start(SIZE, worker, tmp_path, absent, where):
        process.join(120)
    said = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    assert said.keys() == set(range(SIZE)) - set(absent)
    for message in said.values():
        assert message.endswith(f"; missing in this call: {words} of the group"), message


class Stuck:
    """A collective that fails after a while."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta | None = None) -> None:
        raise RuntimeError("timed out")


def waited(store: dist.Store, size: int) -> str:
    waiting = WaitingRanks(store, 0, size, timedelta(seconds=0.1))
    with pytest.raises(RuntimeError) as error:
        waiting.wait(Stuck())  # type: ignore[arg-type]
    return str(error.value)


def test_the_list_of_a_rank_alone() -> None:
    assert waited(new_store(), 2) == "timed out; missing in this call: rank 1 of the group"
    assert waited(new_store(), 1).startswith("timed out; all ranks of the group wait: ")


class Gone:
    """A store out of reach."""

    def clone(self) -> dist.Store:
        raise RuntimeError("no connection")


def test_a_store_that_does_not_answer() -> None:
    message = waited(Gone(), 2)  # type: ignore[arg-type]
    assert message.startswith("timed out; the group's store, ")
    assert message.endswith(", does not answer")
