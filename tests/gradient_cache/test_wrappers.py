"""DDP around a whole training step, DDP and FSDP2 inside the encoders, as callers use them."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch.gradient_cache import GradientCache, UnusedParameters
from megabatch.losses import ClipLoss
from megabatch.torch_internals import fsdp_groups
from tests.similarity.distributed.processes import World, on_processes

WIDTH, DIMS = 5, 4
MICRO_BATCH_SIZES = (2, 8)  # 8: every shard is one micro-batch


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6), nn.Linear(6, DIMS)

    def forward(self, x):
        hidden = self.first(x).tanh().reshape(len(x), 6, -1).mean(2)  # impossible without rows
        return F.normalize(self.second(hidden), dim=-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = Tower(), Tower()
        self.scale = nn.Parameter(torch.tensor([1.1]))  # FSDP2 takes no 0-d parameter

    def forward(self, images, texts):
        return self.image(images), self.text(texts), self.scale.exp()


class TrainingStep(nn.Module):
    """Like Lightning, whose wrapped module computes the loss."""

    def __init__(self, model, size):
        super().__init__()
        self.model = model
        self.step = GradientCache(model, ClipLoss(), size)

    def forward(self, *batches):
        return self.step(*batches)


def made():
    torch.manual_seed(0)
    return Model().double()


def batches_of(world, sizes, seed=1):
    """This rank's shard of a batch, and all of it."""
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(sum(sizes), WIDTH, generator=generator).double() for _ in range(2)]
    return [batch.split(sizes)[world.rank] for batch in whole], whole


def plain(whole, factors=(1.0,)):
    """One process with the whole batches: the loss and its gradients."""
    model = made()
    loss = sum(f * ClipLoss(group="local")(*model(*b)) for f, b in zip(factors, whole, strict=True))
    loss.backward()
    return loss.detach(), gradients(model)


def gradients(model):
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        found[name.replace("module.", "").replace("model.", "")] = gradient
    return found


def assert_same(model, expected):
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-9)


def sizes_of(world):
    """Equal, unequal and empty shards."""
    several = [[4] * world.size, [5, 1, 3][: world.size]]
    return several + ([[0, 5, 2][: world.size], [3, 0, 0][: world.size]] if world.size > 1 else [])


@on_processes(1, 2, 3)
def test_ddp_around_the_whole_step_reduces_once(world: World) -> None:
    for sizes in sizes_of(world):
        for size in MICRO_BATCH_SIZES:
            for find_unused in (False, True):
                mine, whole = batches_of(world, sizes)
                expected_loss, expected = plain([whole])
                wrapped = DistributedDataParallel(
                    TrainingStep(made(), size), find_unused_parameters=find_unused
                )
                reductions = []

                def hook(_, bucket, reductions=reductions):
                    reductions.append(1)
                    return allreduce_hook(None, bucket)

                wrapped.register_comm_hook(None, hook)
                loss = wrapped(*mine)
                loss.backward()
                assert len(reductions) == 1
                assert_same(wrapped, expected)
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                torch.testing.assert_close(mean / world.size, expected_loss)


@on_processes(2, 3)
def test_accumulation_with_ddp_around_the_step(world: World) -> None:
    for view in (False, True):
        for size in MICRO_BATCH_SIZES:
            parts = [batches_of(world, [4, 2, 3][: world.size], seed) for seed in range(3)]
            _, expected = plain([whole for _, whole in parts], [1 / 3] * 3)
            wrapped = DistributedDataParallel(
                TrainingStep(made(), size), gradient_as_bucket_view=view
            )
            for i, (mine, _) in enumerate(parts):
                if i < 2:
                    with wrapped.no_sync():
                        (wrapped(*mine) / 3).backward()
                else:
                    (wrapped(*mine) / 3).backward()
            assert_same(wrapped, expected)
            norm = nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
            norms = [torch.zeros_like(norm) for _ in range(world.size)]
            dist.all_gather(norms, norm)
            assert all(torch.equal(one, norm) for one in norms)


def under_ddp(model):
    return DistributedDataParallel(model)


def under_fsdp(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.image, model.text, model):
        fully_shard(part, mesh=mesh)
    return model


@on_processes(1, 2, 3)
def test_wrappers_inside_with_two_losses_added(world: World) -> None:
    for wrap in (under_ddp, under_fsdp):
        for size in MICRO_BATCH_SIZES:
            for sizes in sizes_of(world):
                parts = [batches_of(world, sizes, seed) for seed in range(2)]
                _, expected = plain([whole for _, whole in parts], [1.0, 3.0])
                model = wrap(made())
                step = GradientCache(model, ClipLoss(), size)
                (step(*parts[0][0]) + 3 * step(*parts[1][0])).backward()
                assert_same(model, expected)


def synchronised(model):
    """The sync settings of FSDP2 and DDP."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            yield module.require_backward_grad_sync
        elif isinstance(module, FSDPModule):
            for group in fsdp_groups(module):
                yield group.reduce_grads, group.all_reduce_grads


@on_processes(2)
def test_what_the_user_set_decides_and_stays(world: World) -> None:
    """No synchronisation in the first of two steps, whatever holds when `backward()` is called."""
    for size in MICRO_BATCH_SIZES:
        parts = [batches_of(world, [4, 3], seed) for seed in range(2)]
        _, expected = plain([whole for _, whole in parts], [0.5, 0.5])
        model = under_ddp(made())
        step = GradientCache(model, ClipLoss(), size)
        with model.no_sync():
            loss = step(*parts[0][0]) / 2
        loss.backward()
        local = copy.deepcopy(gradients(model)["image.first.weight"])
        dist.broadcast(local, 0)
        if world.rank:
            assert not torch.allclose(local, gradients(model)["image.first.weight"])
        assert list(synchronised(model)) == [True]
        loss = step(*parts[1][0]) / 2
        with model.no_sync():
            loss.backward()
            assert list(synchronised(model)) == [False]
        assert_same(model, expected)

        model = under_fsdp(made())
        step = GradientCache(model, ClipLoss(), size)
        model.set_requires_gradient_sync(False)
        before = list(synchronised(model))
        (step(*parts[0][0]) / 2).backward()
        assert list(synchronised(model)) == before
        assert model.image.first.weight.grad is None  # not reduced
        model.set_requires_gradient_sync(True)
        model.image.set_requires_all_reduce(False)
        before = list(synchronised(model))
        (step(*parts[1][0]) / 2).backward()
        assert list(synchronised(model)) == before
        assert len(set(before)) == 2
        assert_same(model, expected)


@on_processes(2)
def test_gradients_of_wrapped_encoders_go_to_grad_alone(world: World) -> None:
    mine, _ = batches_of(world, [4, 3])
    for wrap in (under_ddp, under_fsdp):
        for size in MICRO_BATCH_SIZES:
            model = wrap(made())
            parameters = list(model.parameters())
            step = GradientCache(model, ClipLoss(), size)
            for backward in (
                lambda loss, parameters=parameters: torch.autograd.grad(loss, parameters),
                lambda loss, parameters=parameters: loss.backward(inputs=parameters[:2]),
            ):
                loss = step(*mine)
                with pytest.raises(RuntimeError, match="grad and inputs= are not possible here"):
                    backward(loss)
                assert all(parameter.grad is None for parameter in parameters)
                loss.backward()
                model.zero_grad()
            step(*mine).backward()


@on_processes(2)
def test_fsdp1_inside_reduces_in_each_micro_batch(world: World) -> None:
    mine, whole = batches_of(world, [4, 3])
    _, expected = plain([whole])
    for size in MICRO_BATCH_SIZES:
        for orig in (True, False):
            model = FullyShardedDataParallel(
                made(), use_orig_params=orig, device_id=torch.device("cpu")
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            GradientCache(model, ClipLoss(), size)(*mine).backward()
            optimizer.step()
            with FullyShardedDataParallel.summon_full_params(model):
                found = {name: p.detach().clone() for name, p in model.module.named_parameters()}
            for name, parameter in made().named_parameters():
                wanted = parameter - expected[name]
                torch.testing.assert_close(found[name], wanted, rtol=0, atol=1e-9)


@on_processes(2)
def test_a_wrapped_parameter_in_the_loss_too(world: World) -> None:
    """Its gradient is reduced together with the wrapper's."""
    mine, whole = batches_of(world, [4, 3])
    for size in MICRO_BATCH_SIZES:
        for view in (False, True):
            truth, model = made(), made()
            value = ClipLoss(group="local")(*truth(*whole)) + truth.scale.square().sum()
            value.backward()
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view=view)

            def loss(*outputs, scale=model.scale):
                # Only rank 0 adds it, so the ranks differ before it is reduced.
                return ClipLoss()(*outputs) + (not world.rank) * 2 * scale.square().sum()

            for _ in range(2):
                wrapped.zero_grad()
                GradientCache(wrapped, loss, size)(*mine).backward()
                assert_same(wrapped, gradients(truth))


@on_processes(2)
def test_more_encoders_than_one_exchange_takes(world: World) -> None:
    towers = nn.ModuleList([Tower() for _ in range(6)]).double()
    for tower in towers:
        for parameter in tower.parameters():
            dist.broadcast(parameter.detach(), 0)
    wrapped = [DistributedDataParallel(tower) for tower in towers]
    batches = [torch.ones(2 + i * (world.rank + 1), WIDTH).double() for i in range(6)]
    seen = []

    def loss(*features):
        seen.append([len(x) for x in features])
        return sum(x.square().mean() for x in features) / 6 + features[0].sum()

    step = GradientCache(wrapped, loss, 2)
    for _ in range(3):
        step(*batches).backward()
    assert seen == [[len(batch) for batch in batches]] * 3
    for parameter in towers.parameters():
        gradient = parameter.grad.clone()
        dist.all_reduce(gradient)
        torch.testing.assert_close(gradient / world.size, parameter.grad)


@on_processes(2)
def test_a_parameter_that_ddp_waits_for_in_vain_is_named(world: World) -> None:
    mine, _ = batches_of(world, [4, 3])
    message = "every trainable parameter, and there is none of idle.weight, idle.bias: freeze what"
    for size in MICRO_BATCH_SIZES:
        for find_unused in (False, True):
            model = made()
            model.idle = nn.Linear(2, 2).double()
            model = DistributedDataParallel(model, find_unused_parameters=find_unused)
            step = GradientCache(model, ClipLoss(), size)
            if find_unused:
                step(*mine).backward()
                assert model.module.idle.weight.grad is None
            else:
                with pytest.raises(UnusedParameters, match=message):
                    step(*mine).backward()


@on_processes(2, 3)
def test_a_rank_that_leaves_backward_out_is_named(world: World) -> None:
    model = under_ddp(made())
    mine, _ = batches_of(world, [4, 3, 2][: world.size])
    step = GradientCache(model, ClipLoss(), 2)
    step(*mine).backward()
    loss = step(*mine)
    last = world.size - 1
    call = loss.backward if world.rank != last else functools.partial(step, *mine)
    with pytest.raises(ValueError, match=f"rank {last}: GradientCache, step 3 of") as caught:
        call()
    assert "GradientCache, backward pass of step 2" in str(caught.value)


@on_processes(2)
def test_ranks_that_train_and_evaluate_name_each_other(world: World) -> None:
    step = GradientCache(made(), ClipLoss(), 2)
    mine, _ = batches_of(world, [4, 3])
    message = "rank 0: GradientCache, step 1 of 1 batches; rank 1: GradientCache, evaluation of 1"
    with torch.set_grad_enabled(world.rank == 0), pytest.raises(ValueError, match=message):
        step(*mine)


@on_processes(2)
def test_evaluation_on_ranks_with_different_shards(world: World) -> None:
    for wrap in (lambda model: model, under_ddp, under_fsdp):
        mine, whole = batches_of(world, [5, 1])
        model = wrap(made())
        step = GradientCache(model, ClipLoss(), 2)
        with torch.no_grad():
            loss = step(*mine)
        assert all(parameter.grad is None for parameter in model.parameters())
        dist.all_reduce(loss)
        torch.testing.assert_close(loss / world.size, plain([whole])[0])
        step(*mine).backward()
        if wrap in (under_ddp, under_fsdp):
            assert_same(model, plain([whole])[1])


@on_processes(3)
def test_encoders_with_other_numbers_of_rows_on_each_rank(world: World) -> None:
    """Some ranks have passages and no query: each encoder has its own number of micro-batches."""

    class Join(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, sizes):
            ctx.mine = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1]))
            padded = [x.new_zeros(max(sizes), x.shape[1]) for _ in sizes]
            dist.all_gather(padded, F.pad(x, (0, 0, 0, max(sizes) - len(x))))
            return torch.cat([part[:n] for part, n in zip(padded, sizes, strict=True)])

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.clone()
            dist.all_reduce(gradient)
            return gradient[ctx.mine], None

    queries, passages = [3, 0, 2], [1, 7, 4]
    x = torch.randn(sum(queries), WIDTH, generator=torch.Generator().manual_seed(1)).double()
    y = torch.randn(sum(passages), WIDTH, generator=torch.Generator().manual_seed(2)).double()

    def whole_loss(x, y):
        return (x @ y.T).square().mean()

    model = made()
    whole_loss(model.image(x), model.text(y)).backward()
    expected = gradients(model)
    for wrap in (DistributedDataParallel, functools.partial(fully_shard)):
        model = made()
        encoders = [wrap(model.image), wrap(model.text)]
        step = GradientCache(
            encoders,
            lambda x, y: whole_loss(Join.apply(x, queries), Join.apply(y, passages)),
            (2, 3),
        )
        step(x.split(queries)[world.rank], y.split(passages)[world.rank]).backward()
        assert_same(model, expected)
