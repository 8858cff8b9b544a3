"""`ranks` and `topk` on several processes against one process with all columns."""

from __future__ import annotations

import pytest
import torch

from megabatch import similarity
from megabatch.similarity import eager
from tests.similarity.distributed.comparison import ROUND
from tests.similarity.distributed.processes import World, on_devices, shard_sizes
from tests.similarity.distributed.transfers import transferring

D = 5


@on_devices(3)
def test_ranks_and_topk_equal_those_of_one_process(world: World) -> None:
    for sizes in shard_sizes(world.size):
        n = sum(sizes)
        # Few rows are distinct, so that there are ties on the same and on other processes.
        x, y = (torch.randint(-1, 2, (n, D)).double() for _ in range(2))
        target, ids = torch.randint(0, n, (n,)), (torch.randint(-1, 4, (n,)),) * 2
        for size in (None, ROUND):
            for i in (None, ids):
                own = None if i is None else tuple(world.shard(t, sizes) for t in i)
                local = [world.shard(t, sizes) for t in (x, y)]
                with transferring(rounds=size) as patch:
                    patch.setattr(eager, "block_shape", lambda like, *_: (3, 2))
                    mine = similarity.ranks(*local, world.shard(target, sizes), ids=own)
                    scores, indices = similarity.topk(*local, 4, ids=own)
                truth = similarity.ranks(x, y, target, ids=i, group="local")
                for a, b in zip(mine, truth, strict=True):
                    assert torch.equal(a, world.shard(b, sizes))
                best, _ = similarity.topk(x, y, 4, ids=i, group="local")
                assert torch.equal(scores, world.shard(best, sizes))
                real = indices >= 0
                found = (local[0] @ y.T).gather(1, indices.clamp(min=0))
                assert torch.equal(found[real], scores[real])
                assert scores[~real].eq(-torch.inf).all()


@on_devices(2)
def test_other_numbers_of_rows_than_of_columns(world: World) -> None:
    x = torch.randn(3 * world.rank, D)  # none on the first process, whose columns still count
    y = torch.randn(4, D)
    above, equal = similarity.ranks(x, y, torch.zeros(len(x), dtype=torch.int64))
    assert above.shape == equal.shape == (3 * world.rank,)
    everything = similarity.topk(x, y, 8)[1]
    assert torch.equal(everything.sort(1).values, torch.arange(8).expand(len(x), 8))


@on_devices(2)
def test_a_bad_target_or_k_is_an_error_on_every_process(world: World) -> None:
    x = torch.randn(3, D)
    bad = torch.tensor([0, 6 if world.rank else 0, 1])
    with pytest.raises(IndexError, match=r"\[0, 6\), got 0 to 6 on rank 1"):
        similarity.ranks(x, x, bad)
    with pytest.raises(ValueError, match="expected 1 to 6"):
        similarity.topk(x, x, 7)
