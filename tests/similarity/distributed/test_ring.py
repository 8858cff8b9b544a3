"""The itinerary of the pieces, what travels, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megabatch import similarity
from megabatch.similarity import exchange, gathering, hosts, ring, sigmoid_blocks, sweep
from megabatch.similarity.exchange import Pending, Swap
from megabatch.similarity.ring import Parcel, Ring
from tests.similarity.distributed.processes import World, on_processes
from tests.similarity.distributed.test_statistics_ring import pieces_of


@pytest.mark.parametrize("n", range(1, 10))
def test_each_pair_of_ranks_meets_once(n: int) -> None:
    met: dict[str, list[tuple[int, int]]] = {"full": [], "rows": [], "symmetric": []}
    for rank in range(n):
        for name, route in (("full", ring.full(n)), ("rows", ring.rows_only(n))):
            met[name] += [(rank, (rank - step) % n) for step in range(route.steps)]
        route = ring.symmetric(n)
        for step in range(route.steps):
            owner = (rank - step) % n
            met["symmetric"].append((rank, owner))
            if step in route.carried:  # the mirrored block comes with it
                met["symmetric"].append((owner, rank))
    everyone = [(i, j) for i in range(n) for j in range(n)]
    assert all(sorted(pairs) == everyone for pairs in met.values())
    assert ring.full(n).carried == range(n)
    assert not ring.rows_only(n).carried


@pytest.mark.parametrize("size", [0, -1])
def test_a_piece_of_nothing(size: int) -> None:
    with pytest.raises(ValueError, match=f"size: expected at least 1 byte, got {size}"):
        ring.set_piece(size)


@pytest.mark.parametrize("size", ["big", 1.5, True])
def test_a_piece_of_no_size(size: object) -> None:
    with pytest.raises(TypeError, match="size: expected a number of bytes"):
        ring.set_piece(size)  # type: ignore[arg-type]


def test_rows_of_a_piece() -> None:
    assert ring.piece_rows(torch.empty(0, 768, dtype=torch.bfloat16)) == 32768
    assert ring.piece_rows(torch.empty(0, 1024, dtype=torch.bfloat16)) == 16384
    assert ring.piece_rows(torch.empty(0, 1024, dtype=torch.float64)) == 6144
    with pieces_of(1):
        assert ring.piece_rows(torch.empty(0, 768)) == 1


def bytes_sent(patch: pytest.MonkeyPatch) -> list[int]:
    """Filled with what each exchange sends."""
    sent: list[int] = []
    add, start = Swap.add, Swap.start

    def count(self: Swap, outgoing: torch.Tensor, size: int, dim: int = 0) -> torch.Tensor:
        self.bytes = getattr(self, "bytes", 0) + outgoing.nbytes
        return add(self, outgoing, size, dim)

    def note(self: Swap) -> None:
        if hasattr(self, "bytes"):
            sent.append(self.bytes)
        start(self)

    patch.setattr(Swap, "add", count)
    patch.setattr(Swap, "start", note)
    return sent


@on_processes(3)
def test_what_travels(world: World) -> None:
    """Features 2 d bytes a row; states 8 or 24, pulls 8 or 20, gradients 4 d."""
    rows, d = 7, 10
    features, gradient, ids = rows * d * 2, rows * d * 4, rows * 8
    x, y = (torch.randn(rows, d).bfloat16().requires_grad_() for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, pieces_of(1 << 20):
        sent = bytes_sent(patch)
        a, b = similarity.logsumexp(x, y)
        state = rows * 8
        assert sent == [features, features + state, state, state]
        sent.clear()
        (a.sum() + b.sum()).backward()
        pull = rows * 8
        assert sent == [features + pull, features + pull + gradient, gradient, gradient]
        sent.clear()
        numbers = torch.arange(rows)
        r, c = similarity.split_logsumexp(x, y, ids=(numbers, numbers))
        state = rows * 24
        assert sent == [features + ids, features + ids + state, state, state]
        sent.clear()
        (r.negative.sum() + c.positive.sum()).backward()
        pull = ids + rows * 20
        assert sent == [features + pull, features + pull + gradient, gradient, gradient]
        sent.clear()
        similarity.logsumexp(x, y, sides="rows")[0].sum().backward()
        assert sent == [features] * 2 + [features, features + gradient, gradient, gradient]
        sent.clear()
        similarity.split_logsumexp(x)[0].negative.sum().backward()
        state = rows * 8
        assert sent == [features, state, features + pull - ids - rows * 12, gradient]


@on_processes(2)
def test_transfers_begin_before_the_computation_and_are_waited_for_after_it(world: World) -> None:
    x = torch.randn(3, 4)
    for overlap in (True, False):
        events: list[str] = []
        with pytest.MonkeyPatch.context() as patch, pieces_of(1 << 20):
            for owner, name in ((Swap, "start"), (Swap, "wait"), (sweep.Blocks, "forward")):
                patch.setattr(owner, name, noting(events, name, getattr(owner, name)))
            before = ring.set_overlap(overlap)
            similarity.logsumexp(x, x, sides="rows")
            ring.set_overlap(before)
        expected = ["start", "forward", "wait"] if overlap else ["start", "wait", "forward", "wait"]
        assert events == expected * 2


def noting(events, name, function):  # type: ignore[no-untyped-def]
    def call(self, *arguments, **options):  # type: ignore[no-untyped-def]
        events.append(name)
        return function(self, *arguments, **options)

    return call


@pytest.mark.parametrize("size", [0, 5, None])
def test_what_is_gathered_is_bounded(size: int | None) -> None:
    before = ring.set_gather(size)
    assert ring.set_gather(before) == (ring.DEFAULT_GATHER if size is None else size)
    for wrong, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="size: expected"):
            ring.set_gather(wrong)  # type: ignore[arg-type]
    assert ring.set_gather(None) == before


def gathered(patch: pytest.MonkeyPatch) -> list[str]:
    """Filled with what the ranks do together, in order."""
    done: list[str] = []
    for name in ("gather", "deal", "scatter_sum"):
        function = getattr(gathering, name)

        def note(*arguments, name=name, function=function):  # type: ignore[no-untyped-def]
            done.append(name)
            return function(*arguments)

        patch.setattr(gathering, name, note)
    patch.setattr(Swap, "start", lambda self: done.append("swap"))
    return done


@on_processes(3)
def test_small_shards_of_one_size_are_gathered(world: World) -> None:
    x, y = (torch.randn(7, 10, requires_grad=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        done = gathered(patch)
        rows, columns = similarity.logsumexp(x, y)
        assert done == ["gather", "deal"]
        done.clear()
        (rows.sum() + columns.sum()).backward()
        assert done == ["gather", "gather", "scatter_sum"]  # features, and what columns pull
        done.clear()
        similarity.softplus_sum(x, y, 1.0, 0.0).backward()
        assert done == ["gather", "scatter_sum"]
        done.clear()
        similarity.topk(x.detach(), y.detach(), 2)
        assert done == ["gather"]


@on_processes(2)
def test_what_was_gathered_serves_the_backward_pass_too(world: World) -> None:
    x, y = (torch.randn(7, 12, requires_grad=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        done = gathered(patch)
        rows, columns = similarity.logsumexp(x, y)
        (rows.sum() + columns.sum()).backward()
        assert done == ["gather", "deal", "gather", "scatter_sum"]  # the second: what columns pull


@on_processes(2)
def test_what_was_gathered_does_not_serve_smaller_rounds(world: World) -> None:
    """The bound may change in between."""
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    found = []
    for bound in (None, 2 * 2 * 12 * 4, 0):
        rows, columns = similarity.logsumexp(x, y)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ring, "TILE", 2)
            patch.setattr(ring, "ROUND", 1)
            before = ring.set_gather(bound)
            found.append(torch.autograd.grad(rows.sum() + columns.sum(), (x, y)))
            ring.set_gather(before)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("limit", "steps"),
    [(10**6, [900]), (900, [900]), (899, [128] * 7 + [4]), (512, [128] * 7 + [4])],
)
def test_rounds_are_whole_tiles_within_the_bound(limit: int, steps: list[int]) -> None:
    one = object.__new__(Ring)
    one.n, one.sizes = 2, [900, 900]
    features = Parcel(torch.empty(900, 4))
    before = ring.set_gather(2 * limit * 16)
    found = one._gatherings(features, ring.full(2))
    assert [rows.stop - rows.start for rows in found] == steps
    assert bool(one._gatherings(features, ring.ordered(2))) == (len(steps) == 1)
    ring.set_gather(2 * 511 * 16)  # a quarter of it is less than a tile
    assert one._gatherings(features, ring.full(2)) == []
    ring.set_gather(before)


def test_rounds_are_even() -> None:
    before = ring.set_gather(16 * 4 * 300)
    assert ring.round_rows(1200, 16) == 1200
    assert ring.round_rows(1300, 16) == 256  # six of up to 256, of the 300 that are allowed
    ring.set_gather(16 * 4 * 1000)
    assert ring.round_rows(4100, 16) == 896  # five of up to 896: not four and a small one
    ring.set_gather(before)


@on_processes(2)
def test_transfers_of_rounds_run_beside_other_rounds_computation(world: World) -> None:
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    before = ring.set_gather(2 * 2 * 12 * 4)  # three rounds
    for overlap in (True, False):
        switched = ring.set_overlap(overlap)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ring, "TILE", 2)
            patch.setattr(ring, "ROUND", 1)
            rows, columns = similarity.logsumexp(x, y)
            done = gathered(patch)
            patch.setattr(sweep.Blocks, "backward", noting(done, "compute", sweep.Blocks.backward))
            (rows.sum() + columns.sum()).backward()
        ring.set_overlap(switched)
        steps = [step for i, step in enumerate(done) if i == 0 or step != done[i - 1]]
        alone = ["gather", "compute", "scatter_sum"]
        assert steps == ([*alone, *alone, *alone[1:]] if overlap else alone * 3)
    ring.set_gather(before)


@on_processes(2)
def test_own_columns_are_computed_while_the_others_arrive(world: World) -> None:
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    for own_first, overlap in ((6, True), (6, False), (7, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gathering, "LARGE", own_first)
            events: list[str] = []
            patch.setattr(sweep.Blocks, "forward", noting(events, "compute", sweep.Blocks.forward))
            patch.setattr(Pending, "wait", noting(events, "wait", Pending.wait))
            switched = ring.set_overlap(overlap)
            similarity.logsumexp(x, y)
            ring.set_overlap(switched)
        hidden = ["compute", "wait", "compute"]
        assert events == (hidden if own_first == 6 and overlap else ["wait", "compute"])


@on_processes(2)
def test_what_stays_is_completed_while_gradients_come_home(world: World) -> None:
    """What a visit puts off is made before the next, the last once its transfer has begun."""
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    backward, complete = sweep.Blocks.backward, sweep.Blocks.finish

    def putting_off(done: list[str]) -> Callable[..., None]:
        def compute(self, *arguments):  # type: ignore[no-untyped-def]
            later = arguments[7]
            assert later == []
            backward(self, *arguments)
            done.append("compute")
            later.append(lambda: done.append("later"))

        return compute

    def finishing(done: list[str]) -> Callable[..., Any]:
        def finish(self, total, side, *others):  # type: ignore[no-untyped-def]
            done.append(side)
            return complete(self, total, side, *others)

        return finish

    once = ["gather", "wait", "compute", "scatter_sum"]
    end = ["later", "x", "wait", "y"]
    for bound, large, expected in (
        (None, 6, [*once, "let begin", *end]),
        (None, 7, [*once, *end]),
        (2 * 2 * 12 * 4, 7, None),  # three rounds
        (0, 7, ["swap", "compute", "wait", "swap", "later", "compute", "wait", "swap", *end]),
    ):
        before = ring.set_gather(bound)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ring, "TILE", 2)
            patch.setattr(ring, "ROUND", 1)
            patch.setattr(gathering, "LARGE", large)
            rows, columns = similarity.logsumexp(x, y)
            done = gathered(patch)
            patch.setattr(Swap, "wait", noting(done, "wait", Swap.wait))
            patch.setattr(Pending, "wait", noting(done, "wait", Pending.wait))
            patch.setattr(gathering, "let_begin", lambda like, done=done: done.append("let begin"))
            patch.setattr(sweep.Blocks, "backward", putting_off(done))
            patch.setattr(sweep.Blocks, "finish", finishing(done))
            (rows.sum() + columns.sum()).backward()
        ring.set_gather(before)
        if expected is None:
            work = [step for step in done if step in ("compute", "later")]
            assert work == ["compute", "later"] * 6  # own columns, then the other rank's
            assert done[-5:] == ["scatter_sum", *end]
        else:
            assert done == expected


def alive(patch: pytest.MonkeyPatch, holder: object, name: str, numbers: int) -> list[int]:
    """Filled with how many tensors of so many numbers are in memory when one more was made."""
    found: list[StorageWeakRef] = []
    others: list[int] = []
    make = getattr(holder, name)

    def noting_storage(*arguments):  # type: ignore[no-untyped-def]
        made = make(*arguments)
        tensor = made[0] if isinstance(made, tuple) else made
        if tensor.numel() == numbers:
            others.append(sum(not storage.expired() for storage in found))
            found.append(StorageWeakRef(tensor.untyped_storage()))
        return made

    patch.setattr(holder, name, noting_storage)
    return others


@on_processes(2)
def test_features_of_three_rounds_and_gradients_of_two_are_in_memory(world: World) -> None:
    """As planning.loss counts them."""
    x, y = (torch.randn(12, 12, requires_grad=True) for _ in range(2))
    one = torch.tensor(1.0)
    before = ring.set_gather(2 * 2 * 12 * 4)  # six rounds, each of two rows of either rank
    for blocks, name, sweeps, loss in (
        (sweep.Blocks, "buffer", 2, lambda: sum(map(torch.sum, similarity.logsumexp(x, y)))),
        (sigmoid_blocks.Blocks, "accumulator", 1, lambda: similarity.softplus_sum(x, y, one, one)),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ring, "TILE", 2)
            patch.setattr(ring, "ROUND", 1)
            features = alive(patch, gathering, "gather", 4 * 12)
            gradients = alive(patch, blocks, name, 4 * 12)
            loss().backward()
        assert features == [0, 1, *[2] * 4] * sweeps
        assert gradients == [0, *[1] * 5]
    ring.set_gather(before)


@on_processes(2)
def test_every_transfer_that_a_gpu_waits_for_is_told_to_its_watch(world: World) -> None:
    x, y = (torch.randn(6, 12, requires_grad=True) for _ in range(2))
    scale = torch.tensor(2.0, requires_grad=True)
    other, me = 1 - world.rank, f"rank {world.rank}"
    call, back = "logsumexp", "logsumexp, backward"
    step = f"{me} (to rank {other}, from rank {other})"
    found = "what all ranks found"
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
                f"{call}: ring's way home, {step}",
                f"{back}: ring step 1 of 2, {step}",
                f"{back}: ring step 2 of 2, {step}",
                f"{back}: ring's way home, {step}",
                f"{back}: all-reduce, {me}",
            ],
        ),
    ):
        told: list[str] = []
        before = ring.set_gather(bound)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hosts, "note", lambda group, like, what, told=told: told.append(what))
            sum(map(torch.sum, similarity.logsumexp(x, y, scale))).backward()
        ring.set_gather(before)
        assert told == expected


@on_processes(3)
def test_large_unequal_and_symmetric_shards_go_around_the_ring(world: World) -> None:
    x = torch.randn(7, 10)
    uneven = torch.randn(6 + (world.rank > 0), 10)
    before = ring.set_gather(3 * x.nbytes - 1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gathering, "gather", lambda *arguments: pytest.fail("gathered"))
            similarity.logsumexp(x, x)
            ring.set_gather(None)
            similarity.logsumexp(x, uneven)
            similarity.split_logsumexp(x)
    finally:
        ring.set_gather(before)


@on_processes(2)
def test_the_same_bound_on_all_ranks(world: World) -> None:
    x = torch.randn(3, 4)
    before = ring.set_gather(100 + world.rank)
    with pytest.raises(ValueError, match=r"gathered up to 100 bytes.*gathered up to 101 bytes"):
        similarity.logsumexp(x, x)
    ring.set_gather(before)


@on_processes(2, 4)
def test_one_handshake_a_loss(world: World) -> None:
    from megabatch import ClipLoss, SigLipLoss

    agree, calls = exchange.agree, []
    x, y = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "agree", lambda *words: (calls.append(words), agree(*words))[1])
        ClipLoss()(x, y, 2.0).backward()
        SigLipLoss()(x, y, 2.0, -1.0).backward()
    assert len(calls) == 2
