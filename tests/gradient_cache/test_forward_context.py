"""The second pass runs in the context of the step, whatever changes before `backward()`."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    DIMS,
    WIDTH,
    Tower,
    assert_same_gradients,
    clip_loss,
    gradients,
    one_graph,
    pairs,
)

SIZES = [3, 100]


def test_random_states_with_another_models_dropout_between():
    towers, other = nn.ModuleList([Tower(dropout=0.5), Tower(dropout=0.5)]), Tower(dropout=0.9)
    batches = pairs()
    torch.manual_seed(1)
    one_graph(towers, batches, clip_loss, 3)
    wanted = gradients(towers)
    towers.zero_grad()
    torch.manual_seed(1)
    loss = GradientCache(tuple(towers), clip_loss, 3)(*batches)
    other(pairs()[0])
    torch.manual_seed(17)
    found = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), found)
    assert_same_gradients(gradients(towers), wanted)


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
                "precision": torch.get_float32_matmul_precision(),
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
    before = torch.get_float32_matmul_precision()
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.device("meta"):
            value = step(*batches)
        encoder.train()
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("high")
        other(batches[0])
        value.backward()
        other(batches[0])
    finally:
        torch.set_float32_matmul_precision(before)
    first, second = encoder.seen[:6], encoder.seen[6:]
    assert first[0]["autocast dtype"] == torch.bfloat16
    assert (first[0]["dtype"], first[0]["device"]) == (torch.float64, "meta")
    assert (first[0]["training"], first[0]["precision"]) == ((True, False), "medium")
    assert first == [first[0]] * 6
    assert second == first
    assert other.seen[0] == other.seen[1]  # backward() restores the settings
    assert encoder.layer.training


@pytest.mark.parametrize("region", [True, False], ids=["inside", "outside"])
def test_backward_inside_or_outside_autocast_gives_the_same(region):
    """The second pass does not reuse casts that an evaluation cached without a graph."""
    towers = nn.ModuleList([Tower(), Tower()]).float()
    batches = [x.float() for x in pairs()]
    step = GradientCache(tuple(towers), clip_loss, 3)
    with torch.autocast("cpu", torch.bfloat16):
        step(*batches).backward()
    wanted = gradients(towers)
    towers.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        value = step(*batches)
        with torch.no_grad():
            towers[0](batches[0])
        if region:
            value.backward()
    if not region:
        value.backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(towers), wanted, strict=True))


def test_eval_between_the_passes():
    encoder = nn.Sequential(nn.Linear(WIDTH, DIMS), nn.BatchNorm1d(DIMS), nn.Dropout(0.5))
    plain, (x, y) = copy.deepcopy(encoder), pairs(6)
    torch.manual_seed(1)
    one_graph((plain, plain), (x, y), clip_loss, 3)
    torch.manual_seed(1)
    loss = GradientCache((encoder, encoder), clip_loss, 3)(x, y)
    encoder.eval()
    loss.backward()
    assert not any(module.training for module in encoder.modules())
    assert_same_gradients(gradients(encoder), gradients(plain))


@pytest.mark.parametrize("size", SIZES)
def test_backward_under_no_grad(size):
    towers = (Tower(), Tower())
    batches = pairs()
    step = GradientCache(towers, clip_loss, size)
    step(*batches).backward()
    wanted = gradients(*towers)
    for tower in towers:
        tower.zero_grad()
    loss = step(*batches)
    with torch.no_grad():
        loss.backward()
    assert_same_gradients(gradients(*towers), wanted)


def test_a_precision_that_the_older_getter_cannot_return():
    """A precision set by torch's newer names, for which the older getter raises."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this version of PyTorch has the older names alone")
    before, towers = matmul.fp32_precision, (Tower(), Tower())
    try:
        matmul.fp32_precision = "tf32"
        GradientCache(towers, clip_loss, 3)(*pairs()).backward()
    finally:
        matmul.fp32_precision = before
    assert all(gradient is not None for gradient in gradients(*towers))


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
    clip_loss(*map(tower, batches)).backward()
    expected = gradients(tower)
    tower.zero_grad()
    step = GradientCache((tower, tower), clip_loss, 2, kept_micro_batches=kept)
    with parametrize.cached():
        value = step(*batches)
        if backward_inside:
            value.backward()
    if not backward_inside:
        value.backward()
    assert_same_gradients(gradients(tower), expected)
