"""Parts of the work, and values and rows of all ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabatch import ranks
from megabatch.errors import CommunicationError, UsageError
from megabatch.ranks import (
    all_gather_numbers,
    all_gather_rows,
    all_gather_values,
    global_ranks,
    local_range,
    on_all_ranks,
)
from tests.similarity.distributed.processes import World, on_processes


@given(n=st.integers(0, 200), size=st.integers(1, 7), block=st.integers(1, 50))
def test_local_ranges_cover_everything_once_in_whole_blocks(n: int, size: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        covered: list[int] = []
        for rank in range(size):
            patch.setattr(ranks, "rank_and_size", lambda group, rank=rank: (rank, size))
            mine = local_range(n, None, block=block)
            assert mine.start % block == 0 or not len(mine)
            covered += mine
    assert covered == list(range(n))


def test_one_process_has_everything() -> None:
    rows = torch.ones(2, 3)
    assert all_gather_rows(rows, "local") is rows
    assert all_gather_values({"a": [1]}, None) == [{"a": [1]}]
    assert all_gather_numbers("a call", [3, 4], None) == [[3, 4]]
    assert global_ranks(None) == [0]
    assert local_range(5, None) == range(5)
    assert on_all_ranks(lambda: 3, "local") == 3


@on_processes(2)
def test_rows_of_all_ranks(world: World) -> None:
    mine = torch.arange(3 * (world.rank + 2)).reshape(-1, 3)
    both = all_gather_rows(mine, None)
    assert both.tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert all_gather_rows(mine[: 2 * world.rank], None).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert all_gather_rows(mine[:0], None).shape == (0, 3)


@on_processes(3)
def test_values_of_all_ranks_have_any_size(world: World) -> None:
    everyone = range(world.size)
    assert all_gather_values([world.rank, "é"], None) == [[rank, "é"] for rank in everyone]
    # Far more than the buffers of a socket hold: ranks that all send first would wait for ever.
    long = all_gather_values("x" * (400_000 * world.rank), None)
    assert [len(text) for text in long] == [400_000 * rank for rank in everyone]


class Broken:
    def gather(self, mine: bytes) -> list[bytes]:
        raise RuntimeError("rank 1 of the group is gone")


@on_processes(2)
def test_a_lost_rank_is_a_communication_error(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks.control, "channel", lambda group, device: Broken())
        with pytest.raises(
            CommunicationError, match=rf"values .* rank {world.rank}: rank 1 .* gone"
        ):
            all_gather_values(1, None)


@on_processes(2)
def test_more_numbers_than_one_handshake_carries(world: World) -> None:
    table = all_gather_numbers("a call", [world.rank] * 19, None)
    assert table == [[0] * 19, [1] * 19]
    assert all_gather_numbers("a call", [], None) == [[], []]
    with pytest.raises(ValueError, match="expected the same call on all ranks, got rank 0: call 0"):
        all_gather_numbers(f"call {world.rank}", [1], None)


@on_processes(2)
def test_an_error_on_one_rank_is_raised_on_all(world: World) -> None:
    def work() -> int:
        if world.rank == 1:
            raise UsageError("no such file")
        return 3

    with pytest.raises(UsageError, match=r"^rank 1: no such file$"):
        on_all_ranks(work, None)
    assert on_all_ranks(lambda: world.rank, None) == world.rank
