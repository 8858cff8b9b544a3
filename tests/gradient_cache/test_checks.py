"""Warnings if nothing averages the encoders' gradients over the ranks, and if the passes differ."""

import functools
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch.gradient_cache import GradientCache
from megabatch.gradient_cache.wrappers import weights_differ
from tests.gradient_cache.towers import Tower, TwoTowers, biased_loss, clip_loss, pairs
from tests.similarity.distributed.processes import World, on_processes

#: Weights are compared at the beginning of the second and of the tenth.
STEPS = 10


def seen_in(run, part):
    """The warnings with this part that a function's call gives, as strings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in seen if w.category is UserWarning and part in str(w.message)]


def warnings_of_training(
    world, make=lambda tower: tower, synchronise=lambda model: None, every=1, steps=STEPS, **options
):
    """The warnings of a few steps on this rank; each rank has batches of its own."""
    torch.manual_seed(0)
    model = make(Tower())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    encoders = options.pop("encoders", lambda model: (model, model))(model)
    step = GradientCache(encoders, clip_loss, 3, **options)
    torch.manual_seed(world.rank)

    def train():
        for i in range(steps):
            step(*pairs()).backward()
            if (i + 1) % every == 0:
                synchronise(model)
                optimizer.step()
                optimizer.zero_grad()

    return seen_in(train, "ranks differ")


@on_processes(2)
def test_one_warning_of_encoders_that_are_not_synchronised(world: World) -> None:
    def functions(tower):
        return lambda x: tower(x), functools.partial(tower)

    for step, options in ((2, {}), (2, {"encoders": functions, "steps": 3}), (10, {"every": 4})):
        messages = warnings_of_training(world, **options)
        assert len(messages) == (world.rank == 0)
        for message in messages:
            assert f"at the beginning of step {step}" in message
            assert "the 1-norm of a parameter is" in message
            assert "on rank 0 and" in message
            assert "on rank 1. Nothing" in message


def average(model):
    """Like DeepSpeed, or Lightning's DDP around a whole training step."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@on_processes(2)
def test_no_warning_if_weights_stay_the_same(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    for make in (DistributedDataParallel, lambda tower: fully_shard(tower, mesh=mesh)):
        assert warnings_of_training(world, make, steps=3) == []
    assert warnings_of_training(world, synchronise=average, steps=3) == []
    assert warnings_of_training(world, synchronise=average, every=2) == []
    assert warnings_of_training(world, group="local", steps=3) == []  # compares nothing


def differ(*parameters):
    return weights_differ(2, parameters, None)


@on_processes(2)
def test_the_parameters_that_are_compared(world: World) -> None:
    """Any of them; shards are not; NaN equals NaN."""
    same = [nn.Parameter(torch.tensor([math.nan, 1.0])), nn.Parameter(torch.ones(2))]
    assert not differ(*same)
    for count in (1, 5):
        others = [nn.Parameter(torch.ones(i + 1)) for i in range(count)]
        assert not differ(*others)
        assert differ(*others, nn.Parameter(torch.tensor([1.0 * world.rank])))
    torch.manual_seed(world.rank)
    mesh = init_device_mesh("cpu", (world.size,))
    assert not differ(*fully_shard(Tower(), mesh=mesh).parameters())
    assert differ(*Tower().parameters())


class OwnGenerator(Tower):
    """Dropout with random numbers that no global generator gives."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        keep = torch.rand(x.shape, generator=self.generator) > 0.2
        return super().forward(x * keep)


class Counting(Tower):
    """Counts its calls in an attribute, on which its features depend."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x * self.calls)


class GradMode(Tower):
    """Other features where no graph is recorded, as of a fast path that leaves something out."""

    def forward(self, x):
        return super().forward(x if torch.is_grad_enabled() else x.relu())


class GrowingNoise(OwnGenerator):
    """Random numbers whose weight is zero in the first step."""

    weight = 0.0

    def forward(self, x):
        noise = torch.randn(x.shape, generator=self.generator)
        return Tower.forward(self, x + self.weight * noise)


def of_passes(steps, after=lambda: None):
    """The warnings of differences between passes in these steps, each with batches of its own."""

    def run():
        for step in steps:
            step(*pairs()).backward()
            after()

    return seen_in(run, "in the second pass")


@pytest.mark.parametrize("make", [OwnGenerator, Counting, GradMode])
def test_one_warning_of_an_encoder_that_gives_other_features_in_the_second_pass(make):
    (message,) = of_passes([GradientCache((Tower(), make()), clip_loss, 3)] * 10)
    assert "encoder 1 gave different features in the second pass than in the first: they" in message
    assert "% in norm, so its gradients are not those of the loss" in message


def test_a_difference_that_comes_with_training_is_seen_in_the_tenth_step():
    tower = GrowingNoise()
    step = GradientCache((tower, tower), clip_loss, 3)
    assert not of_passes([step] * 9, lambda: setattr(tower, "weight", tower.weight + 0.1))
    assert len(of_passes([step])) == 1


@pytest.mark.parametrize(
    "options", [{}, {"feature_dtype": torch.bfloat16}, {"kept_micro_batches": 1}]
)
def test_no_warning_of_passes_that_agree(options):
    bn = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    half = Tower(dropout=0.5).bfloat16()
    encoders = (bn, lambda x: half(x.bfloat16()).double())
    steps = [
        GradientCache(encoders, lambda x, y: clip_loss(x.double(), y.double()), 4, **options),
        GradientCache(TwoTowers(dropout=0.5), biased_loss, 3, kept_micro_batches=1),
        GradientCache((Tower(), Tower()), clip_loss, 100),
    ]
    with torch.autocast("cpu", torch.bfloat16):
        assert not of_passes(steps)
