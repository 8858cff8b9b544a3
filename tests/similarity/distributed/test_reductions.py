"""Log-sum-exps and the sigmoid loss's sum on several processes; `test_fuzz` has every option."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megabatch import SigLipLoss, similarity
from megabatch.similarity import backends, softplus_sum, split_logsumexp
from tests.similarity import dense
from tests.similarity.distributed.comparison import D, compare, double, leaf, some_ids
from tests.similarity.distributed.processes import World, on_devices
from tests.similarity.distributed.transfers import received_bytes, transferring


@on_devices(2, 3)
def test_the_number_of_rows_of_all_processes(world: World) -> None:
    x, y = torch.randn(world.rank + 1, D), torch.randn(5, D)
    ids = some_ids(len(x)), some_ids(5)
    assert similarity.split_stacks(x, y, 1.0, ids=ids).batch == world.size * (world.size + 1) // 2
    assert similarity.split_stacks(x, None, 1.0).batch == world.size * (world.size + 1) // 2
    assert similarity.split_stacks(x, y, 1.0, ids=ids, group="local").batch is None


@on_devices(3, 4)
def test_upstream_gradients_that_only_one_process_has(world: World) -> None:
    """A process whose loss used one side or none still takes part in the backward pass."""
    sizes = [4] * world.size
    x, y = double(sum(sizes), D), double(sum(sizes), D)
    whole = [leaf(x), leaf(y)]
    rows, columns = dense.logsumexp(*whole)
    (columns[:4].sum() + rows[4:8].sum()).backward()
    for grid in (0, 2):
        local = [leaf(world.shard(t, sizes)) for t in (x, y)]
        with transferring(columns=grid):
            rows, columns = similarity.logsumexp(*local)
            (columns.sum(), rows.sum(), 0 * rows.sum(), 0 * columns.sum())[world.rank].backward()
        for a, b in zip(local, whole, strict=True):
            torch.testing.assert_close(a.grad, world.shard(b.grad, sizes), rtol=0, atol=1e-12)


@on_devices(3)
def test_a_bias_travels_with_its_columns(world: World) -> None:
    rows, columns = [4, 1, 5], [2, 6, 3]

    def function(group: object, *operands: Tensor) -> list[Tensor]:
        *others, bias = operands
        found = similarity.logsumexp(*others, col_bias=bias, group=group)
        return [side for side in found if side is not None]

    inputs = [
        *((double(10, D), rows), (double(11, D), columns)),
        *((torch.tensor(2.0, dtype=torch.float64), None), (3 * double(11), columns)),
    ]
    for rounds in (None, 3 * 8 * D):
        with transferring(rounds=rounds):
            compare(world, function, inputs, [rows, columns])
    x, bias = torch.randn(3, D), torch.zeros(3) if world.rank else None
    with pytest.raises(ValueError, match="bias: given"):
        similarity.logsumexp(x, x, col_bias=bias)


@on_devices(2)
def test_processes_that_use_a_sigmoid_sum_differently_get_nan(world: World) -> None:
    x, y = (torch.randn(3, D, requires_grad=True) for _ in range(2))
    (softplus_sum(x, y, 1.0, 0.0) * (world.rank + 1)).backward()
    assert x.grad.isnan().all()
    assert y.grad.isnan().all()


@on_devices(2)
def test_one_process_without_any_weight(world: World) -> None:
    """Its rows do not count, but its columns are negatives of the other process's rows."""
    x, y = double(6, D), double(6, D)
    weights = torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, 3.0])
    whole, local = leaf(y), leaf(world.shard(y, [3, 3]))
    SigLipLoss(group="local")(x, whole, 1.0, 0.0, weights=weights).backward()
    mine = SigLipLoss()
    mine(world.shard(x, [3, 3]), local, 1.0, 0.0, weights=world.shard(weights, [3, 3])).backward()
    torch.testing.assert_close(local.grad / 2, world.shard(whole.grad, [3, 3]))


@on_devices(3)
def test_graphs_of_several_groups_at_once(world: World) -> None:
    """Two calls of all ranks, one of two ranks and one local; backward passes in reverse order."""
    pair = dist.new_group([0, 2])
    sizes = [3, 4, 2]
    x, y = double(9, D), double(9, D)
    whole, local = [leaf(x), leaf(y)], [leaf(world.shard(t, sizes)) for t in (x, y)]
    parts = [t.split(sizes) for t in whole]
    some = [torch.cat([part[0], part[2]]) for part in parts]
    truth = [
        dense.logsumexp(*whole, 1.0)[0].sum(),
        dense.logsumexp(*whole, 2.0)[1].sum(),
        *(dense.logsumexp(part, other)[0].sum() for part, other in zip(*parts, strict=True)),
        dense.logsumexp(*some, 3.0)[1].sum(),
    ]
    mine = [
        similarity.logsumexp(*local, 1.0)[0].sum(),
        similarity.logsumexp(*local, 2.0, group=dist.group.WORLD)[1].sum(),
        similarity.logsumexp(*local, group="local")[0].sum(),
    ]
    if world.rank != 1:
        mine.append(similarity.logsumexp(*local, 3.0, group=pair)[1].sum())
    else:
        with pytest.raises(ValueError, match="member"):
            similarity.logsumexp(*local, group=pair)
    for value in reversed(mine):
        value.backward()
    sum(truth).backward()
    for a, b in zip(local, whole, strict=True):
        torch.testing.assert_close(a.grad, world.shard(b.grad, sizes), rtol=0, atol=1e-11)


@on_devices(2, 3)
def test_half_precision(world: World) -> None:
    """Ranks agree on the scaling of float16 gradients, whose sizes differ."""
    sizes = [7, 12, 5][: world.size]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x, y = (F.normalize(torch.randn(sum(sizes), 32), dim=1).to(dtype) for _ in range(2))
        rounding = torch.finfo(dtype).eps if dtype != torch.float16 else 0.05  # subnormal

        def close(mine: Tensor, truth: Tensor, rounding: float = rounding) -> None:
            low = mine.dtype in (torch.float16, torch.bfloat16)
            # A GPU adds float32 in another order on a rank than on all rows.
            full = 1e-5, 5e-5 if mine.is_cuda else 1e-5
            rtol, atol = (4 * rounding, 1e-7) if low else full
            torch.testing.assert_close(mine, truth, rtol=rtol, atol=atol)

        def function(group: object, x: Tensor, y: Tensor) -> list[Tensor]:
            rows, columns = similarity.logsumexp(x, y, 20.0, group=group)
            assert columns is not None
            return [rows, columns, (rows.sum() + columns.sum()) * 1e-6]

        compare(world, function, [(x, sizes), (y, sizes)], [sizes, sizes, None], close=close)


@on_devices(2)
def test_autocast_casts_before_transfers(world: World) -> None:
    x, y = (torch.randn(4, D) for _ in range(2))
    with torch.autocast(world.device, torch.bfloat16):
        rows, _ = similarity.logsumexp(x, y)
    assert rows.dtype == torch.float32
    assert torch.equal(rows, similarity.logsumexp(x.bfloat16(), y.bfloat16())[0])


@on_devices(3)
def test_a_nan_reaches_every_process(world: World) -> None:
    x, y = torch.randn(3, D), torch.randn(3, D)
    if world.rank == 1:
        y[2, 0] = torch.nan
    rows, columns = similarity.logsumexp(x, y)
    assert rows.isnan().all()
    assert columns.isnan().any() or world.rank != 1


@on_devices(3)
def test_bytes_that_a_sigmoid_sum_receives(world: World) -> None:
    """Bytes per row: features 2 d, gradients 4 d; for the kernels both are padded to d = 16."""
    pytest.importorskip("triton")
    rows, d = 7, 10
    for fused, width in ((False, d), (True, 16)):
        x, y = (torch.randn(rows, d).bfloat16().requires_grad_() for _ in range(2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backends, "uses_kernels", lambda x, fused=fused: fused)
            received = received_bytes(patch)
            value = softplus_sum(x, y, 1.0, 0.0)
            assert received == [2 * rows * width * 2, 2 * rows * width * 4]
            value.backward()
            assert len(received) == 2


@on_devices(2)
def test_they_compile_as_one_node(world: World) -> None:
    def value(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        rows, columns = split_logsumexp(x, y, scale)
        total = rows.negative.sum() + columns.positive_sum.sum()
        return total + softplus_sum(x, y, scale, -1.0)

    inputs = [torch.randn(3, D), torch.randn(3, D), torch.tensor(2.0)]
    mine, theirs = [[leaf(t) for t in inputs] for _ in range(2)]
    compiled = torch.compile(value, backend="aot_eager", fullgraph=True)(*mine)
    eager = value(*theirs)
    torch.testing.assert_close(compiled, eager)
    compiled.backward()
    eager.backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@on_devices(2)
def test_ranks_and_topk_over_the_columns_of_all_processes(world: World) -> None:
    sizes, target = [3, 5], torch.randint(0, 8, (8,))
    lengths = torch.randint(0, 4, (8,))
    for tokens in ((), (3,)):  # late interaction, too
        options = [{}, {"col_lengths": lengths}][len(tokens)]
        x, y = (torch.randint(-1, 2, (8, *tokens, D)).double() for _ in range(2))  # with ties
        truth = similarity.ranks(x, y, target, group="local", **options)
        best, _ = similarity.topk(x, y, 4, group="local", **options)
        own = [world.shard(t, sizes) for t in (x, y)]
        shards = {name: world.shard(value, sizes) for name, value in options.items()}
        for size in (None, 6 * D * 8):  # at once and in rounds
            with transferring(rounds=size):
                found = similarity.ranks(*own, world.shard(target, sizes), **shards)
                scores, _ = similarity.topk(*own, 4, **shards)
            for a, b in zip((*found, scores), (*truth, best), strict=True):
                assert torch.equal(a, world.shard(b, sizes))
