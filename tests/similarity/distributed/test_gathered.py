"""What ranks with shards of one size do together, when, and what of it is in memory."""

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
from megabatch.similarity.reductions.sigmoid import SigmoidTiles
from megabatch.similarity.reductions.softmax import SoftmaxTiles
from tests.similarity.distributed.processes import World, on_processes
from tests.similarity.distributed.travel import by_copies, in_rounds, noting, recorded_transfers


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
def test_what_was_gathered_serves_the_backward_pass_too(world: World) -> None:
    x, y = (torch.randn(7, 12, requires_grad=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        done = recorded_transfers(patch)
        rows, columns = similarity.logsumexp(x, y)
        (rows.sum() + columns.sum()).backward()
        # Gathered again: the upstream of the columns alone.
        assert done == ["all_gather", "all_to_all", "all_gather", "reduce_scatter"]


@on_processes(2)
def test_what_was_gathered_does_not_serve_smaller_rounds(world: World) -> None:
    """The bound may change in between."""
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    found = []
    for bound in (settings.DEFAULT_GATHER, 2 * 2 * 12 * 4, 0):
        rows, columns = similarity.logsumexp(x, y)
        with in_rounds(bound):
            found.append(torch.autograd.grad(rows.sum() + columns.sum(), (x, y)))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)


@on_processes(2)
def test_transfers_of_rounds_run_beside_other_rounds_computation(world: World) -> None:
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    for overlap in (True, False):
        switched = settings.set_overlap(overlap)
        with in_rounds(2 * 2 * 12 * 4) as patch:  # three
            rows, columns = similarity.logsumexp(x, y)
            done = recorded_transfers(patch)
            patch.setattr(engine, "add_strip", noting(done, "compute", engine.add_strip))
            (rows.sum() + columns.sum()).backward()
        settings.set_overlap(switched)
        steps = [step for i, step in enumerate(done) if i == 0 or step != done[i - 1]]
        alone = ["all_gather", "compute", "reduce_scatter"]
        assert steps == ([*alone, *alone, *alone[1:]] if overlap else alone * 3)


@on_processes(2)
def test_own_columns_are_computed_while_the_others_arrive(world: World) -> None:
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    for own_first, overlap in ((6, True), (6, False), (7, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gathered, "LARGE", own_first)
            events: list[str] = []
            patch.setattr(SoftmaxTiles, "forward", noting(events, "compute", SoftmaxTiles.forward))
            patch.setattr(Pending, "wait", noting(events, "wait", Pending.wait))
            switched = settings.set_overlap(overlap)
            similarity.logsumexp(x, y)
            settings.set_overlap(switched)
        hidden = ["compute", "wait", "compute"]
        assert events == (hidden if own_first == 6 and overlap else ["wait", "compute"])


@on_processes(2)
def test_what_stays_is_completed_while_gradients_come_home(world: World) -> None:
    """The deferred product is computed before the next chunk, the last once its transfer began."""
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    add_strip, write_grad = engine.add_strip, SoftmaxTiles.write_grad

    def noting_deferred(done: list[str]) -> Callable[..., None]:
        def compute(*arguments):  # type: ignore[no-untyped-def]
            deferred = arguments[-1]
            assert deferred == []
            add_strip(*arguments)
            done.append("compute")
            (product,) = deferred
            deferred[:] = [lambda: done.append("deferred") or product()]

        return compute

    def noting_side(done: list[str]) -> Callable[..., Any]:
        def write(self, total, side, *others):  # type: ignore[no-untyped-def]
            done.append(side)
            return write_grad(self, total, side, *others)

        return write

    once = ["all_gather", "wait", "compute", "reduce_scatter"]
    end = ["deferred", "x", "wait", "y"]
    for bound, large, expected in (
        (settings.DEFAULT_GATHER, 6, [*once, "let begin", *end]),
        (settings.DEFAULT_GATHER, 7, [*once, *end]),
        (2 * 2 * 12 * 4, 7, None),  # three rounds
        (0, 7, ["swap", "compute", "wait", "swap", "deferred", "compute", "wait", "swap", *end]),
    ):
        with in_rounds(bound) as patch:
            patch.setattr(gathered, "LARGE", large)
            rows, columns = similarity.logsumexp(x, y)
            done = recorded_transfers(patch)
            patch.setattr(P2PExchange, "wait", noting(done, "wait", P2PExchange.wait))
            patch.setattr(Pending, "wait", noting(done, "wait", Pending.wait))
            patch.setattr(gathered, "let_begin", lambda like, done=done: done.append("let begin"))
            patch.setattr(engine, "add_strip", noting_deferred(done))
            patch.setattr(SoftmaxTiles, "write_grad", noting_side(done))
            (rows.sum() + columns.sum()).backward()
        if expected is None:
            work = [step for step in done if step in ("compute", "deferred")]
            assert work == ["compute", "deferred"] * 6  # own columns, then the other rank's
            assert done[-5:] == ["reduce_scatter", *end]
        else:
            assert done == expected


class Alive:
    """The tensors of so many numbers that a function returned, as far as they are in memory."""

    def __init__(self, patch: pytest.MonkeyPatch, holder: object, name: str, numbers: int) -> None:
        self.at_each: list[int] = []  #: how many there were when one more was made
        self._storages: list[StorageWeakRef] = []
        make = getattr(holder, name)

        def noting_storage(*arguments: Any) -> Any:
            made = make(*arguments)
            tensor = made[0] if isinstance(made, tuple) else made
            if tensor.numel() == numbers:
                self.at_each.append(self.now())
                self._storages.append(StorageWeakRef(tensor.untyped_storage()))
            return made

        patch.setattr(holder, name, noting_storage)

    def now(self) -> int:
        return sum(not storage.expired() for storage in self._storages)


@on_processes(2)
def test_features_of_three_rounds_and_gradients_of_two_are_in_memory(world: World) -> None:
    """As planning.loss counts them."""
    x, y = (torch.randn(12, 12, requires_grad=True) for _ in range(2))
    one = torch.tensor(1.0)
    for tiles, sweeps, loss in (
        (SoftmaxTiles, 2, lambda: sum(map(torch.sum, similarity.logsumexp(x, y)))),
        (SigmoidTiles, 1, lambda: similarity.softplus_sum(x, y, one, one)),
    ):
        with in_rounds(2 * 2 * 12 * 4) as patch:  # six
            by_copies(patch)
            features = Alive(patch, gathered, "all_gather", 4 * 12)
            gradients = Alive(patch, tiles, "new_total", 4 * 12)
            loss().backward()
        assert features.at_each == [0, 1, *[2] * 4] * sweeps
        assert gradients.at_each == [0, *[1] * 5]


@on_processes(2)
def test_one_round_is_in_memory_when_the_gradient_of_x_is_completed(world: World) -> None:
    """As planning.loss counts it."""
    x, y = (torch.randn(12, 12, requires_grad=True) for _ in range(2))
    write_grad, found = SoftmaxTiles.write_grad, []
    with in_rounds(2 * 2 * 12 * 4) as patch:  # six
        by_copies(patch)
        features = Alive(patch, gathered, "all_gather", 4 * 12)
        gradients = Alive(patch, SoftmaxTiles, "new_total", 4 * 12)

        def write(self, total, side, *others):  # type: ignore[no-untyped-def]
            if side == "x":
                found.append((features.now(), gradients.now()))
            return write_grad(self, total, side, *others)

        patch.setattr(SoftmaxTiles, "write_grad", write)
        sum(map(torch.sum, similarity.logsumexp(x, y))).backward()
    assert found == [(1, 1)]
