"""Late interaction on several processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import megabatch as mb
from megabatch import similarity
from tests.similarity.distributed.comparison import compare, double, some_ids
from tests.similarity.distributed.processes import World, on_devices, on_processes, shard_sizes
from tests.similarity.distributed.transfers import received_bytes, transferring


@on_devices(1, 2, 3, 4)
def test_shards_against_the_whole(world: World) -> None:
    """Unequal and empty shards; gathered at once, in rounds, and by a grid."""
    for sizes in shard_sizes(world.size):
        total = sum(sizes)
        ids, lengths = some_ids(total), torch.randint(1, 6, (total,))
        inputs = [(double(total, 3, 4), sizes), (double(total, 5, 4), sizes)]
        inputs += [(double(total).abs(), sizes), (torch.tensor(0.6).double(), None)]

        def function(group: object, x: Tensor, y: Tensor, weight: Tensor, scale: Tensor, *more):  # type: ignore[no-untyped-def]
            rows, columns = similarity.split_logsumexp(
                x,
                y,
                scale,
                ids=(more[0], more[0]),
                row_weight=weight,
                col_lengths=more[1],
                group=group,
            )
            return [part for side in (rows, columns) for part in side]

        inputs += [(ids, sizes), (lengths, sizes)]
        outputs = [sizes] * 8
        compare(world, function, inputs, outputs, frozen="2")
        with transferring(rounds=400):
            compare(world, function, inputs, outputs, frozen="2")
        if world.size == 4 and min(sizes):
            with transferring(columns=2):
                compare(world, function, inputs, outputs, frozen="2")


@on_processes(2, 3)
def test_the_loss_with_different_numbers_of_tokens(world: World) -> None:
    """Each process pads its own batch, as data collators do."""
    whole = [double(3 * world.size, k, 4) for k in (4, 6)]
    masks = [torch.ones(t.shape[:2], dtype=torch.bool) for t in whole]
    for rank in range(world.size):
        masks[0][3 * rank : 3 * rank + 3, 2 + rank % 3 :] = False
        masks[1][3 * rank : 3 * rank + 3, 4 + rank % 3 :] = False
    truth = [t.clone().requires_grad_() for t in whole]
    value = mb.MaxSimLoss(0.5, group="local")(*truth, *masks)
    value.backward()
    own = slice(3 * world.rank, 3 * world.rank + 3)
    lengths = 2 + world.rank % 3, 4 + world.rank % 3
    mine = [t[own, :k].clone().requires_grad_() for t, k in zip(whole, lengths, strict=True)]
    cut = [m[own, :k] for m, k in zip(masks, lengths, strict=True)]
    for given in (cut, [None, None]):
        for t in mine:
            t.grad = None
        share = mb.MaxSimLoss(0.5)(*mine, *given)
        share.backward()
        torch.testing.assert_close(sum_of(share) / world.size, value.detach())
        for t, exact, k in zip(mine, truth, lengths, strict=True):
            torch.testing.assert_close(t.grad / world.size, exact.grad[own, :k])


@on_processes(2)
def test_negatives_longer_than_documents_on_one_process(world: World) -> None:
    """Their columns have as many tokens on all processes."""
    x, y, negatives = double(6, 2, 4), double(6, 3, 4), double(6, 5, 4)
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[3:, 4:] = False
    own = slice(3 * world.rank, 3 * world.rank + 3)
    truth = mb.MaxSimLoss(0.5, group="local")(x, y, None, None, negatives, mask)
    mine = negatives[own, : 5 - world.rank]
    share = mb.MaxSimLoss(0.5)(x[own], y[own], None, None, mine)
    torch.testing.assert_close(sum_of(share) / world.size, truth)


def sum_of(value: Tensor) -> Tensor:
    return similarity.sum_over_ranks(value.detach(), None)


@on_processes(4)
def test_documents_stay_with_their_process(world: World) -> None:
    """Received: the others' documents in both passes, and their gradients; no queries."""
    x, y = (double(8, k, 4).requires_grad_() for k in (3, 5))
    with transferring(columns=0) as patch:
        received = received_bytes(patch)
        similarity.logsumexp(x, y)[0].sum().backward()
    documents = 3 * y.nbytes
    assert sorted(received)[-3:] == [documents] * 3
    assert sum(received) < 3 * documents + 3 * 8 * 8 * 8
    if world.rank == 0:
        with pytest.raises(ValueError, match="x: expected shape"):
            similarity.split_logsumexp(x, None)
