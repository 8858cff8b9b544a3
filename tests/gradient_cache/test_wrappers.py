"""DDP around a whole training step; DDP and FSDP inside the encoders; float64 on Gloo."""

import copy
import functools
import itertools
import math
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megabatch.gradient_cache import GradientCache, UnusedParameters
from megabatch.gradient_cache.wrappers import weights_differ
from megabatch.losses import ClipLoss
from tests.gradient_cache import towers
from tests.gradient_cache.parallel import (
    KEPT,
    MICRO_BATCH_SIZES,
    SHARDS,
    WIDTH,
    Gather,
    Tower,
    TrainingStep,
    assert_same,
    batches_of,
    count_reductions,
    gradients,
    new_model,
    on_one_process,
    sharded,
    synchronised,
    under_ddp,
    under_fsdp,
)
from tests.similarity.distributed.processes import World, on_processes


def counted(module, counts, **options):
    """The module under DDP; its reductions, of one bucket, are counted."""
    wrapped = DistributedDataParallel(module, **options)
    count_reductions(wrapped, counts)
    return wrapped


def image_locked(wrap):
    def locked(model, counts):
        model.image.requires_grad_(False)
        return wrap(model, counts)

    return locked


def fsdp(model, counts):
    return under_fsdp(model)


def fsdp_that_keeps_weights(model, counts):  # as the trainer does
    under_fsdp(model, reshard_after_forward=False).set_reshard_after_backward(False)
    return model


def two_towers(model, x, y):
    return model.image(x), model.text(y)


def one_tower(model, x, y):
    return model.image(x), model.image(y)


searching = functools.partial(counted, find_unused_parameters=True)
#: Encoders of a model, its outputs without them, and reductions per step.
SETUPS = {
    "one DDP": (counted, nn.Module.__call__, 1),
    "two DDP": (lambda m, c: (counted(m.image, c), counted(m.text, c)), two_towers, 2),
    "one DDP for both": (lambda m, c: (counted(m.image, c),) * 2, one_tower, 1),
    "DDP with a search": (searching, nn.Module.__call__, 1),
    "FSDP": (fsdp, nn.Module.__call__, 3),  # each of the three sharded modules once
    "FSDP with weights": (fsdp_that_keeps_weights, nn.Module.__call__, 3),
    "two FSDP": (lambda m, c: (sharded(m.image), sharded(m.text)), two_towers, 2),
    "locked in DDP": (image_locked(counted), nn.Module.__call__, 1),
    "locked in FSDP": (image_locked(fsdp), nn.Module.__call__, 2),
}


def clip_loss(x, y, logit_scale, sizes):
    """ClipLoss by other collectives than a reduce-scatter, which are counted."""
    place = torch.arange(len(x)) + sum(sizes[: dist.get_rank()])
    sides = (
        F.cross_entropy(logit_scale * a @ Gather.apply(b, sizes).T, place, reduction="sum")
        for a, b in ((x, y), (y, x))
    )
    return dist.get_world_size() * sum(sides) / (2 * sum(sizes))


def counting(model):
    """A list that receives whether each forward pass of the image tower records a graph."""
    calls = []
    model.image.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    return calls


class CountReduceScatter(TorchDispatchMode):
    """Counts FSDP2's reductions of gradients."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


@on_processes(2)
def test_two_processes_give_the_gradients_of_one(world: World) -> None:
    for name, (wrap, plain, reductions) in SETUPS.items():
        scale = {} if plain is nn.Module.__call__ else {"logit_scale": 3.0}
        cases = [*zip(((3, 6), (0, 5), (3, 6)), KEPT, strict=True)]
        for sizes, (size, kept) in cases if name in ("one DDP", "FSDP") else cases[1:]:
            mine, whole = batches_of(world.rank, sizes)
            model, truth, counts = new_model(), new_model(), []
            truth.image.requires_grad_("locked" not in name)
            calls = counting(model)
            expected = ClipLoss(group="local")(*plain(truth, *whole), **scale)
            (2 * expected).backward()
            encoders, fewest = wrap(model, counts), kept + world.rank  # the ranks' smallest counts
            step = GradientCache(encoders, clip_loss, size, kept_micro_batches=fewest)
            with torch.no_grad():
                evaluated = step(*mine, **scale, sizes=sizes)
            with CountReduceScatter() as scattered:
                for _ in range(2):  # DDP rebuilds its buckets after the first
                    calls.clear()
                    (value := step(*mine, **scale, sizes=sizes)).backward()
            value = value.detach()
            torch.testing.assert_close(evaluated, value)
            dist.all_reduce(value)
            case = f"{name}, shards {sizes}, micro-batches of {size}, {kept} of them kept"
            assert abs(value / world.size - expected) < 1e-9, case
            assert_same(model, gradients(truth), case)
            assert reductions == (len(counts) + scattered.count) / 2, case
            if plain is nn.Module.__call__:  # what synchronises is encoded again
                again = 0 if size >= max(sizes) else -(-max(sizes) // size) - kept
                assert calls == [False] * again + [True] * (again + max(kept, not again)), case


@pytest.fixture
def _one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def delayed(tower):
    names = {"delay_all_reduce_named_params": [*tower.second.named_parameters("second")]}
    return DistributedDataParallel(tower, param_to_hook_all_reduce=tower.first.weight, **names)


def zero3(tower):
    """With the attribute that DeepSpeed gives to parameters that it partitions."""
    for number, parameter in enumerate(tower.parameters()):
        parameter.ds_id = number
    return tower


fsdp1 = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"))


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize(
    ("wrap", "refused"),
    [
        (functools.partial(DistributedDataParallel, static_graph=True), "static_graph"),
        (delayed, "delay_all_reduce_named_params"),
        (fsdp1, r"\(FSDP1\) reduces the gradients of encoder 0"),
        (lambda tower: fsdp1(tower, use_orig_params=True).module, r"\(FSDP1\) .* of encoder 0"),
        (zero3, r"ZeRO 3 has only parts of the weights of encoder 0 .* expected ZeRO 1 or 2"),
    ],
)
def test_ddp_that_cannot_hold_back_reductions_is_refused(wrap, refused):
    encoder, x = wrap(Tower()), torch.ones(4, WIDTH)
    with pytest.raises(ValueError, match=refused):
        GradientCache((encoder, encoder), ClipLoss(), 2)(x, x)


@pytest.mark.usefixtures("_one_process")
def test_an_encoder_that_the_loss_does_not_use_stops_no_later_step():
    encoders = tuple(DistributedDataParallel(Tower()) for _ in range(2))
    x, unused = torch.randn(4, WIDTH), encoders[1].module
    for loss in (lambda x, y: x.square().sum(), lambda x, y: (x * y).sum()):
        GradientCache(encoders, loss, 4)(x, x).backward()
    features = encoders[0].module(x) * unused(x)
    expected = torch.autograd.grad(features.sum(), list(unused.parameters()))
    for parameter, gradient in zip(unused.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@on_processes(2)
def test_ddp_around_the_whole_step_reduces_once_per_update(world: World) -> None:
    options = {}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}
    cases = [*zip(SHARDS, KEPT, options, strict=True), (SHARDS[2], KEPT[0], options[1])]
    for sizes, (size, kept), options in cases:
        parts = [batches_of(world.rank, sizes, seed) for seed in range(2)]
        expected_loss, expected = on_one_process([whole for _, whole in parts], [0.5, 0.5])
        wrapped = DistributedDataParallel(TrainingStep(new_model(), size, kept), **options)
        count_reductions(wrapped, reductions := [])
        with wrapped.no_sync():
            first = wrapped(*parts[0][0]) / 2
            first.backward()
        loss = wrapped(*parts[1][0]) / 2
        loss.backward()
        assert len(reductions) == 1
        assert_same(wrapped, expected)
        total = (first + loss).detach()
        dist.all_reduce(total)
        torch.testing.assert_close(total / world.size, expected_loss)


@on_processes(2)
def test_fsdp_around_the_whole_step(world: World) -> None:
    for sizes, (size, kept) in zip(SHARDS, KEPT, strict=True):
        mine, whole = batches_of(world.rank, sizes)
        _, expected = on_one_process([whole])
        step = TrainingStep(new_model(), size, kept)
        sharded(step)
        step(*mine).backward()
        assert_same(step, expected, f"shards {sizes}, micro-batches of {size}, {kept} of them kept")


def leaves_inside(model):
    """Freeze the first layer and let its output require a gradient, as PEFT does."""
    model.image.first.requires_grad_(False)
    model.image.first.register_forward_hook(lambda module, args, out: out.requires_grad_())
    return model


def with_reentrant_checkpoint(model):
    forward = model.image.forward
    model.image.forward = lambda x: checkpoint(
        forward, x.clone().requires_grad_(), use_reentrant=True
    )
    return model


@on_processes(2)
def test_ddp_around_a_step_with_leaves_that_are_no_parameters(world: World) -> None:
    mine, whole = batches_of(world.rank, [4, 5])
    plain = leaves_inside(new_model())
    ClipLoss(group="local")(*plain(*whole)).backward()
    for size in MICRO_BATCH_SIZES:
        wrapped = DistributedDataParallel(TrainingStep(leaves_inside(new_model()), size))
        wrapped(*mine).backward()
        assert_same(wrapped, gradients(plain))
    step = TrainingStep(with_reentrant_checkpoint(new_model()), 2)
    loss = DistributedDataParallel(step)(*mine)
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel around the .* use_reentrant"):
        loss.backward()


@on_processes(2)
def test_wrappers_inside_with_two_losses_added(world: World) -> None:
    # The graph of an only micro-batch is kept beside the other step's.
    pairs = [(case, case) for case in KEPT] + [((2, 1), (8, 1))]
    for wrap, (cases, sizes) in itertools.product(
        (under_ddp, under_fsdp), zip(pairs, (*SHARDS, SHARDS[2]), strict=True)
    ):
        parts = [batches_of(world.rank, sizes, seed) for seed in range(2)]
        _, expected = on_one_process([whole for _, whole in parts], [1.0, 3.0])
        model = wrap(new_model())
        first, second = (
            GradientCache(model, ClipLoss(), n, kept_micro_batches=k) for n, k in cases
        )
        (first(*parts[0][0]) + 3 * second(*parts[1][0])).backward()
        assert_same(model, expected)


@on_processes(2)
def test_the_users_synchronisation_settings_hold_and_are_restored(world: World) -> None:
    """The settings when the step is called decide, not those when `backward()` is."""
    for size in MICRO_BATCH_SIZES:
        parts = [batches_of(world.rank, [4, 3], seed) for seed in range(2)]
        (first, _), (second, _) = parts
        _, expected = on_one_process([whole for _, whole in parts], [0.5, 0.5])
        model = under_ddp(new_model())
        step = GradientCache(model, ClipLoss(), size)
        with model.no_sync():
            loss = step(*first) / 2
        loss.backward()
        local = copy.deepcopy(gradients(model)["image.first.weight"])
        dist.broadcast(local, 0)
        same = torch.allclose(local, gradients(model)["image.first.weight"])
        assert same == (world.rank == 0)
        assert list(synchronised(model)) == [True]
        loss = step(*second) / 2
        with model.no_sync():
            loss.backward()
            assert list(synchronised(model)) == [False]
        assert_same(model, expected)

        model = under_fsdp(new_model())
        step = GradientCache(model, ClipLoss(), size)
        for batch, gradient, all_reduce in ((first, False, True), (second, True, False)):
            model.set_requires_gradient_sync(gradient)
            model.image.set_requires_all_reduce(all_reduce and gradient)
            before = list(synchronised(model))
            (step(*batch) / 2).backward()
            assert list(synchronised(model)) == before
            reduced = model.image.first.weight.grad is not None
            assert reduced == gradient
        assert_same(model, expected)


@on_processes(2)
def test_autograd_grad_is_refused_for_wrapped_encoders(world: World) -> None:
    mine, _ = batches_of(world.rank, [4, 3])
    for wrap, size in itertools.product((under_ddp, under_fsdp), MICRO_BATCH_SIZES):
        model = wrap(new_model())
        parameters = list(model.parameters())
        step = GradientCache(model, ClipLoss(), size)
        for backward, inputs in (
            (torch.autograd.grad, parameters),
            (torch.autograd.backward, parameters[:2]),
        ):
            loss = step(*mine)
            with pytest.raises(RuntimeError, match="grad and inputs= are not possible here"):
                backward(loss, inputs=inputs)
            assert all(parameter.grad is None for parameter in parameters)
            loss.backward()
            model.zero_grad()


@on_processes(2)
def test_a_wrapped_parameter_that_the_loss_uses(world: World) -> None:
    """The wrapper reduces its gradient from the loss together with that from the encoder."""
    mine, whole = batches_of(world.rank, [4, 3])
    for size, view in itertools.product(MICRO_BATCH_SIZES, (False, True)):
        truth, model = new_model(), new_model()
        value = ClipLoss(group="local")(*truth(*whole)) + truth.scale.square().sum()
        value.backward()
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=view)

        def loss(*outputs, scale=model.scale):
            # Only rank 0 adds it: gradients of the ranks differ before the reduction.
            return ClipLoss()(*outputs) + (not world.rank) * 2 * scale.square().sum()

        for _ in range(2):
            wrapped.zero_grad()
            GradientCache(wrapped, loss, size)(*mine).backward()
            assert_same(wrapped, gradients(truth))


@on_processes(2)
def test_a_parameter_without_a_gradient_under_ddp_is_named(world: World) -> None:
    mine, _ = batches_of(world.rank, [4, 3])
    message = "every trainable parameter, and there is none of idle.weight, idle.bias: freeze what"
    for size, find_unused in itertools.product(MICRO_BATCH_SIZES, (False, True)):
        model = new_model()
        model.idle = nn.Linear(2, 2).double()
        model = DistributedDataParallel(model, find_unused_parameters=find_unused)
        step = GradientCache(model, ClipLoss(), size)
        if find_unused:
            step(*mine).backward()
            assert model.module.idle.weight.grad is None
        else:
            with pytest.raises(UnusedParameters, match=message):
                step(*mine).backward()


@on_processes(2)
def test_a_rank_that_makes_another_call_is_named(world: World) -> None:
    """It leaves the backward pass out, or evaluates while the other one trains."""
    model = under_ddp(new_model())
    mine, _ = batches_of(world.rank, [4, 3])
    step = GradientCache(model, ClipLoss(), 2)
    loss = step(*mine)
    call = functools.partial(step, *mine) if world.rank else loss.backward
    with pytest.raises(ValueError, match="rank 1: GradientCache, step 2 of") as caught:
        call()
    assert "rank 0: GradientCache, backward pass of step 1" in str(caught.value)
    step = GradientCache(new_model(), ClipLoss(), 2)
    message = "rank 0: GradientCache, step 1 of 1 batches; rank 1: GradientCache, evaluation of 1"
    with torch.set_grad_enabled(world.rank == 0), pytest.raises(ValueError, match=message):
        step(*mine)


@on_processes(2)
def test_encoders_with_other_numbers_of_rows_on_each_rank(world: World) -> None:
    """Each encoder has its own number of micro-batches; a rank may have passages and no query."""
    queries, passages = [3, 0], [1, 7]
    x = torch.randn(sum(queries), WIDTH, generator=torch.Generator().manual_seed(1)).double()
    y = torch.randn(sum(passages), WIDTH, generator=torch.Generator().manual_seed(2)).double()

    def whole_loss(x, y):
        return (x @ y.T).square().mean()

    def loss(x, y):
        return whole_loss(Gather.apply(x, queries), Gather.apply(y, passages))

    model = new_model()
    whole_loss(model.image(x), model.text(y)).backward()
    expected = gradients(model)
    for wrap in (DistributedDataParallel, sharded):
        model = new_model()
        step = GradientCache([wrap(model.image), wrap(model.text)], loss, (2, 3))
        step(x.split(queries)[world.rank], y.split(passages)[world.rank]).backward()
        assert_same(model, expected)


def warnings_of_training(
    world, make=lambda tower: tower, synchronise=lambda model: None, every=1, steps=10, **options
):
    """The warnings of a few steps on this rank; each rank has batches of its own.

    Weights are compared at the beginning of the second and of the tenth.
    """
    torch.manual_seed(0)
    model = make(towers.Tower())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    encoders = options.pop("encoders", lambda model: (model, model))(model)
    step = GradientCache(encoders, towers.clip_loss, 3, **options)
    torch.manual_seed(world.rank)

    def train():
        for i in range(steps):
            step(*towers.pairs()).backward()
            if (i + 1) % every == 0:
                synchronise(model)
                optimizer.step()
                optimizer.zero_grad()

    return towers.seen_in(train, "ranks differ")


@on_processes(2)
def test_one_warning_of_encoders_that_are_not_synchronised(world: World) -> None:
    def functions(tower):
        return lambda x: tower(x), functools.partial(tower)

    for step, options in ((2, {}), (2, {"encoders": functions, "steps": 3}), (10, {"every": 4})):
        messages = warnings_of_training(world, **options)
        assert len(messages) == (world.rank == 0)
        expected = f"beginning of step {step}: the 1-norm of a parameter .* rank 0 and .* rank 1\\."
        assert all(re.search(expected, message) for message in messages)


def average(model):
    """Like DeepSpeed, or Lightning's DDP around a whole training step."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@on_processes(2)
def test_no_warning_if_weights_stay_the_same(world: World) -> None:
    for make in (DistributedDataParallel, sharded):
        assert warnings_of_training(world, make, steps=3) == []
    assert warnings_of_training(world, synchronise=average, every=2) == []
    assert warnings_of_training(world, group="local", steps=3) == []  # compares nothing


def differ(*parameters):
    return weights_differ(2, parameters, None)


@on_processes(2)
def test_the_parameters_that_are_compared(world: World) -> None:
    """Any of them; shards are not; NaN equals NaN."""
    same = [nn.Parameter(torch.tensor([math.nan, 1.0])), nn.Parameter(torch.ones(2))]
    assert not differ(*same)
    assert differ(*same, nn.Parameter(torch.tensor([1.0 * world.rank])), *same)
    torch.manual_seed(world.rank)
    assert not differ(*sharded(towers.Tower()).parameters())
    assert differ(*towers.Tower().parameters())
