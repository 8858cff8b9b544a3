"""Micro-batches whose graphs are kept for the backward pass, so that they are encoded once."""

import gc
import os
import signal
import weakref

import pytest
import torch
from torch import nn

from megabatch.gradient_cache import GradientCache
from megabatch.losses import ClipLoss
from tests.gradient_cache import parallel
from tests.gradient_cache.towers import (
    SavedTensor,
    Tower,
    TwoTowers,
    assert_same,
    biased_loss,
    clip_loss,
    gradients,
    one_graph,
    pairs,
)
from tests.similarity.distributed.processes import World, on_processes

KEPT = (1, 2, 3, 100)  # of 3 micro-batches: 7 rows, 3 at a time


@pytest.mark.parametrize("kept", KEPT)
def test_one_model_with_shared_outputs(kept):
    model, batches = TwoTowers(), pairs()
    step = GradientCache(model, biased_loss, 3, kept_micro_batches=1)
    step.kept_micro_batches = kept  # may change between steps
    assert_same(
        lambda: step(*batches), lambda: biased_loss(*model(*batches)), model, tolerance=1e-12
    )
    recorded = [True] + [False] * max(0, 3 - kept) + [True] * 3
    assert model.image.graph_recorded == model.text.graph_recorded == recorded


@pytest.mark.parametrize("kept", [*KEPT, (1, 2)])
def test_two_encoders_with_dropout(kept):
    """Micro-batches draw the same random numbers as in one graph; the backward pass draws none."""
    towers, batches = nn.ModuleList([Tower(0.4), Tower(0.4)]), pairs()
    step = GradientCache(tuple(towers), clip_loss, 3, kept_micro_batches=kept)
    assert_same(lambda: step(*batches), lambda: one_graph(towers, batches, clip_loss, 3), towers)


class Graphs:
    """Counts the living graphs of towers: each saves one tensor of 8 columns."""

    def __init__(self):
        self._alive, self.peak = weakref.WeakSet(), 0

    def __call__(self):
        return len(self._alive)

    def pack(self, tensor):
        saved = SavedTensor(tensor)
        if tensor.shape[1:] == (8,) and type(tensor.grad_fn).__name__ == "AddmmBackward0":
            self._alive.add(saved)
            self.peak = max(self.peak, self())
        return saved


@pytest.fixture
def graphs():
    gc.disable()
    counted = Graphs()
    with torch.autograd.graph.saved_tensors_hooks(counted.pack, lambda saved: saved.tensor):
        yield counted
    gc.enable()


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: lambda x: t(x)], ids=["module", "lambda"])
@pytest.mark.parametrize(("kept", "most"), [(0, 1), (1, 2), (2, 4), (6, 12)])  # of both encoders
def test_peak_memory_is_that_of_the_kept_micro_batches(kept, most, wrap, graphs):
    tower = Tower()
    step = GradientCache((wrap(tower), wrap(tower)), clip_loss, 2, kept_micro_batches=kept)
    step(*pairs(12)).backward()
    assert graphs.peak == most


def test_the_graphs_that_are_kept_and_freed(graphs):
    towers = (Tower(), Tower())
    step = GradientCache(towers, clip_loss, 2, kept_micro_batches=2)
    with torch.no_grad():
        step(*pairs())
    assert graphs() == 0
    loss = step(*pairs())
    assert graphs() == 4
    loss.backward()
    assert graphs() == 0
    loss = step(*pairs())
    del loss
    assert graphs() == 0
    towers[0].requires_grad_(False).graph_recorded.clear()
    loss = step(*pairs())
    assert graphs() == 2
    loss.backward()
    assert len(towers[0].graph_recorded) == 4  # once per micro-batch


class Stop(Exception):
    pass


@pytest.mark.parametrize("where", ["encoder", "loss", "second pass"])
def test_an_exception_frees_the_graphs_though_its_traceback_lives(graphs, where):
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


def counting(model):
    """A list that receives whether each forward pass of the image tower records a graph."""
    calls = []
    model.image.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    return calls


@on_processes(2)
def test_ddp_and_fsdp2_inside(world: World) -> None:
    """The micro-batch that synchronises is encoded again."""
    for wrap in (parallel.under_ddp, parallel.under_fsdp):
        for sizes in parallel.SHARDS:
            mine, whole = parallel.batches_of(world.rank, sizes)
            _, expected = parallel.on_one_process([whole])
            model = parallel.new_model()
            calls = counting(model)
            model = wrap(model)
            # Ranks use the smallest number.
            step = GradientCache(model, ClipLoss(), 1, kept_micro_batches=2 + world.rank)
            count = max(sizes)
            for _ in range(2):  # DDP rebuilds its buckets after the first step
                model.zero_grad()
                calls.clear()
                step(*mine).backward()
                parallel.assert_same(model, expected)
                kept = min(2, count - 1)
                again = count - kept
                assert calls == [False] * again + [True] * (kept + again)
                assert set(parallel.synchronised(model)) <= {True, (True, True)}
