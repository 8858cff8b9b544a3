"""The schedule of a group: which blocks each rank computes, what travels, when, and in how much
memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partialmethod
from itertools import accumulate, combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megabatch import ClipLoss, SigLipLoss, similarity
from megabatch.similarity import settings
from megabatch.similarity.distributed import comm, layout, schedule
from megabatch.similarity.distributed.comm import Pending
from megabatch.similarity.eager import SoftmaxTiles
from megabatch.similarity.eager_sigmoid import SigmoidTiles
from tests.process_state import changed
from tests.similarity.distributed.processes import World, on_processes
from tests.similarity.distributed.transfers import (
    recorded,
    recorded_transfers,
    transfer_copies,
    transferring,
)

ROW = 12 * 4  #: bytes of 12 float32 numbers


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 3, None])
@pytest.mark.parametrize(
    ("setter", "name", "default"),
    [(settings.set_gather, "size", settings.DEFAULT_GATHER), (settings.set_grid, "columns", None)],
)
def test_setters_return_the_previous_value(
    setter: Callable[[Any], Any], name: str, default: int | None, value: int | None
) -> None:
    before = setter(value)
    assert setter(before) == (default if value is None else value)
    for wrong, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"{name}: expected"):
            setter(wrong)
    assert setter(None) == before


@pytest.mark.parametrize(
    ("limit", "size", "rows"),
    [
        (900 * 16, 900, 900),
        (4 * 300 * 16, 1300, 256),  # six rounds of up to 256, of the 300 that are allowed
        (4 * 1000 * 16, 4100, 896),  # five of up to 896: not four and a small one
        (4 * 100 * 16, 1000, 64),  # less than a tile of each rank
        (0, 1000, 1),
        (0, 0, 1),
    ],
)
def test_rounds_are_even_and_of_whole_tiles(limit: int, size: int, rows: int) -> None:
    with changed("gather", limit):
        assert schedule.round_rows(size, 16) == rows


@on_processes(2)
def test_one_handshake_per_loss(world: World) -> None:
    agree, calls = comm.agree, []
    x, y = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "agree", lambda *words: (calls.append(words), agree(*words))[1])
        ClipLoss()(x, y, 2.0).backward()
        SigLipLoss()(x, y, 2.0, -1.0).backward()
    assert len(calls) == 2


# --- x against itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 8))
def test_each_pair_of_rows_is_computed_once(n: int) -> None:
    """Of shards of equal size, all ranks compute as much: (n - 1) / 2 blocks of 16 pairs."""
    for sizes in ([4] * n, [(5 * k + 1) % 4 for k in range(n)]):
        starts = list(accumulate(sizes, initial=0))
        pairs: list[Counter[Any]] = [Counter() for _ in range(n)]
        for rank, counts in enumerate(pairs):
            for owner, rows, skipped in schedule.half(rank, sizes):
                for i, j in product(range(rows), range(skipped, sizes[owner])):
                    counts[frozenset((starts[rank] + i, starts[owner] + j))] += 1
        owners = [rank for rank, size in enumerate(sizes) for _ in range(size)]
        apart = [p for p in combinations(range(sum(sizes)), 2) if owners[p[0]] != owners[p[1]]]
        assert sum(pairs, Counter()) == Counter(map(frozenset, apart))
        if sizes == [4] * n:
            assert [counts.total() for counts in pairs] == [8 * (n - 1)] * n


# --- which transfers ------------------------------------------------------------------------------


@on_processes(3)
def test_transfers(world: World) -> None:
    x, y, wide = (torch.randn(7, d, requires_grad=True) for d in (10, 10, 12))
    uneven = torch.randn(6 + (world.rank > 0), 10, requires_grad=True)
    upstream = ["all_gather", "reduce_scatter"]
    with pytest.MonkeyPatch.context() as patch:
        done = recorded_transfers(patch)
        for one, other, features in (
            (x, y, ["all_gather"]),
            (x, uneven, ["all_gather"]),
            (wide, wide, []),  # whole lines: the gathered features are saved
            (wide, None, []),
        ):
            if other is None:
                total = similarity.split_logsumexp(one)[0].negative.sum()
            else:
                total = sum(map(torch.sum, similarity.logsumexp(one, other)))
            assert done == ["all_gather", "all_to_all"]
            done.clear()
            total.backward()
            assert done == [*features, *upstream]  # of the columns
            done.clear()
        similarity.softplus_sum(x, y, 1.0, 0.0).backward()
        assert done == upstream
        done.clear()
        similarity.topk(x.detach(), y.detach(), 2)
        assert done == ["all_gather"]


# --- when -----------------------------------------------------------------------------------------


def tiles_recorded(
    patch: pytest.MonkeyPatch, log: list[str], wait: bool = True, **names: str
) -> None:
    """Write when a rank waits, and when it begins to compute what `names` of the tiles' methods."""
    if wait:
        patch.setattr(Pending, "wait", recorded(log, "wait", Pending.wait))
    for method, name in names.items():
        patch.setattr(SoftmaxTiles, method, recorded(log, name, getattr(SoftmaxTiles, method)))


@on_processes(2)
def test_transfers_of_a_round_overlap_the_computation_of_others(world: World) -> None:
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    with transferring(rounds=2 * 2 * ROW) as patch:  # three
        rows, columns = similarity.logsumexp(x, y)
        assert columns is not None
        done = recorded_transfers(patch)
        tiles_recorded(patch, done, add_strip="compute", wait=False)
        (rows.sum() + columns.sum()).backward()
    steps = [step for i, step in enumerate(done) if i == 0 or step != done[i - 1]]
    round_ = ["all_gather", "compute", "reduce_scatter"]
    assert steps == [*round_, *round_, *round_[1:]]


@on_processes(2)
def test_own_columns_are_computed_while_the_others_arrive(world: World) -> None:
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    for own_first in (6, 7):
        events: list[str] = []
        with transferring(own_first=own_first) as patch:
            tiles_recorded(patch, events, forward="compute")
            similarity.logsumexp(x, y)
        # At last it waits for the columns' results.
        assert events == [*["compute"] * (own_first == 6), "wait", "compute", "wait"]
    with transferring() as patch:  # of x against itself, the own triangle comes first
        events = recorded_transfers(patch)
        tiles_recorded(patch, events, forward="forward", gradient_block="gradient")
        total = similarity.split_logsumexp(x)[0].negative.sum()
        assert events[:4] == ["all_gather", "forward", "wait", "forward"]
        events.clear()
        total.backward()
        assert events[:4] == ["all_gather", "gradient", "wait", "gradient"]


@on_processes(2)
def test_the_gradient_of_x_is_written_during_the_last_transfer(world: World) -> None:
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    rows, columns = similarity.logsumexp(x, y)
    assert columns is not None
    with transferring() as patch:
        done = recorded_transfers(patch)
        tiles_recorded(patch, done, write_grad="write")
        (rows.sum() + columns.sum()).backward()
    assert done[-3:] == ["write", "wait", "write"]


# --- memory ---------------------------------------------------------------------------------------


class Alive:
    """Counts the tensors of a given size that a function returned and that are still in memory."""

    def __init__(self, patch: pytest.MonkeyPatch, holder: object, name: str, numbers: int) -> None:
        self.at_each: list[int] = []  #: their number whenever one more was made
        self._storages: list[StorageWeakRef] = []
        make: Callable[..., Any] = getattr(holder, name)

        def recording_storage(*arguments: Any, **options: Any) -> Any:
            made = make(*arguments, **options)
            tensor = made.result if isinstance(made, Pending) else made
            if tensor.numel() == numbers:
                self.at_each.append(self.now())
                self._storages.append(StorageWeakRef(tensor.untyped_storage()))
            return made

        patch.setattr(holder, name, recording_storage)

    def now(self) -> int:
        return sum(not storage.expired() for storage in self._storages)


@on_processes(2)
def test_memory_holds_features_of_three_rounds_and_gradients_of_two(world: World) -> None:
    """planning.loss counts on it, and on the gradients of one round when that of x is written."""
    x, y = (torch.randn(12, 12, requires_grad=True) for _ in range(2))
    one, write_grad = torch.tensor(1.0), SoftmaxTiles.write_grad
    for tiles, sweeps, loss in (
        (SoftmaxTiles, 2, lambda: sum(map(torch.sum, similarity.logsumexp(x, y)))),
        (SigmoidTiles, 1, lambda: similarity.softplus_sum(x, y, one, one)),
    ):
        at_write: list[tuple[int, int]] = []
        with transferring(rounds=2 * 2 * ROW) as patch:  # six
            transfer_copies(patch)
            features = Alive(patch, layout, "all_gather", 4 * 12)
            gradients = Alive(patch, tiles, "new_total", 4 * 12)

            def write(
                tiles: Any, total: Tensor, side: str, *rest: Any, counts: Any, at: Any
            ) -> Any:
                at.extend([tuple(each.now() for each in counts)] if side == "x" else [])
                return write_grad(tiles, total, side, *rest)

            recording = partialmethod(write, counts=(features, gradients), at=at_write)
            patch.setattr(SoftmaxTiles, "write_grad", recording)
            loss().backward()
        assert features.at_each == [0, 1, *[2] * 4] * sweeps
        assert gradients.at_each == [0, *[1] * 5]
        assert at_write == [(0, 1)] * (sweeps - 1)
