"""The second pass inside autograd: its thread, Ctrl-C, streams and peak memory."""

import copy
import os
import signal
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    Tower,
    assert_same_gradients,
    clip_loss,
    gradients,
    one_graph,
    pairs,
)
from tests.planning.allocator import peak_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MICRO_BATCHES = 40


@pytest.mark.parametrize("device", DEVICES)
def test_ctrl_c_ends_the_second_pass_at_once(device):
    """On a GPU autograd's threads run the backward pass, but only the main thread gets signals."""
    tower, calls = Tower().to(device), []

    def encode(x):
        calls.append(threading.current_thread())
        if len(calls) == 2 * MICRO_BATCHES + 3:
            os.kill(os.getpid(), signal.SIGINT)
        return tower(x)

    batches = [x.to(device) for x in pairs(MICRO_BATCHES)]
    loss = GradientCache((encode, encode), clip_loss, 1)(*batches)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert 2 * MICRO_BATCHES + 3 <= len(calls) <= 2 * MICRO_BATCHES + 5
    assert set(calls) == {threading.main_thread()}
    assert gradients(tower) == [None] * len(gradients(tower))
    calls.clear()
    GradientCache((tower, tower), clip_loss, 1)(*batches).backward()
    assert all(gradient is not None for gradient in gradients(tower))


class Wide(nn.Module):
    """An encoder whose parameters are much larger than a micro-batch's activations."""

    def __init__(self, width=256, depth=4):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(depth)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return F.normalize(x, dim=-1)


def peak_of(device, run):
    if device == "cpu":
        return peak_bytes(run)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [2, 100])
def test_peak_memory_is_that_of_backward_in_each_micro_batch(device, size):
    width = 256 if device == "cpu" else 2048
    tower = Wide(width).to(device)
    weight = tower.layers[0].weight.nbytes
    batches = [torch.randn(8, width, device=device) for _ in range(2)]
    step = GradientCache((tower, tower), clip_loss, size)

    def run():
        step(*batches).backward()

    run()  # allocates cuBLAS's workspace and imports modules
    tower.zero_grad()
    activations = weight // 2  # at most, with those of the loss
    # All gradients, and that of one parameter before it is added.
    assert peak_of(device, run) < (len(tower.layers) + 1) * weight + activations
    # With existing .grad, only that of one parameter.
    assert peak_of(device, run) < weight + activations


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [2, 100])
def test_a_gradient_scaler_and_half_precision(device, size):
    tower, plain = (Tower().to(device).float() for _ in range(2))
    plain.load_state_dict(tower.state_dict())
    batches = [x.to(device).float() for x in pairs(8)]
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device, init_scale=2.0**14)
    for one in (plain, tower):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        with torch.autocast(device, dtype):
            if one is plain:
                loss = clip_loss(one(batches[0]).float(), one(batches[1]).float())
            else:
                step = GradientCache((one, one), lambda x, y: clip_loss(x.float(), y.float()), size)
                loss = step(*batches)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    for found, wanted in zip(gradients(tower), gradients(plain), strict=True):
        assert (found - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [3, 100])
@pytest.mark.parametrize("others", ["step", "backward", "both"])
def test_streams_other_than_the_default(size, others):
    towers = nn.ModuleList([Tower(dropout=0.3), Tower(dropout=0.3)]).cuda()
    plain = copy.deepcopy(towers)
    batches = [x.cuda() for x in pairs(300)]
    torch.manual_seed(1)
    one_graph(plain, batches, clip_loss, size).backward()
    torch.manual_seed(1)
    torch.cuda.synchronize()
    default, other = torch.cuda.current_stream(), torch.cuda.Stream()
    first = default if others == "backward" else other
    second = default if others == "step" else other
    with torch.cuda.stream(first):
        torch.cuda._sleep(10_000_000)
        loss = GradientCache(tuple(towers), clip_loss, size)(*batches)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        loss.backward()
        found = [gradient.clone() for gradient in gradients(towers)]
    torch.cuda.synchronize()
    assert_same_gradients(found, gradients(plain))
