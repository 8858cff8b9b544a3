"""Buffers that forward passes update are the same in both passes, and updated once."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    WIDTH,
    Tower,
    assert_same_gradients,
    clip_loss,
    gradients,
    one_graph,
    pairs,
)
from tests.similarity.distributed.processes import World, on_processes


class RunningMean(nn.Module):
    """Subtracts a mean that each call updates: in place, by another tensor or by its data."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("absent", None)

    def forward(self, x):
        if self.how == "in place":
            self.mean += 0.5 * (x.mean(0) - self.mean)
        elif self.how == "data in place":
            self.mean.data.mul_(0.5).add_(0.5 * x.mean(0))
        elif self.how == "data replaced":
            self.mean.data = 0.5 * (x.mean(0) + self.mean)
        else:
            self.mean = 0.5 * (x.mean(0) + self.mean)
        return x - self.mean


class Queue(nn.Module):
    """Subtracts the mean of the latest rows, as MoCo holds them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(9, WIDTH))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.rows[(torch.arange(len(x)) + self.at) % 9] = x.detach()
        self.at += len(x)
        return x - self.rows.mean(0)


class With(Tower):
    """A tower behind another layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return super().forward(self.layer(x))


def made(kind):
    if kind == "spectral norm by hooks":
        return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
    if kind == "spectral norm":
        return parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return Queue() if kind == "queue" else RunningMean(kind)


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 100])
@pytest.mark.parametrize(
    "kind",
    [
        "in place",
        "replaced",
        "data in place",
        "data replaced",
        "queue",
        "spectral norm by hooks",
        "spectral norm",
    ],
)
def test_both_passes_find_the_same_buffers(kind, micro_batch_size, kept):
    tower = With(made(kind))
    plain = copy.deepcopy(tower)
    step = GradientCache((tower, tower), clip_loss, micro_batch_size, kept_micro_batches=kept)
    for _ in range(2):
        batches = pairs()
        expected, _ = one_graph((plain, plain), batches, clip_loss, micro_batch_size)
        value = step(*batches)
        value.backward()
        torch.testing.assert_close(value.detach(), expected, rtol=1e-12, atol=0)
    assert_same_gradients(gradients(tower), gradients(plain))
    for found, wanted in zip(tower.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_what_happens_before_the_backward_pass_stays():
    tower, batches = With(RunningMean("in place")), pairs()
    mean = tower.layer.mean
    step = GradientCache((tower, tower), clip_loss, 3)
    waiting, other = step(*batches), step(*pairs())
    (waiting + other).backward()
    waiting = step(*batches)
    tower.layer.mean.fill_(5.0)
    waiting.backward()
    assert torch.equal(mean, torch.full((WIDTH,), 5.0))
    assert tower.layer.mean is mean


def test_an_exception_in_the_second_pass_leaves_them():
    tower, batches = With(RunningMean("in place")), pairs()
    value = GradientCache((tower, tower), clip_loss, 3)(*batches)
    before = tower.layer.mean.clone()

    def fail(module, args):
        if len(args[0]) < 3:  # the last micro-batch
            raise RuntimeError("stop")

    tower.layer.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        value.backward()
    assert torch.equal(tower.layer.mean, before)


@on_processes(2)
def test_rows_that_are_no_data_leave_no_trace(world: World) -> None:
    """The second rank has fewer micro-batches, and encodes a row of its own beside the first."""
    for kept in (0, 2):
        tower = With(RunningMean("in place")).double()
        x, y = (torch.randn(5 - 3 * world.rank, WIDTH, dtype=torch.float64) for _ in range(2))
        plain = copy.deepcopy(tower.layer)
        for part in (*x.split(2), *y.split(2)):
            plain(part)
        GradientCache((tower, tower), torch.nn.functional.mse_loss, 2, kept_micro_batches=kept)(
            x, y
        ).backward()
        torch.testing.assert_close(tower.layer.mean, plain.mean, rtol=1e-12, atol=0)
