"""Micro-batches whose graphs wait for the backward pass, so that they are encoded once."""

import copy
import gc
import os
import signal
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from megabatch.gradient_cache import GradientCache
from megabatch.losses import ClipLoss
from tests.gradient_cache import test_wrappers as wrapped
from tests.gradient_cache.test_encoding import live_rows
from tests.gradient_cache.towers import (
    DIMS,
    WIDTH,
    Tower,
    TwoTowers,
    assert_same_gradients,
    biased_loss,
    clip_loss,
    gradients,
    one_graph,
    pairs,
)
from tests.similarity.distributed.processes import World, on_processes

KEPT = (1, 2, 3, 100)  # of the three micro-batches of 7 rows in threes, or of 3 and 4 of two towers


@pytest.mark.parametrize("kept", KEPT)
def test_one_model_with_shared_outputs(kept):
    model = TwoTowers()
    batches = pairs()
    reference = copy.deepcopy(model)
    expected = biased_loss(*reference(*batches))
    expected.backward()
    value = GradientCache(model, biased_loss, 3, kept_micro_batches=kept)(*batches)
    value.backward()
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    assert_same_gradients(gradients(model), gradients(reference), 1e-12)
    recorded = [False] * max(0, 3 - kept) + [True] * 3
    assert model.image.graph_recorded == model.text.graph_recorded == recorded


@pytest.mark.parametrize("kept", [*KEPT, (1, 2)])
def test_two_encoders_with_dropout(kept):
    """The micro-batches draw the same numbers as without, and leave the generator as it was."""
    towers = nn.ModuleList([Tower(dropout=0.4), Tower(dropout=0.4)])
    plain = copy.deepcopy(towers)
    batches = pairs()
    torch.manual_seed(3)
    expected, after = one_graph(plain, batches, clip_loss, 3)
    torch.manual_seed(3)
    value = GradientCache(tuple(towers), clip_loss, 3, kept_micro_batches=kept)(*batches)
    torch.rand(5)
    before = torch.get_rng_state()
    value.backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(value, expected)
    assert_same_gradients(gradients(towers), gradients(plain), 1e-12)
    torch.manual_seed(3)
    GradientCache(tuple(towers), clip_loss, 3, kept_micro_batches=kept)(*batches)
    assert torch.equal(torch.get_rng_state(), after)


def test_one_encoder_for_both_batches_and_gradients_of_inputs():
    tower = Tower()
    batches = [x.requires_grad_() for x in pairs()]
    clip_loss(*map(tower, batches)).backward()
    expected = [*gradients(tower), *(x.grad for x in batches)]
    for kept in KEPT:
        tower.zero_grad()
        for x in batches:
            x.grad = None
        GradientCache((tower, tower), clip_loss, 3, kept_micro_batches=kept)(*batches).backward()
        assert_same_gradients([*gradients(tower), *(x.grad for x in batches)], expected, 1e-12)


def test_the_number_may_change_between_steps():
    tower, batches = Tower(), pairs(6)
    step = GradientCache((tower, tower), clip_loss, 2)
    calls = []
    for kept in (0, 2, 1, 0):
        step.kept_micro_batches = kept
        tower.graph_recorded.clear()
        step(*batches).backward()
        calls.append(len(tower.graph_recorded))
    assert calls == [12, 8, 10, 12]


def test_weights_that_autocast_has_cast_without_a_graph_get_their_gradients():
    towers = nn.ModuleList([Tower(), Tower()]).float()
    batches = [x.float() for x in pairs()]
    found = []
    for kept in (0, 1, 2):
        towers.zero_grad()
        step = GradientCache(
            tuple(towers),
            lambda x, y: clip_loss(x.float(), y.float()),
            3,
            kept_micro_batches=kept,
        )
        with torch.autocast("cpu", torch.bfloat16):
            loss = step(*batches)
        loss.backward()
        found.append(gradients(towers))
    for kept in found[1:]:
        for gradient, expected in zip(kept, found[0], strict=True):
            assert (gradient - expected).norm() < 0.01 * expected.norm()


def test_memory_is_that_of_the_kept_micro_batches_and_is_freed_before_others_are_encoded():
    tower, batches = Tower(), pairs(12)
    one = live_rows(pairs(2)[:1], lambda x: tower(x).sum().backward())
    for kept, most in ((0, 1), (1, 2), (2, 4), (6, 12)):  # of both encoders
        step = GradientCache((tower, tower), clip_loss, 2, kept_micro_batches=kept)
        assert live_rows(batches, lambda x, y, step=step: step(x, y).backward()) == most * one


class Saved:
    def __init__(self, tensor):
        self.tensor = tensor.detach()


@pytest.fixture
def graphs():
    """A function that counts the graphs of towers that are alive: each saves one such tensor."""
    alive = weakref.WeakSet()

    def pack(tensor):
        saved = Saved(tensor)
        if tensor.shape[1:] == (8,) and type(tensor.grad_fn).__name__ == "AddmmBackward0":
            alive.add(saved)
        return saved

    gc.disable()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        yield lambda: len(alive)
    gc.enable()


def test_evaluation_and_constants_keep_nothing(graphs):
    towers = (Tower(), Tower())
    step = GradientCache(towers, clip_loss, 2, kept_micro_batches=2)
    with torch.no_grad():
        step(*pairs())
    assert graphs() == 0
    loss = step(*pairs())
    assert graphs() == 4
    loss.backward()
    assert graphs() == 0
    towers[0].requires_grad_(False)
    towers[0].graph_recorded.clear()
    loss = step(*pairs())
    assert graphs() == 2
    loss.backward()
    assert len(towers[0].graph_recorded) == 4  # once per micro-batch


def test_a_loss_that_is_dropped_frees_them(graphs):
    loss = GradientCache((Tower(), Tower()), clip_loss, 2, kept_micro_batches=2)(*pairs())
    assert graphs() == 4
    del loss
    assert graphs() == 0


class Stop(Exception):
    pass


@pytest.mark.parametrize("where", ["encoder", "loss", "second pass"])
def test_an_exception_frees_them_though_its_traceback_lives(graphs, where):
    towers = (Tower(), Tower())
    before = {"encoder": 3, "second pass": 4}.get(where)

    def interrupt(*_):
        if len(towers[1].graph_recorded) == before:
            os.kill(os.getpid(), signal.SIGINT)

    towers[1].register_forward_pre_hook(interrupt)

    def loss(x, y):
        assert graphs() == 4
        if where == "loss":
            raise Stop
        return clip_loss(x, y)

    step = GradientCache(towers, loss, 2, kept_micro_batches=2)
    with pytest.raises((Stop, KeyboardInterrupt)) as caught:
        step(*pairs()).backward()
    assert caught.value.__traceback__ is not None
    assert graphs() == 0
    assert gradients(*towers) == [None] * len(gradients(*towers))


def test_a_second_backward_and_retain_graph_are_refused(graphs):
    loss = GradientCache((Tower(), Tower()), clip_loss, 2, kept_micro_batches=2)(*pairs())
    with pytest.raises(RuntimeError, match="retain_graph=True is not possible"):
        loss.backward(retain_graph=True)
    assert graphs() == 4
    loss.backward()
    assert graphs() == 0
    with pytest.raises(RuntimeError, match=r"got a second one|second time"):
        loss.backward()


def test_an_output_that_the_loss_ignores():
    towers = (Tower(), Tower())
    step = GradientCache(towers, lambda x, y: x.square().sum() + x[0, 0], 3, kept_micro_batches=2)
    step(*pairs()).backward()
    assert [len(tower.graph_recorded) for tower in towers] == [4, 3]
    assert gradients(towers[1]) == [None] * 4


def test_parameters_out_of_sight_and_reentrant_checkpoints():
    class Hidden(nn.Module):
        def __init__(self, tower):
            super().__init__()
            self.seen = nn.Linear(WIDTH, WIDTH)
            self.encode = tower.forward  # a method: its parameters are not this module's

        def forward(self, x):
            return self.encode(self.seen(x))

    towers = nn.ModuleList([Tower(), Tower()])
    hidden = Hidden(towers[0])

    def checkpointed(x):
        return checkpoint(towers[1], x.clone().requires_grad_(), use_reentrant=True)

    batches = pairs()
    clip_loss(hidden(batches[0]), checkpointed(batches[1])).backward()
    expected = [*gradients(towers), hidden.seen.weight.grad]
    towers.zero_grad()
    hidden.zero_grad()
    towers[0].graph_recorded.clear()
    GradientCache((hidden, checkpointed), clip_loss, 3, kept_micro_batches=1)(*batches).backward()
    assert_same_gradients([*gradients(towers), hidden.seen.weight.grad], expected, 1e-12)
    assert len(towers[0].graph_recorded) == 6  # not kept


def test_parameters_out_of_sight_that_only_a_later_micro_batch_uses():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = nn.Linear(WIDTH, WIDTH)
            self.out_of_sight = [Tower()]

        def forward(self, x):
            x = self.seen(x)
            return self.out_of_sight[0](x) if len(x) == 1 else x[:, :DIMS]  # in the last one

    model, batches, found = Sometimes(), pairs(), []
    for kept in (0, 2):
        model.zero_grad()
        model.out_of_sight[0].zero_grad()
        GradientCache((model, model), clip_loss, 3, kept_micro_batches=kept)(*batches).backward()
        found.append(gradients(model, model.out_of_sight[0]))
    assert_same_gradients(found[1], found[0], 1e-12)


def test_batch_normalisation_counts_each_micro_batch_once():
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8))
    reference = copy.deepcopy(model)
    batches = pairs(6)
    for kept, one in ((0, reference), (2, model)):
        GradientCache((one, one), clip_loss, 2, kept_micro_batches=kept)(*batches).backward()
    assert_same_gradients(gradients(model), gradients(reference), 1e-12)
    for mine, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (-1, ValueError, "kept_micro_batches: expected at least 0, got -1"),
        (1.0, TypeError, "kept_micro_batches: expected an int, got float"),
        ((1, 2, 3), ValueError, "kept_micro_batches: expected one number, or one per encoder, 2"),
    ],
)
def test_bad_numbers(value, error, message):
    with pytest.raises(error, match=message):
        GradientCache((Tower(), Tower()), clip_loss, 2, kept_micro_batches=value)
    step = GradientCache((Tower(), Tower()), clip_loss, 2)
    step.kept_micro_batches = value
    with pytest.raises(error, match=message):
        step(*pairs())


def counting(model):
    """Note forward passes of the image tower, by whether they record a graph."""
    calls = []
    model.image.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    return calls


@on_processes(2)
def test_ddp_and_fsdp2_inside(world: World) -> None:
    """Equal, unequal and empty shards; the micro-batch that synchronises is encoded again."""
    for wrap in (wrapped.under_ddp, wrapped.under_fsdp):
        for sizes in wrapped.sizes_of(world):
            mine, whole = wrapped.batches_of(world, sizes)
            _, expected = wrapped.plain([whole])
            model = wrapped.made()
            calls = counting(model)
            model = wrap(model)
            step = GradientCache(model, ClipLoss(), 1, kept_micro_batches=2)
            count = max(sizes)
            for _ in range(2):  # DDP arranges its buckets anew after the first step
                model.zero_grad()
                calls.clear()
                step(*mine).backward()
                wrapped.assert_same(model, expected)
                kept = min(2, count - 1)
                again = count - kept
                assert calls == [False] * again + [True] * (kept + again)
                assert set(wrapped.synchronised(model)) <= {True, (True, True)}


@on_processes(2)
def test_ddp_with_unused_parameters_and_fsdp2_that_keeps_weights(world: World) -> None:
    mine, whole = wrapped.batches_of(world, [4, 3])
    _, expected = wrapped.plain([whole])

    def find_unused(model):
        return DistributedDataParallel(model, find_unused_parameters=True)

    def keep_weights(model):  # as the trainer does
        for part in (model.image, model.text, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        return model

    mesh = init_device_mesh("cpu", (world.size,))
    for wrap in (find_unused, keep_weights):
        model = wrap(wrapped.made())
        step = GradientCache(model, ClipLoss(), 1, kept_micro_batches=100)
        for _ in range(2):
            model.zero_grad()
            step(*mine).backward()
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            wrapped.assert_same(model, expected)


@on_processes(2)
def test_ranks_use_the_smallest_number(world: World) -> None:
    mine, whole = wrapped.batches_of(world, [4, 4])
    model = wrapped.made()
    calls = counting(model)
    step = GradientCache(
        wrapped.under_ddp(model), ClipLoss(), 1, kept_micro_batches=1 + 2 * world.rank
    )
    step(*mine).backward()
    assert calls == [False] * 3 + [True] * 4
    wrapped.assert_same(model, wrapped.plain([whole])[1])


@on_processes(2)
def test_two_losses_added_and_one_wrapper_for_two_batches(world: World) -> None:
    parts = [wrapped.batches_of(world, [4, 3], seed) for seed in range(2)]
    _, expected = wrapped.plain([whole for _, whole in parts], [1.0, 3.0])
    for wrap in (wrapped.under_ddp, wrapped.under_fsdp):
        for second in (2, 8):  # 8: its only micro-batch waits beside the other step's
            model = wrap(wrapped.made())
            first_step = GradientCache(model, ClipLoss(), 1, kept_micro_batches=2)
            second_step = GradientCache(model, ClipLoss(), second, kept_micro_batches=1)
            (first_step(*parts[0][0]) + 3 * second_step(*parts[1][0])).backward()
            wrapped.assert_same(model, expected)
    mine, whole = parts[0]
    tower, truth = wrapped.made().image, wrapped.made().image
    ClipLoss(group="local")(truth(whole[0]), truth(whole[1]), 3.0).backward()
    encoder = DistributedDataParallel(tower)
    step = GradientCache((encoder, encoder), ClipLoss(), 1, kept_micro_batches=2)
    step(*mine, logit_scale=3.0).backward()
    wrapped.assert_same(tower, wrapped.gradients(truth))


@on_processes(2)
def test_ddp_around_the_step_and_fsdp1_inside(world: World) -> None:
    mine, whole = wrapped.batches_of(world, [4, 3])
    _, expected = wrapped.plain([whole])
    around = wrapped.TrainingStep(wrapped.made(), 1)
    around.step.kept_micro_batches = 2
    around = DistributedDataParallel(around)
    around(*mine).backward()
    wrapped.assert_same(around, expected)

    model = wrapped.made()
    calls = counting(model)
    sharded = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    GradientCache(sharded, ClipLoss(), 1, kept_micro_batches=2)(*mine).backward()
    optimizer.step()
    assert calls == [False] * 4 + [True] * 4  # none is kept
    with FullyShardedDataParallel.summon_full_params(sharded):
        for name, parameter in wrapped.made().named_parameters():
            found = dict(sharded.module.named_parameters())[name]
            torch.testing.assert_close(found, parameter - expected[name], rtol=0, atol=1e-9)
