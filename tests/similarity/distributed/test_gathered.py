"""Collectives of the gathered schedule: which, in what order, and how much is in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megabatch import similarity
from megabatch.similarity import engine, settings
from megabatch.similarity.distributed import gathered
from megabatch.similarity.distributed.comm import P2PExchange, Pending
from megabatch.similarity.reductions.sigmoid_tiles import SigmoidTiles
from megabatch.similarity.reductions.softmax_tiles import SoftmaxTiles
from tests.similarity.distributed.processes import World, on_processes
from tests.similarity.distributed.transfers import (
    gathered_in_rounds,
    recorded,
    recorded_transfers,
    transfer_copies,
)


@on_processes(3)
def test_small_shards_of_one_size_are_gathered(world: World) -> None:
    x, y = (torch.randn(7, 10, requires_grad=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        done = recorded_transfers(patch)
        rows, columns = similarity.logsumexp(x, y)
        assert done == ["all_gather", "all_to_all"]
        done.clear()
        (rows.sum() + columns.sum()).backward()
        # The features, and the upstream of the columns.
        assert done == ["all_gather", "all_gather", "reduce_scatter"]
        done.clear()
        similarity.softplus_sum(x, y, 1.0, 0.0).backward()
        assert done == ["all_gather", "reduce_scatter"]
        done.clear()
        similarity.topk(x.detach(), y.detach(), 2)
        assert done == ["all_gather"]


@on_processes(2)
def test_the_backward_pass_uses_the_gathered_features(world: World) -> None:
    x, y = (torch.randn(7, 12, requires_grad=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        done = recorded_transfers(patch)
        rows, columns = similarity.logsumexp(x, y)
        (rows.sum() + columns.sum()).backward()
        # The backward pass gathers the upstream of the columns alone.
        assert done == ["all_gather", "all_to_all", "all_gather", "reduce_scatter"]


@on_processes(2)
def test_a_smaller_bound_before_the_backward_pass(world: World) -> None:
    """Features that the forward pass gathered at once are then gathered again, in rounds."""
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    found = []
    for bound in (settings.DEFAULT_GATHER, 2 * 2 * 12 * 4, 0):
        rows, columns = similarity.logsumexp(x, y)
        with gathered_in_rounds(bound):
            found.append(torch.autograd.grad(rows.sum() + columns.sum(), (x, y)))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)


@on_processes(2)
def test_transfers_of_a_round_overlap_the_computation_of_others(world: World) -> None:
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    for overlap in (True, False):
        switched = settings.set_overlap(overlap)
        with gathered_in_rounds(2 * 2 * 12 * 4) as patch:  # three
            rows, columns = similarity.logsumexp(x, y)
            done = recorded_transfers(patch)
            patch.setattr(engine, "add_strip", recorded(done, "compute", engine.add_strip))
            (rows.sum() + columns.sum()).backward()
        settings.set_overlap(switched)
        steps = [step for i, step in enumerate(done) if i == 0 or step != done[i - 1]]
        round_ = ["all_gather", "compute", "reduce_scatter"]
        assert steps == ([*round_, *round_, *round_[1:]] if overlap else round_ * 3)


@on_processes(2)
def test_own_columns_are_computed_while_the_others_arrive(world: World) -> None:
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    for own_first, overlap in ((6, True), (6, False), (7, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gathered, "LARGE", own_first)
            events: list[str] = []
            patch.setattr(
                SoftmaxTiles, "forward", recorded(events, "compute", SoftmaxTiles.forward)
            )
            patch.setattr(Pending, "wait", recorded(events, "wait", Pending.wait))
            switched = settings.set_overlap(overlap)
            similarity.logsumexp(x, y)
            settings.set_overlap(switched)
        hidden = ["compute", "wait", "compute"]
        assert events == (hidden if own_first == 6 and overlap else ["wait", "compute"])


@on_processes(2)
def test_deferred_product_runs_while_gradients_are_transferred(world: World) -> None:
    """Each is computed before the next chunk, the last one during the last transfer."""
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    add_strip, write_grad = engine.add_strip, SoftmaxTiles.write_grad

    def recording_deferred(done: list[str]) -> Callable[..., None]:
        def compute(*arguments):  # type: ignore[no-untyped-def]
            deferred = arguments[-1]
            assert deferred == []
            add_strip(*arguments)
            done.append("compute")
            (product,) = deferred
            deferred[:] = [lambda: done.append("deferred") or product()]

        return compute

    def recording_side(done: list[str]) -> Callable[..., Any]:
        def write(self, total, side, *others):  # type: ignore[no-untyped-def]
            done.append(side)
            return write_grad(self, total, side, *others)

        return write

    once = ["all_gather", "wait", "compute", "reduce_scatter"]
    end = ["deferred", "x", "wait", "y"]
    for bound, large, expected in (
        (settings.DEFAULT_GATHER, 6, [*once, *end]),
        (settings.DEFAULT_GATHER, 7, [*once, *end]),
        (2 * 2 * 12 * 4, 7, None),  # three rounds
        (
            0,
            7,
            [
                "exchange",
                "compute",
                "wait",
                "exchange",
                "deferred",
                "compute",
                "wait",
                "exchange",
                *end,
            ],
        ),
    ):
        with gathered_in_rounds(bound) as patch:
            patch.setattr(gathered, "LARGE", large)
            rows, columns = similarity.logsumexp(x, y)
            done = recorded_transfers(patch)
            patch.setattr(P2PExchange, "wait", recorded(done, "wait", P2PExchange.wait))
            patch.setattr(Pending, "wait", recorded(done, "wait", Pending.wait))
            patch.setattr(engine, "add_strip", recording_deferred(done))
            patch.setattr(SoftmaxTiles, "write_grad", recording_side(done))
            (rows.sum() + columns.sum()).backward()
        if expected is None:
            work = [step for step in done if step in ("compute", "deferred")]
            assert work == ["compute", "deferred"] * 6  # own columns, then the other rank's
            assert done[-5:] == ["reduce_scatter", *end]
        else:
            assert done == expected


class Alive:
    """Counts the tensors of a given size that a function returned and that are still in memory."""

    def __init__(self, patch: pytest.MonkeyPatch, holder: object, name: str, numbers: int) -> None:
        self.at_each: list[int] = []  #: their number whenever one more was made
        self._storages: list[StorageWeakRef] = []
        make = getattr(holder, name)

        def recording_storage(*arguments: Any) -> Any:
            made = make(*arguments)
            tensor = made[0] if isinstance(made, tuple) else made
            if tensor.numel() == numbers:
                self.at_each.append(self.now())
                self._storages.append(StorageWeakRef(tensor.untyped_storage()))
            return made

        patch.setattr(holder, name, recording_storage)

    def now(self) -> int:
        return sum(not storage.expired() for storage in self._storages)


@on_processes(2)
def test_memory_holds_features_of_three_rounds_and_gradients_of_two(world: World) -> None:
    """planning.loss counts on it."""
    x, y = (torch.randn(12, 12, requires_grad=True) for _ in range(2))
    one = torch.tensor(1.0)
    for tiles, sweeps, loss in (
        (SoftmaxTiles, 2, lambda: sum(map(torch.sum, similarity.logsumexp(x, y)))),
        (SigmoidTiles, 1, lambda: similarity.softplus_sum(x, y, one, one)),
    ):
        with gathered_in_rounds(2 * 2 * 12 * 4) as patch:  # six
            transfer_copies(patch)
            features = Alive(patch, gathered, "all_gather", 4 * 12)
            gradients = Alive(patch, tiles, "new_total", 4 * 12)
            loss().backward()
        assert features.at_each == [0, 1, *[2] * 4] * sweeps
        assert gradients.at_each == [0, *[1] * 5]


@on_processes(2)
def test_memory_holds_one_round_when_the_gradient_of_x_is_written(world: World) -> None:
    """planning.loss counts on it."""
    x, y = (torch.randn(12, 12, requires_grad=True) for _ in range(2))
    write_grad, found = SoftmaxTiles.write_grad, []
    with gathered_in_rounds(2 * 2 * 12 * 4) as patch:  # six
        transfer_copies(patch)
        features = Alive(patch, gathered, "all_gather", 4 * 12)
        gradients = Alive(patch, SoftmaxTiles, "new_total", 4 * 12)

        def write(self, total, side, *others):  # type: ignore[no-untyped-def]
            if side == "x":
                found.append((features.now(), gradients.now()))
            return write_grad(self, total, side, *others)

        patch.setattr(SoftmaxTiles, "write_grad", write)
        sum(map(torch.sum, similarity.logsumexp(x, y))).backward()
    assert found == [(1, 1)]
