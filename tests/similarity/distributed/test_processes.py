"""A check that fails on several processes is one failure, in whichever way it fails."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.similarity.distributed.processes import Check, Group, Groups, World

pytestmark = pytest.mark.concurrency


def passes(world: World) -> None:
    dist.all_reduce(total := torch.tensor(world.rank))
    assert total == sum(range(world.size))
    (world.folder / f"{world.rank}").write_text(str(os.getpid()))


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


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    """Groups of this module alone, so that its failures do not end those of the session."""
    made = Groups(tmp_path_factory.mktemp("groups"))
    yield made
    made.end()


@pytest.mark.parametrize(
    ("check", "rank", "reported"),
    [
        (raises, 1, ["KeyError: 'an error of its own'", "in raises"]),
        (ends_at_once, 1, ["exit code 5", "test_processes.ends_at_once"]),
    ],
)
def test_one_failure_is_one_failure(
    groups: Groups, tmp_path: Path, check: Check, rank: int, reported: list[str]
) -> None:
    def pids() -> set[str]:
        assert groups.failures(passes, 2, "cpu", tmp_path) == []
        return {(tmp_path / str(rank)).read_text() for rank in range(2)}

    before = pids()
    assert pids() == before  # one group serves many checks
    begun = time.monotonic()
    failures = groups.failures(check, 2, "cpu", tmp_path)
    assert time.monotonic() - begun < 60  # the other rank does not wait for long
    assert failures[0].startswith(f"rank {rank}: ")
    assert all(words in failures[0] for words in reported), failures[0]
    assert not before & pids()


def test_a_check_that_hangs_is_ended_and_says_where(tmp_path: Path) -> None:
    group = Group(2, "cpu", tmp_path, limit=1)
    first, second = sorted(group.failures(hangs, tmp_path))
    assert first.startswith("rank 0: ")
    assert second.startswith("rank 1: ")
    assert "test_processes.hangs" in second
    assert "in hangs" in second
    assert not any(process.is_alive() for process in group.processes)


def test_a_process_that_ends_after_its_check_fails_the_next(tmp_path: Path) -> None:
    group = Group(2, "cpu", tmp_path)
    assert group.failures(passes, tmp_path) == []
    group.processes[1].kill()
    group.processes[1].join()
    failures = group.failures(passes, tmp_path)
    assert failures[0].startswith("rank 1: ended with exit code -9 in ")
    assert "before: tests.similarity.distributed.test_processes.passes)" in failures[0]
