"""Random state, settings, statistics and buffers are the same in both passes."""

import contextlib
import copy
import functools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    DIMS,
    WIDTH,
    Tower,
    TwoTowers,
    assert_same,
    assert_same_gradients,
    biased_loss,
    clip_loss,
    gradients,
    one_graph,
    pairs,
    seen_in,
)
from tests.process_state import changed
from tests.similarity.distributed.processes import World, on_processes


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("size", "kept"), [(2, 0), (3, (1, 2)), (3, 100), (7, 0)])
@pytest.mark.parametrize("device", [None, pytest.param("cuda", marks=pytest.mark.gpu)])
def test_dropout_is_replayed(size, kept, checkpointed, device):
    towers, batches = nn.ModuleList([Tower(dropout=0.5), Tower(dropout=0.5)]).to(device), pairs()
    on_device = [batch.to(device) for batch in batches]

    def encoder(tower):
        def encode(x):  # moves one micro-batch at a time
            x = x.to(device)
            return checkpoint(tower, x, use_reentrant=False) if checkpointed else tower(x)

        return encode

    def loss(x, y):  # draws random numbers as well
        return clip_loss(x * torch.rand_like(x), y)

    encoders = [encoder(tower) for tower in towers]
    step = GradientCache(encoders, loss, size, kept_micro_batches=kept)
    assert_same(lambda: step(*batches), lambda: one_graph(towers, on_device, loss, size), towers)


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_other_generators_are_replayed(draw, kept):
    class Masked(Tower):
        def forward(self, x):
            return super().forward(x * torch.tensor([[draw() < 0.5 for _ in row] for row in x]))

    towers, batches = nn.ModuleList([Masked(), Masked()]), pairs()
    step = GradientCache(towers, clip_loss, 3, kept_micro_batches=kept)
    assert_same(lambda: step(*batches), lambda: one_graph(towers, batches, clip_loss, 3), towers)


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_running_statistics_are_updated_once_per_micro_batch(norm, kept):
    """The second pass normalises by the micro-batch, like the first."""

    def encoder():
        layer = norm(2, track_running_stats=True, affine=True)
        first, last = nn.Linear(WIDTH, 6), nn.Linear(6, DIMS)
        return nn.Sequential(first, nn.Unflatten(1, (2, 3)), layer, nn.Flatten(), last)

    encoders, batches = nn.ModuleList([encoder(), encoder()]), pairs(8)
    step = GradientCache(encoders, clip_loss, 4, kept_micro_batches=kept)
    plain = functools.partial(one_graph, encoders, batches, clip_loss, 4)
    assert_same(lambda: step(*batches), plain, encoders)
    assert encoders[0][2].running_mean.abs().sum() > 0


class Holder:
    """An object that is no module, such as a trainer, whose method encodes."""

    def __init__(self, model):
        self.models, self.samples = {"text": model}, ["a sample"] * 1000

    def encode(self, x):
        return self.models["text"](x)

    __call__ = encode


def decorated(function):
    return functools.wraps(function)(lambda x: function(x))


@pytest.mark.parametrize(
    "refer",
    [
        lambda model: Holder(model).encode,
        Holder,
        lambda model: functools.partial(Holder(model)),
        lambda model: decorated(Holder(model).encode),
        lambda model: lambda x, models=[model]: models[0](x),
        lambda model: (lambda models: lambda x: models[0](x))([model]),
        lambda model: (lambda holder: lambda x: holder.encode(x))(Holder(model)),
    ],
    ids=["method", "object", "partial", "decorated", "default", "list", "object in a closure"],
)
def test_models_that_an_encoder_refers_to_are_found(refer):
    model = nn.Sequential(nn.Linear(WIDTH, DIMS), nn.BatchNorm1d(DIMS))
    encoder = refer(model)
    step = GradientCache((encoder, encoder), clip_loss, 4)
    step(*pairs(8)).backward()
    assert model[1].num_batches_tracked == 4  # once for each micro-batch
    value = step(*pairs(8))
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"parameter .*weight of encoder 0 was changed"):
        value.backward()


class RunningMean(nn.Module):
    """Subtracts a mean that each call updates."""

    def __init__(self, update):
        super().__init__()
        self.update = update
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("absent", None)

    def forward(self, x):
        self.update(self, x.mean(0))
        return x - self.mean


#: In place, by another tensor or by its data.
UPDATES = {
    "in place": lambda module, new: module.mean.lerp_(new, 0.5),
    "replaced": lambda module, new: setattr(module, "mean", module.mean.lerp(new, 0.5)),
    "data in place": lambda module, new: module.mean.data.lerp_(new, 0.5),
    "data replaced": lambda module, new: setattr(module.mean, "data", module.mean.lerp(new, 0.5)),
}


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


MODULES = {
    **{name: functools.partial(RunningMean, update) for name, update in UPDATES.items()},
    "queue": Queue,
    "spectral norm by hooks": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
}


@pytest.mark.parametrize(("size", "kept"), [(1, 2), (3, 0), (100, 0)])
@pytest.mark.parametrize("kind", MODULES)
def test_both_passes_find_the_same_buffers(kind, size, kept):
    tower = With(MODULES[kind]())
    step = GradientCache((tower, tower), clip_loss, size, kept_micro_batches=kept)
    for batches in (pairs(), pairs()):
        plain = functools.partial(one_graph, (tower, tower), batches, clip_loss, size)
        assert_same(lambda batches=batches: step(*batches), plain, tower)


def test_what_happens_before_the_backward_pass_stays():
    tower, batches = With(MODULES["in place"]()), pairs()
    mean = tower.layer.mean
    step = GradientCache((tower, tower), clip_loss, 3)
    waiting, other = step(*batches), step(*pairs())
    (waiting + other).backward()
    waiting = step(*batches)
    mean.fill_(5.0)
    waiting.backward()
    assert torch.equal(mean, torch.full((WIDTH,), 5.0))
    assert tower.layer.mean is mean


@on_processes(2)
def test_rows_that_are_no_data_leave_no_trace(world: World) -> None:
    """The second rank has fewer micro-batches, and encodes a row of its own beside the first."""
    for kept in (0, 2):
        tower = With(MODULES["in place"]()).double()
        x, y = (torch.randn(5 - 3 * world.rank, WIDTH, dtype=torch.float64) for _ in range(2))
        plain = copy.deepcopy(tower.layer)
        for part in (*x.split(2), *y.split(2)):
            plain(part)
        step = GradientCache((tower, tower), nn.functional.mse_loss, 2, kept_micro_batches=kept)
        step(x, y).backward()
        torch.testing.assert_close(tower.layer.mean, plain.mean, rtol=1e-12, atol=0)


class SettingsRecorder(nn.Module):
    """Records the settings that an encoder may depend on, at each forward pass."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(WIDTH, DIMS, dtype=torch.float32), []

    def forward(self, x):
        self.seen.append(
            {
                "autocast": torch.is_autocast_enabled("cpu"),
                "autocast dtype": torch.get_autocast_dtype("cpu"),
                "autocast cache": torch.is_autocast_cache_enabled(),
                "dtype": torch.ones(()).dtype,
                "device": torch.ones(()).device.type,
                "precision": torch.backends.mkldnn.matmul.fp32_precision,
                "training": (self.training, self.layer.training),
                "product": (x @ self.layer.weight.T).dtype,
            }
        )
        return self.layer(x)


def test_everything_that_a_forward_pass_depends_on():
    encoder, other = SettingsRecorder(), SettingsRecorder()
    batches = [x.float() for x in pairs()]

    def loss(x, y):
        return clip_loss(x.float(), y.float())

    step = GradientCache((encoder, encoder), loss, 3)
    encoder.layer.eval()
    with (
        changed("precision", "medium"),
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        torch.device("meta"),
    ):
        value = step(*batches)
    encoder.train()
    with changed("default dtype", torch.float32):
        other(batches[0])
        value.backward()
        other(batches[0])
    first, second = encoder.seen[:6], encoder.seen[6:]
    assert first[0]["autocast dtype"] == torch.bfloat16
    assert (first[0]["dtype"], first[0]["device"]) == (torch.float64, "meta")
    assert (first[0]["training"], first[0]["precision"]) == ((True, False), "bf16")
    assert first == [first[0]] * 6
    assert second == first
    assert other.seen[0] == other.seen[1]  # backward() restores the settings
    assert encoder.layer.training


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("where", ["inside", "outside", "under no_grad"])
def test_backward_inside_or_outside_autocast_gives_the_same(where, kept):
    """Neither pass reuses casts of weights that were cached without a graph."""
    towers = nn.ModuleList([Tower(), Tower()]).float()
    batches = [x.float() for x in pairs()]
    step = GradientCache(tuple(towers), clip_loss, 3)
    with torch.autocast("cpu", torch.bfloat16):
        step(*batches).backward()
        wanted = gradients(towers)
        towers.zero_grad()
        step.kept_micro_batches = kept
        value = step(*batches)
        with torch.no_grad():
            towers[0](batches[0])
        if where == "inside":
            value.backward()
    if where != "inside":
        with torch.set_grad_enabled(where == "outside"):
            value.backward()
    for found, expected in zip(gradients(towers), wanted, strict=True):
        assert (found - expected).norm() <= (0.01 if kept else 0) * expected.norm()


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_parametrized_weights_that_are_cached_get_their_gradients(backward_inside, kept):
    """Cached in the first pass, without a graph, they would get none, or those of kept graphs."""
    tower, batches = Tower(), pairs()
    parametrizations.weight_norm(tower.layers[0])
    step = GradientCache((tower, tower), clip_loss, 2, kept_micro_batches=kept)

    def cached():
        with parametrize.cached():
            return step(*batches)

    region = parametrize.cached() if backward_inside else contextlib.nullcontext()
    plain = functools.partial(one_graph, (tower, tower), batches, clip_loss, 2)
    expected = torch.autograd.grad(plain(), [*tower.parameters()])
    with region:
        cached().backward()
    assert_same_gradients(gradients(tower), expected)


class Varying(Tower):
    """Its features depend on something that changes between calls."""

    def __init__(self, vary):
        super().__init__()
        self.vary, self.calls, self.weight = vary, 0, 0.0

    def forward(self, x):
        self.calls += 1
        return super().forward(self.vary(self, x))


OWN = torch.Generator()  # that no one restores


def of_passes(steps, after=lambda: None):
    """The warnings of differences between passes in these steps, each with batches of its own."""

    def run():
        for step in steps:
            step(*pairs()).backward()
            after()

    return seen_in(run, "in the second pass")


@pytest.mark.parametrize(
    "vary",
    [
        lambda tower, x: x * (torch.rand(x.shape, generator=OWN) > 0.2),
        lambda tower, x: x * tower.calls,
        lambda tower, x: x if torch.is_grad_enabled() else x.relu(),
    ],
    ids=["random numbers", "an attribute", "whether a graph is recorded"],
)
def test_one_warning_of_an_encoder_that_gives_other_features_in_the_second_pass(vary):
    (message,) = of_passes([GradientCache((Tower(), Varying(vary)), clip_loss, 3)] * 10)
    assert "encoder 1 gave different features in the second pass than in the first: they" in message
    assert "% in norm, so its gradients are not those of the loss" in message


def test_a_difference_that_comes_with_training_is_seen_in_the_tenth_step():
    tower = Varying(lambda tower, x: x + tower.weight * torch.randn(x.shape, generator=OWN))
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
