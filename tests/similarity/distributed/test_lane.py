"""Copies between GPUs: the order of things in threads on the CPU, the copies with `-m gpu`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabatch import ClipLoss, SigLipLoss, similarity
from megabatch.similarity import lane, ring
from megabatch.similarity.lane import Lane, PeerSwap, slot_bytes
from megabatch.similarity.ring import Parcel, Parts, Ring, Route, Visit
from tests.similarity.distributed.processes import free_port


class Flags:
    """Numbers that threads write and wait for."""

    def __init__(self, n: int) -> None:
        self.values = [[0] * (2 * n) for _ in range(n)]
        self.changed = threading.Condition()

    def write(self, rank: int, index: int, number: int) -> None:
        with self.changed:
            self.values[rank][index] = number
            self.changed.notify_all()

    def wait(self, rank: int, index: int, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.values[rank][index] >= number, timeout=20)


class ThreadLane(Lane):
    """A lane whose copies happen at once, as early as the receiver allows."""

    def __init__(self, rank: int, size: int, arenas: list[Tensor], flags: Flags) -> None:
        self.rank, self.n, self.size, self.count = rank, len(arenas), size, 0
        self.arena, self._arenas, self.flags = arenas[rank], arenas, flags

    def swap(self, number: int, to: int, source: int, parts: Sequence[tuple[Tensor, int]]) -> Any:
        self.flags.write(source, self.rank, number)
        self.flags.wait(self.rank, to, number)
        for tensor, start in parts:
            self._arenas[to][start : start + tensor.nbytes] = tensor.view(-1).view(torch.uint8)
        self.flags.write(to, self.n + self.rank, number)
        self.flags.wait(self.rank, self.n + source, number)
        return object()

    def join(self, event: Any) -> None:
        pass


def rings(sizes: list[int], slot: int) -> list[Ring]:
    """One for each thread."""
    n = len(sizes)
    arenas = [torch.full((256 + 2 * slot,), 255, dtype=torch.uint8) for _ in sizes]
    flags, made = Flags(n), []
    for rank in range(n):
        one = object.__new__(Ring)
        one.rank, one.n, one.sizes, one.operation = rank, n, sizes, "test"
        one.starts = [sum(sizes[:r]) for r in range(n + 1)]
        own = ThreadLane(rank, slot, arenas, flags)
        one._lane_for = lambda features, rows, own=own: own  # type: ignore[method-assign,misc]
        made.append(one)
    return made


@pytest.mark.parametrize("route", [ring.full, ring.rows_only, ring.symmetric])
@pytest.mark.parametrize("sizes", [[5, 5], [7, 3, 4], [4, 0, 9, 1], [3, 3, 3, 3, 3]])
@pytest.mark.parametrize("rows", [2, 4, 16])
def test_every_piece_arrives_and_every_sum_comes_home(
    route: Any, sizes: list[int], rows: int
) -> None:
    n, width = len(sizes), 3
    generator = torch.Generator().manual_seed(0)
    shards = [torch.rand(size, width, generator=generator) for size in sizes]
    numbers = [torch.rand(2, size, generator=generator) for size in sizes]
    circles = rings(sizes, slot_bytes(4 * (2 * width + 2), rows))
    met: list[list[tuple[int, int]]] = [[] for _ in sizes]
    sums = [torch.zeros(size, width) for size in sizes]
    faults: list[BaseException] = []

    def walk(rank: int) -> None:
        trip: Route = route(n)

        def visit(piece: Visit) -> None:
            assert piece.owner is not None
            features, pull = piece.cargo
            assert features is not None
            assert pull is not None
            torch.testing.assert_close(features, shards[piece.owner][piece.rows], rtol=0, atol=0)
            torch.testing.assert_close(pull, numbers[piece.owner][:, piece.rows], rtol=0, atol=0)
            met[rank] += [(piece.owner, row) for row in range(piece.rows.start, piece.rows.stop)]
            if piece.part is not None:
                piece.part.add_((rank + 1) * features)

        try:
            parcels = [Parcel(shards[rank]), Parcel(numbers[rank], dim=1)]
            parts = Parts(lambda size: torch.zeros(size, width))
            for home, total in circles[rank]._in_turn(parcels, visit, trip, rows, parts):
                sums[rank][home] += total
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=walk, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults, faults[0]
    for rank in range(n):
        trip = route(n)
        owners = [(rank - step) % n for step in range(trip.steps)]
        assert sorted(met[rank]) == sorted((o, row) for o in owners for row in range(sizes[o]))
        weight = sum((rank + step) % n + 1 for step in trip.carried)
        torch.testing.assert_close(sums[rank], weight * shards[rank])


def test_an_exchange_larger_than_its_half_is_noticed() -> None:
    own = ThreadLane(0, 256, [torch.empty(1024, dtype=torch.uint8)] * 2, Flags(2))
    swap = PeerSwap(own, 1, 1, "test")
    swap.add(torch.zeros(64), 64)
    with pytest.raises(AssertionError):
        swap.add(torch.zeros(1), 1)


def test_no_lane_on_the_cpu() -> None:
    assert lane.lane_of(None, torch.device("cpu"), 1) is None  # type: ignore[arg-type]
    assert lane.held_bytes() == 0


# --- GPUs -----------------------------------------------------------------------------------------


def _gradients(loss: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    inputs = [t.clone().requires_grad_() for t in (x, y)]
    scalars = [torch.tensor(v, device=x.device, requires_grad=True) for v in (14.0, -9.0)]
    value = loss(*inputs, *scalars)
    value.backward()
    return [value.detach(), *(t.grad for t in (*inputs, *scalars) if t.grad is not None)]


def _compare(rank: int, n: int, port: int) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=n)
    ring.set_gather(0)
    ring.set_piece(300 * 64 * 2)
    generator = torch.Generator(device).manual_seed(rank)
    for rows in (1000, 1000 + 37 * rank, 500 * rank):
        x, y = (torch.randn(rows, 64, device=device, generator=generator) for _ in range(2))
        for loss in (ClipLoss(), SigLipLoss()):
            found = {}
            for copies in (True, False):
                before = lane.set_peer_copies(copies)
                half = [torch.nn.functional.normalize(t, dim=1).bfloat16() for t in (x, y)]
                for _ in range(3):  # one behind the other, no look at the results in between
                    found[copies] = _gradients(loss, *half)
                assert (lane.held_bytes() > 0) or not copies
                lane.set_peer_copies(before)
            for one, other in zip(found[True], found[False], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
        best = similarity.topk(x.bfloat16(), y.bfloat16(), 5)
        lane.set_peer_copies(False)
        other = similarity.topk(x.bfloat16(), y.bfloat16(), 5)
        lane.set_peer_copies(True)
        assert all(bool((a == b).all()) for a, b in zip(best, other, strict=True))
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_copies_between_gpus_change_no_result() -> None:
    n = min(4, torch.cuda.device_count())
    torch.multiprocessing.spawn(_compare, args=(n, free_port()), nprocs=n)
