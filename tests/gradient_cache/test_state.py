"""Random state, settings, statistics and buffers are the same in both passes."""

import contextlib
import copy
import functools
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    DIMS,
    MICRO_BATCH_SIZES,
    WIDTH,
    Tower,
    assert_same,
    assert_same_gradients,
    clip_loss,
    gradients,
    one_graph,
    pairs,
)
from tests.similarity.distributed.processes import World, on_processes


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("size", MICRO_BATCH_SIZES)
@pytest.mark.parametrize("device", [None, pytest.param("cuda", marks=pytest.mark.gpu)])
def test_dropout_is_replayed(size, checkpointed, device):
    towers, batches = nn.ModuleList([Tower(dropout=0.5), Tower(dropout=0.5)]).to(device), pairs()
    on_device = [batch.to(device) for batch in batches]

    def encoder(tower):
        def encode(x):  # moves one micro-batch at a time
            x = x.to(device)
            return checkpoint(tower, x, use_reentrant=False) if checkpointed else tower(x)

        return encode

    def loss(x, y):  # draws random numbers as well
        return clip_loss(x * torch.rand_like(x), y)

    step = GradientCache([encoder(tower) for tower in towers], loss, size)
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

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm(WIDTH, track_running_stats=True, affine=True)
            self.out = nn.Linear(WIDTH, DIMS)

        def forward(self, x):
            return self.out(self.norm(x.unsqueeze(2).expand(-1, -1, 3).cumsum(2)).mean(2))

    encoders, batches = nn.ModuleList([Encoder(), Encoder()]), pairs(8)
    step = GradientCache(encoders, clip_loss, 4, kept_micro_batches=kept)
    plain = functools.partial(one_graph, encoders, batches, clip_loss, 4)
    assert_same(lambda: step(*batches), plain, encoders)
    assert encoders[0].norm.running_mean.abs().sum() > 0


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
    if "spectral norm" in kind:
        normed = nn.utils.spectral_norm if "hooks" in kind else parametrizations.spectral_norm
        return normed(nn.Linear(WIDTH, WIDTH))
    return Queue() if kind == "queue" else RunningMean(kind)


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("size", [1, 3, 100])
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
def test_both_passes_find_the_same_buffers(kind, size, kept):
    tower = With(made(kind))
    step = GradientCache((tower, tower), clip_loss, size, kept_micro_batches=kept)
    for batches in (pairs(), pairs()):
        plain = functools.partial(one_graph, (tower, tower), batches, clip_loss, size)
        assert_same(lambda batches=batches: step(*batches), plain, tower)


def test_what_happens_before_the_backward_pass_stays():
    tower, batches = With(RunningMean("in place")), pairs()
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
        tower = With(RunningMean("in place")).double()
        x, y = (torch.randn(5 - 3 * world.rank, WIDTH, dtype=torch.float64) for _ in range(2))
        plain = copy.deepcopy(tower.layer)
        for part in (*x.split(2), *y.split(2)):
            plain(part)
        GradientCache((tower, tower), torch.nn.functional.mse_loss, 2, kept_micro_batches=kept)(
            x, y
        ).backward()
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
                "training": (self.training, self.layer.training),
                "product": (x @ self.layer.weight.T).dtype,
                "grad": None,
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
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.device("meta"):
        value = step(*batches)
    encoder.train()
    torch.set_default_dtype(torch.float32)
    other(batches[0])
    value.backward()
    other(batches[0])
    first, second = encoder.seen[:6], encoder.seen[6:]
    assert first[0]["autocast dtype"] == torch.bfloat16
    assert (first[0]["dtype"], first[0]["device"]) == (torch.float64, "meta")
    assert first[0]["training"] == (True, False)
    assert first == [first[0]] * 6
    assert second == first
    assert other.seen[0] == other.seen[1]  # backward() restores the settings
    assert encoder.layer.training


@pytest.mark.parametrize("kept", [0, 1, 2])
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
    for gradient, expected in zip(gradients(towers), wanted, strict=True):
        assert (gradient - expected).norm() <= (0.01 if kept else 0) * expected.norm()


def test_a_default_device_that_was_reset():
    """PyTorch 2.9 then has no default device to return; in its own thread, as this lasts."""
    towers = Tower(), Tower()

    def step():
        torch.set_default_device("meta")
        torch.set_default_device(None)
        GradientCache(towers, clip_loss, 3)(*pairs()).backward()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(step).result()
    assert all(gradient is not None for gradient in gradients(*towers))


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
