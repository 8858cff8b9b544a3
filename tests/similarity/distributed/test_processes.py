"""A check that fails on several processes is one failure, in whichever way it fails."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.similarity.distributed.processes import Check, Group, World

pytestmark = pytest.mark.concurrency


def passes(world: World) -> None:
    dist.all_reduce(total := torch.tensor(world.rank))
    assert total == sum(range(world.size))


def raises(world: World) -> None:
    if world.rank == 1:
        raise KeyError("an error of its own")
    dist.barrier()


def ends_at_once(world: World) -> None:
    if world.rank == 1:
        os._exit(5)
    dist.barrier()


def hangs(world: World) -> None:
    if world.rank == 1:
        time.sleep(600)
    dist.barrier()


@pytest.mark.parametrize(
    ("check", "reported"),
    [
        (raises, ["KeyError: 'an error of its own'", "in raises"]),
        (ends_at_once, ["exit code 5", "test_processes.ends_at_once"]),
        (hangs, ["test_processes.hangs", "in hangs"]),
    ],
)
def test_a_check_that_fails_on_one_rank(tmp_path: Path, check: Check, reported: list[str]) -> None:
    """It says where and ends its group, which has run other checks before."""
    group = Group(2, "cpu", tmp_path, limit=3)
    for _ in range(2):
        assert group.failures(passes, tmp_path) == []
    begun = time.monotonic()
    failures = group.failures(check, tmp_path)
    assert time.monotonic() - begun < 60  # the other rank does not wait for long
    (failure,) = (words for words in failures if words.startswith("rank 1: "))
    assert all(words in failure for words in reported), failure
    assert not any(process.is_alive() for process in group.processes)
