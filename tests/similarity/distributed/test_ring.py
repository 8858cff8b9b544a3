"""The ring's schedule: which blocks each rank computes, what it sends, and when."""

from __future__ import annotations

import pytest
import torch

from megabatch import similarity
from megabatch.similarity import settings
from megabatch.similarity.distributed import comm, control, gathered, ring, schedule
from megabatch.similarity.distributed.comm import P2PExchange
from megabatch.similarity.distributed.ranks import Ranks
from megabatch.similarity.reductions.softmax_tiles import SoftmaxTiles
from tests.similarity.distributed.processes import World, on_processes
from tests.similarity.distributed.transfers import bytes_sent, recorded, ring_in_chunks_of


@pytest.mark.parametrize("n", range(1, 10))
def test_each_pair_of_ranks_is_computed_once(n: int) -> None:
    blocks: dict[str, list[tuple[int, int]]] = {"full": [], "rows": []}
    for rank in range(n):
        for name, route in (("full", schedule.full(n)), ("rows", schedule.rows_only(n))):
            blocks[name] += [(rank, (rank - step) % n) for step in range(route.steps)]
    all_pairs = [(i, j) for i in range(n) for j in range(n)]
    assert all(sorted(pairs) == all_pairs for pairs in blocks.values())
    assert schedule.full(n).carried == range(n)
    assert not schedule.rows_only(n).carried


@pytest.mark.parametrize("size", [0, -1])
def test_a_chunk_of_no_bytes(size: int) -> None:
    with pytest.raises(ValueError, match=f"size: expected at least 1 byte, got {size}"):
        settings.set_chunk(size)


@pytest.mark.parametrize("size", ["big", 1.5, True])
def test_a_chunk_of_a_wrong_type(size: object) -> None:
    with pytest.raises(TypeError, match="size: expected a number of bytes"):
        settings.set_chunk(size)  # type: ignore[arg-type]


def test_rows_of_a_chunk() -> None:
    assert ring.chunk_rows(torch.empty(0, 768, dtype=torch.bfloat16)) == 32768
    assert ring.chunk_rows(torch.empty(0, 1024, dtype=torch.bfloat16)) == 16384
    assert ring.chunk_rows(torch.empty(0, 1024, dtype=torch.float64)) == 6144
    with ring_in_chunks_of(1):
        assert ring.chunk_rows(torch.empty(0, 768)) == 1


@on_processes(3)
def test_bytes_sent(world: World) -> None:
    """Bytes per row: features 2 d, states 8 or 24, upstream 8 or 20, gradients 4 d."""
    rows, d = 7, 10
    features, gradient, ids = rows * d * 2, rows * d * 4, rows * 8
    x, y = (torch.randn(rows, d).bfloat16().requires_grad_() for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, ring_in_chunks_of(1 << 20):
        sent = bytes_sent(patch)
        a, b = similarity.logsumexp(x, y)
        state = rows * 8
        assert sent == [features, features + state, state, state]
        sent.clear()
        (a.sum() + b.sum()).backward()
        upstream = rows * 8
        assert sent == [features + upstream, features + upstream + gradient, gradient, gradient]
        sent.clear()
        numbers = torch.arange(rows)
        r, c = similarity.split_logsumexp(x, y, ids=(numbers, numbers))
        state = rows * 24
        assert sent == [features + ids, features + ids + state, state, state]
        sent.clear()
        (r.negative.sum() + c.positive.sum()).backward()
        upstream = ids + rows * 20
        assert sent == [features + upstream, features + upstream + gradient, gradient, gradient]
        sent.clear()
        similarity.logsumexp(x, y, sides="rows")[0].sum().backward()
        assert sent == [features] * 2 + [features, features + gradient, gradient, gradient]
        sent.clear()
        similarity.split_logsumexp(x)[0].negative.sum().backward()
        state = rows * 8
        assert sent == [features, state, features + upstream - ids - rows * 12, gradient]


@on_processes(2)
def test_transfers_overlap_the_computation(world: World) -> None:
    x = torch.randn(3, 4)
    for overlap in (True, False):
        events: list[str] = []
        with pytest.MonkeyPatch.context() as patch, ring_in_chunks_of(1 << 20):
            for owner, name in (
                (P2PExchange, "start"),
                (P2PExchange, "wait"),
                (SoftmaxTiles, "forward"),
            ):
                patch.setattr(owner, name, recorded(events, name, getattr(owner, name)))
            before = settings.set_overlap(overlap)
            similarity.logsumexp(x, x, sides="rows")
            settings.set_overlap(before)
        expected = ["start", "forward", "wait"] if overlap else ["start", "wait", "forward", "wait"]
        assert events == expected * 2


@pytest.mark.parametrize("size", [0, 5, None])
def test_the_bound_of_gathering(size: int | None) -> None:
    before = settings.set_gather(size)
    assert settings.set_gather(before) == (settings.DEFAULT_GATHER if size is None else size)
    for wrong, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="size: expected"):
            settings.set_gather(wrong)  # type: ignore[arg-type]
    assert settings.set_gather(None) == before


@pytest.mark.parametrize("columns", [0, 3, None])
def test_the_setting_of_the_grid(columns: int | None) -> None:
    before = settings.set_grid(columns)
    assert settings.set_grid(before) == columns
    for wrong, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="columns: expected"):
            settings.set_grid(wrong)  # type: ignore[arg-type]
    assert settings.set_grid(None) == before


@pytest.mark.parametrize(
    ("limit", "steps"),
    [(10**6, [900]), (900, [900]), (899, [128] * 7 + [4]), (512, [128] * 7 + [4])],
)
def test_rounds_are_whole_tiles_within_the_bound(limit: int, steps: list[int]) -> None:
    one = object.__new__(Ranks)
    one.n, one.sizes, one._several_hosts = 2, [900, 900], False
    features = torch.empty(900, 4)
    before = settings.set_gather(2 * limit * 16)
    found = one._gathered_rounds(features, schedule.full(2))
    assert [rows.stop - rows.start for rows in found] == steps
    assert bool(one._gathered_rounds(features, schedule.consecutive(2))) == (len(steps) == 1)
    settings.set_gather(2 * 511 * 16)  # a quarter of it is less than a tile
    assert one._gathered_rounds(features, schedule.full(2)) == []
    settings.set_gather(before)


def test_rounds_are_even() -> None:
    before = settings.set_gather(16 * 4 * 300)
    assert gathered.round_rows(1200, 16) == 1200
    assert gathered.round_rows(1300, 16) == 256  # six of up to 256, of the 300 that are allowed
    settings.set_gather(16 * 4 * 1000)
    assert gathered.round_rows(4100, 16) == 896  # five of up to 896: not four and a small one
    settings.set_gather(16 * 4 * 100)  # a round has less than a tile of each rank
    assert gathered.round_rows(1000, 16) == 0
    assert gathered.round_rows(1000, 16, several_hosts=True) == 64
    settings.set_gather(0)
    assert gathered.round_rows(1000, 16, several_hosts=True) == 0
    settings.set_gather(before)


@on_processes(2)
def test_the_watchdog_is_told_of_every_transfer(world: World) -> None:
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    scale = torch.tensor(2.0, requires_grad=True)
    other, me = 1 - world.rank, f"rank {world.rank}"
    call, back = "logsumexp", "logsumexp, backward"
    step = f"{me} (to rank {other}, from rank {other})"
    found = "all ranks' results"
    for bound, expected in (
        (
            None,
            [
                f"{call}: gathering, {me}",
                f"{call}: exchanging {found}, {me}",
                f"{back}: gathering, {me}",
                f"{back}: adding up {found}, {me}",
                f"{back}: all-reduce, {me}",
            ],
        ),
        (
            0,
            [
                f"{call}: ring step 1 of 2, {step}",
                f"{call}: ring step 2 of 2, {step}",
                f"{call}: ring's last step, to the owner, {step}",
                f"{back}: ring step 1 of 2, {step}",
                f"{back}: ring step 2 of 2, {step}",
                f"{back}: ring's last step, to the owner, {step}",
                f"{back}: all-reduce, {me}",
            ],
        ),
    ):
        tracked: list[str] = []
        before = settings.set_gather(bound)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                control, "track", lambda group, like, what, tracked=tracked: tracked.append(what)
            )
            sum(map(torch.sum, similarity.logsumexp(x, y, scale))).backward()
        settings.set_gather(before)
        assert tracked == expected


@on_processes(3)
def test_large_unequal_and_symmetric_shards_use_the_ring(world: World) -> None:
    x = torch.randn(7, 10)
    uneven = torch.randn(6 + (world.rank > 0), 10)
    before = settings.set_gather(3 * x.nbytes - 1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gathered, "all_gather", lambda *arguments: pytest.fail("gathered"))
            similarity.logsumexp(x, x)
            settings.set_gather(None)
            similarity.logsumexp(x, uneven)
            similarity.split_logsumexp(x)
    finally:
        settings.set_gather(before)


@on_processes(2)
def test_ranks_whose_bounds_differ(world: World) -> None:
    x = torch.randn(3, 4)
    before = settings.set_gather(100 + world.rank)
    with pytest.raises(ValueError, match=r"gathered up to 100 bytes.*gathered up to 101 bytes"):
        similarity.logsumexp(x, x)
    settings.set_gather(before)


@on_processes(2, 4)
def test_one_handshake_per_loss(world: World) -> None:
    from megabatch import ClipLoss, SigLipLoss

    agree, calls = comm.agree, []
    x, y = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "agree", lambda *words: (calls.append(words), agree(*words))[1])
        ClipLoss()(x, y, 2.0).backward()
        SigLipLoss()(x, y, 2.0, -1.0).backward()
    assert len(calls) == 2
