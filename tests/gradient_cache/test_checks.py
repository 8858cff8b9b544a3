"""Warnings if nothing averages the encoders' gradients over the ranks, and if the passes differ."""

import functools
import itertools
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch.gradient_cache import GradientCache
from megabatch.gradient_cache.checks import PARAMETERS, DriftCheck
from tests.gradient_cache.towers import Tower, TwoTowers, biased_loss, clip_loss, pairs
from tests.similarity.distributed.processes import World, on_processes

STEPS = 12


def warnings_of_training(world, make, synchronise=lambda model: None, every=1, **options):
    """The warnings of a few steps on this rank; each rank has batches of its own."""
    torch.manual_seed(0)
    model = make(Tower())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = GradientCache((model, model), clip_loss, 3, **options)
    torch.manual_seed(world.rank)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for i in range(STEPS):
            step(*pairs()).backward()
            if (i + 1) % every == 0:
                synchronise(model)
                optimizer.step()
                optimizer.zero_grad()
    return [str(warning.message) for warning in seen if "ranks differ" in str(warning.message)]


@on_processes(2, 3)
def test_one_warning_of_encoders_that_are_not_synchronised(world: World) -> None:
    messages = warnings_of_training(world, lambda tower: tower)
    assert len(messages) == (world.rank == 0)
    for message in messages:
        assert "at the beginning of step 2" in message
        assert "layers.0.weight of encoder 0 add up to" in message
        assert "on rank 0 and" in message
        assert "on rank 1, a difference of" in message
        assert "DistributedDataParallel" in message


@on_processes(2)
def test_the_tenth_step_warns_under_accumulation(world: World) -> None:
    messages = warnings_of_training(world, lambda tower: tower, every=4)
    assert len(messages) == (world.rank == 0)
    assert all("step 10" in message for message in messages)


@on_processes(2)
def test_functions_as_encoders(world: World) -> None:
    def encode(x):
        return tower(x)

    torch.manual_seed(0)
    tower = Tower()
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
    step = GradientCache((encode, functools.partial(tower)), clip_loss, 3)
    torch.manual_seed(world.rank)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            step(*pairs()).backward()
            optimizer.step()
    assert [w.category for w in seen if "ranks differ" in str(w.message)] == [UserWarning] * (
        world.rank == 0
    )


def average(model):
    """Like DeepSpeed, or Lightning's DDP around a whole training step."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def sharded_by_fsdp1(tower):
    return FullyShardedDataParallel(tower, use_orig_params=True, device_id=torch.device("cpu"))


@on_processes(2)
def test_no_warning_if_weights_stay_the_same(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    for make in (DistributedDataParallel, lambda tower: fully_shard(tower, mesh=mesh)):
        assert warnings_of_training(world, make) == []
    assert warnings_of_training(world, lambda tower: tower, average) == []
    assert warnings_of_training(world, lambda tower: tower, average, every=2) == []


@on_processes(2)
def test_a_local_group_compares_nothing(world: World) -> None:
    assert warnings_of_training(world, lambda tower: tower, group="local") == []


@on_processes(2)
def test_sharded_weights_are_not_compared(world: World) -> None:
    tower = Tower().float()
    check = DriftCheck()
    check.numbers([])
    sharded = fully_shard(tower, mesh=init_device_mesh("cpu", (world.size,)))
    assert check.numbers(list(sharded.named_parameters())) == [0] * PARAMETERS
    check = DriftCheck()
    check.numbers([])
    parameters = list(sharded_by_fsdp1(Tower().float()).named_parameters())
    assert check.numbers(parameters) == [0] * PARAMETERS


def test_parameters_are_compared_in_two_steps_only():
    compared = []

    def parameters(step):
        compared.append(step)
        yield from Tower().named_parameters()

    check = DriftCheck()
    lengths = {len(check.numbers(parameters(step))) for step in range(1, 15)}
    assert compared == [2, 10]
    assert lengths == {PARAMETERS}


@pytest.mark.parametrize("count", [1, 2, 4, 5, 100])
def test_the_last_of_any_number_of_parameters_is_compared(count, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    torch.manual_seed(0)
    named = [(f"p{i}", nn.Parameter(torch.randn(3))) for i in range(count)]
    other = [(name, nn.Parameter(p.detach() + (name == f"p{count - 1}"))) for name, p in named]
    table, check = [], DriftCheck()
    for parameters in (named, other):
        check = DriftCheck()
        check.numbers([])
        table.append(check.numbers(parameters))
    with pytest.warns(UserWarning, match=f"the elements of p{count - 1} add up to"):
        check.compare(table, [0, 1])


def test_nan_equals_nan():
    named = [("a", nn.Parameter(torch.tensor(math.nan))), ("b", nn.Parameter(torch.zeros(2)))]
    check = DriftCheck()
    check.numbers([])
    numbers = check.numbers(named)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check.compare(list(itertools.repeat(numbers, 3)), [0, 1, 2])


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


def of_passes(seen):
    return [str(w.message) for w in seen if "in the second pass" in str(w.message)]


@pytest.mark.parametrize("make", [OwnGenerator, Counting, GradMode])
def test_one_warning_of_an_encoder_that_gives_other_features_in_the_second_pass(make):
    step = GradientCache((Tower(), make()), clip_loss, 3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(10):
            step(*pairs()).backward()
    (message,) = of_passes(seen)
    assert "encoder 1 gave different features in the second pass than in the first: they" in message
    assert "% in norm, so its gradients are not those of the loss" in message


def test_a_difference_that_comes_with_training_is_seen_in_the_tenth_step():
    tower = GrowingNoise()
    step = GradientCache((tower, tower), clip_loss, 3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(9):
            step(*pairs()).backward()
            tower.weight += 0.1
        assert not of_passes(seen)
        step(*pairs()).backward()
    assert len(of_passes(seen)) == 1


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
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in steps:
            with torch.autocast("cpu", torch.bfloat16):
                step(*pairs()).backward()
    assert not of_passes(seen)
