"""Random state, autocast, gradient scaler and running statistics."""

import copy
import functools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    DIMS,
    MICRO_BATCH_SIZES,
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


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("micro_batch_size", MICRO_BATCH_SIZES)
def test_dropout_is_replayed(micro_batch_size, checkpointed):
    towers = nn.ModuleList([Tower(dropout=0.5), Tower(dropout=0.5)])
    batches = pairs()

    def encoder(tower):
        return (lambda x: checkpoint(tower, x, use_reentrant=False)) if checkpointed else tower

    def loss(x, y):  # draws random numbers as well
        return clip_loss(x * torch.rand_like(x), y)

    torch.manual_seed(1)
    expected, after = one_graph(towers, batches, loss, micro_batch_size)
    wanted = gradients(towers)
    towers.zero_grad()

    torch.manual_seed(1)
    value = GradientCache([encoder(t) for t in towers], loss, micro_batch_size)(*batches)
    value.backward()
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(value.detach(), expected, rtol=1e-12, atol=0)
    assert_same_gradients(gradients(towers), wanted)


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize(
    ("seed", "draw", "state"),
    [
        (random.seed, random.random, random.getstate),
        (np.random.seed, np.random.rand, lambda: np.random.get_state()[1].tolist()),
    ],
    ids=["python", "numpy"],
)
def test_random_numbers_of_other_generators_are_replayed(seed, draw, state, kept):
    class Masked(Tower):
        def forward(self, x):
            keep = torch.tensor([[draw() < 0.5 for _ in row] for row in x])
            return super().forward(x * keep)

    towers, batches = nn.ModuleList([Masked(), Masked()]), pairs()
    before = random.getstate(), np.random.get_state()
    try:
        seed(1)
        expected, _ = one_graph(towers, batches, clip_loss, 3)
        wanted, after = gradients(towers), state()
        towers.zero_grad()
        seed(1)
        value = GradientCache(towers, clip_loss, 3, kept_micro_batches=kept)(*batches)
        value.backward()
        assert state() == after
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
    torch.testing.assert_close(value.detach(), expected, rtol=1e-12, atol=0)
    assert_same_gradients(gradients(towers), wanted)


@pytest.mark.gpu
def test_dropout_is_replayed_on_cuda():
    towers = nn.ModuleList([Tower(dropout=0.5), Tower(dropout=0.5)]).cuda()
    batches = [batch.cuda() for batch in pairs()]
    torch.manual_seed(1)
    one_graph(towers, batches, clip_loss, 3)
    wanted, after = gradients(towers), torch.cuda.get_rng_state()
    towers.zero_grad()
    torch.manual_seed(1)
    on_host = [batch.cpu() for batch in batches]  # the encoders move one micro-batch at a time
    encoders = tuple((lambda x, tower=tower: tower(x.cuda())) for tower in towers)
    GradientCache(encoders, clip_loss, 3)(*on_host).backward()
    assert torch.equal(torch.cuda.get_rng_state(), after)
    assert_same_gradients(gradients(towers), wanted)


def test_autocast_covers_both_passes_and_the_loss():
    towers = nn.ModuleList([Tower(), Tower()]).float()
    batches = [batch.float() for batch in pairs()]
    seen = []

    def loss(x, y):
        seen.extend([x.dtype, y.dtype, (x @ y.T).dtype])
        return clip_loss(x, y)

    for tower in towers:
        tower.forward = tower.layers  # normalisation would return fp32
    clip_loss(*(t(b) for t, b in zip(towers, batches, strict=True))).backward()
    exact = gradients(towers)
    towers.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        GradientCache(tuple(towers), loss, 3)(*batches).backward()
    assert seen == [torch.bfloat16] * 3
    for actual, wanted in zip(gradients(towers), exact, strict=True):
        assert actual.dtype == torch.float32
        assert (actual - wanted).norm() < 0.03 * wanted.norm()
        assert not torch.equal(actual, wanted)  # so that the pass was in bfloat16


def test_a_gradient_scaler_scales_every_gradient_but_not_the_loss():
    model, reference = (TwoTowers() for _ in range(2))
    reference.load_state_dict(model.state_dict())
    bias = nn.Parameter(torch.tensor(0.1))

    def loss(x, y, scale, shift):
        return biased_loss(x, y, scale, shift + bias)

    batches = pairs()
    expected = loss(*reference(*batches))
    expected.backward()
    wanted = [*gradients(reference), bias.grad]
    bias.grad = None
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    value = GradientCache(model, loss, 3)(*batches)
    scaler.scale(value).backward()
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    assert_same_gradients([*gradients(model), bias.grad], [1024 * gradient for gradient in wanted])


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_running_statistics_are_updated_once_per_micro_batch(norm, kept):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm(WIDTH, track_running_stats=True, affine=True)
            self.out = nn.Linear(WIDTH, DIMS)

        def forward(self, x):
            return self.out(self.norm(x.unsqueeze(2).expand(-1, -1, 3).cumsum(2)).mean(2))

    encoders = nn.ModuleList([Encoder(), Encoder()])
    reference = copy.deepcopy(encoders)
    batches = pairs(8)
    one_graph(reference, batches, clip_loss, 4)
    step = GradientCache(tuple(encoders), clip_loss, 4, kept_micro_batches=kept)
    step(*batches).backward()
    assert encoders[0].norm.running_mean.abs().sum() > 0
    for actual, expected in zip(encoders.buffers(), reference.buffers(), strict=True):
        assert torch.equal(actual, expected)
    # The second pass normalised by the micro-batch, like the first.
    assert_same_gradients(gradients(encoders), gradients(reference))


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


@pytest.mark.parametrize("fails_at", [2, 5])  # first pass, second pass
def test_an_exception_leaves_modules_and_random_state_in_order(fails_at):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(WIDTH, DIMS), nn.BatchNorm1d(DIMS), nn.Dropout())
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == fails_at:
                raise RuntimeError("out of something")
            return self.layers(x)

    encoder, text = Fails(), Tower()
    after_loss = []

    def loss(x, y):
        value = clip_loss(x, y)
        after_loss.append(torch.get_rng_state())
        return value

    with pytest.raises(RuntimeError, match="out of something"):
        GradientCache((encoder, text), loss, 2)(*pairs(6)).backward()
    norm = encoder.layers[1]
    assert norm.track_running_stats
    assert norm.num_batches_tracked == min(fails_at - 1, 3)
    if fails_at == 5:
        assert torch.equal(torch.get_rng_state(), after_loss[0])
    else:
        assert all(gradient is None for gradient in gradients(encoder, text))
