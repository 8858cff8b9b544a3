"""Tensors that forward passes or hooks on gradients change; hooks that change nothing."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    WIDTH,
    Tower,
    assert_same_gradients,
    clip_loss,
    gradients,
    pairs,
)

#: Several micro-batches without and with kept graphs, and one micro-batch.
SIZES = [(3, 0), (3, 2), (100, 0)]


def made(encoders, size):
    """A step of (micro-batch size, number of kept micro-batches)."""
    return GradientCache(encoders, clip_loss, size[0], kept_micro_batches=size[1])


class MovingAverage(nn.Module):
    """A tower, and another one that its forward pass moves towards it, as in MoCo's code."""

    def __init__(self, update):
        super().__init__()
        self.tower, self.slow, self.update = Tower(), Tower().requires_grad_(False), update

    def forward(self, x):
        for slow, new in zip(self.slow.parameters(), self.tower.parameters(), strict=True):
            self.update(slow, new.detach())
        return self.tower(x) + self.slow(x)


class TokenTower(nn.Module):
    """An embedding that its forward pass scales down."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH, max_norm=0.1)

    def forward(self, x):
        return self.embedding(x.argmax(1))


def assign_data(slow, new):
    slow.data = slow.data * 0.9 + new * 0.1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: MovingAverage(lambda slow, new: slow.lerp_(new, 0.1)), "slow.layers.0.weight"),
        (lambda: MovingAverage(assign_data), "slow.layers.0.weight"),
        (lambda: MovingAverage(assign_data).requires_grad_(False), "slow.layers.0.weight"),
        (TokenTower, "embedding.weight"),
    ],
)
def test_a_parameter_that_forward_passes_change(make, name, size):
    """They would change it once for each micro-batch, and again in the second pass."""
    message = f"parameter {name} of encoder 0 was changed by a forward pass"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        made((make(), Tower()), size)(*pairs())


def test_a_batch_that_forward_passes_change():
    class Centred(Tower):
        def forward(self, x):
            return super().forward(x.sub_(0.5))

    with pytest.raises(
        RuntimeError, match=r"batch 0 of encoder 0 was changed by a forward pass: .* copy"
    ):
        GradientCache((Centred(), Tower()), clip_loss, 3)(*pairs())
    frozen = Centred().requires_grad_(False), Tower()  # runs once
    GradientCache(frozen, clip_loss, 3)(*pairs()).backward()


def test_a_forward_pass_may_cast_a_parameter_or_copy_it():
    """As quantised layers do with their bias."""

    class Casts(Tower):
        def forward(self, x):
            bias = self.layers[3].bias
            bias.data = bias.data.to(x.dtype).clone()
            return super().forward(x)

    tower = Casts()
    tower.layers[3].bias.data = tower.layers[3].bias.data.float()
    GradientCache((tower, tower), clip_loss, 3)(*pairs()).backward()
    assert all(gradient is not None for gradient in gradients(tower))


class Checkpointed(Tower):
    """The first layer's weights are behind a checkpoint that starts a backward pass of its own."""

    def forward(self, x):
        x = checkpoint(self.layers[0], x.clone().requires_grad_(), use_reentrant=True)
        return F.normalize(self.layers[1:](x), dim=-1)


def stepping_in_hooks(tower):
    """An optimizer for each parameter that steps when its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in tower.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(hook)


def stepping_in_backward(tower):
    options = {"lr": 0.1, "momentum": 0.9}
    _apply_optimizer_in_backward(torch.optim.SGD, tower.parameters(), options)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("install", [stepping_in_hooks, stepping_in_backward])
def test_an_optimizer_in_the_backward_pass(install, size):
    """It steps once, or where hooks see each micro-batch's gradient there is an error."""
    tower, plain = Tower(), Tower()
    plain.load_state_dict(tower.state_dict())
    install(tower)
    step = made((tower, tower), size)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        batches = pairs()
        step(*batches).backward()
        clip_loss(*map(plain, batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_gradients([*tower.parameters()], [*plain.parameters()])
    install(tower := Checkpointed())
    loss = made((tower, Tower()), size)(*pairs())
    if size == SIZES[2]:  # one micro-batch
        loss.backward()
        return
    with pytest.raises(RuntimeError, match=r"changed during the backward .* optimizer.step\(\)"):
        loss.backward()


def test_hooks_that_change_no_weight():
    """For each micro-batch behind a reentrant checkpoint, and never without a gradient."""
    tower, plain, calls = Checkpointed(), Tower(), []
    plain.load_state_dict(tower.state_dict())
    tower.unused = nn.Linear(2, 2)
    handles = []
    for parameter in tower.parameters():
        handles.append(parameter.register_hook(lambda g: 2 * g))
        handles.append(
            parameter.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.norm()))
        )
    for i in range(2):
        batches = pairs()
        GradientCache((tower, tower), clip_loss, 3)(*batches).backward()
        ((2 - i) * clip_loss(*map(plain, batches))).backward()
        assert len(calls) == 6 * len(list(plain.parameters()))
        assert_same_gradients(gradients(tower.layers), gradients(plain))
        assert gradients(tower.unused) == [None, None]
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("size", SIZES)
def test_a_hook_on_several_parameters_is_called_once(size):
    tower, calls = Tower(), []
    tower.unused = nn.Linear(2, 2)
    torch.autograd.graph.register_multi_grad_hook(tuple(tower.parameters()), calls.append)
    made((tower, tower), size)(*pairs()).backward()
    (found,) = calls
    assert_same_gradients([*found], gradients(tower))
