"""Refused backward passes change no gradient; tensors and hooks that change something."""

import contextlib
import random
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.optim import _apply_optimizer_in_backward

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    WIDTH,
    Checkpointed,
    Tower,
    TwoTowers,
    assert_same_gradients,
    biased_loss,
    clip_loss,
    gradients,
    pairs,
)

#: Several micro-batches without and with kept graphs, and one micro-batch.
SIZES = [(3, 0), (3, 2), (100, 0)]


def made(model, loss, size):
    """A step of (micro-batch size, number of kept micro-batches)."""
    return GradientCache(model, loss, size[0], kept_micro_batches=size[1])


def with_gradients(model):
    """Fill `.grad` with ones, which a refusal must not change."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


@contextlib.contextmanager
def refused(model, message):
    with pytest.raises(RuntimeError, match=message):
        yield
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, torch.ones_like(parameter))
        assert not parameter._backward_hooks


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("option", ["retain_graph", "create_graph"])
@pytest.mark.parametrize("function", [torch.autograd.backward, torch.autograd.grad])
def test_one_backward_pass_without_retain_graph_and_create_graph(function, option, size):
    model, plain, batches = with_gradients(TwoTowers()), TwoTowers(), pairs()
    plain.load_state_dict(model.state_dict())
    loss = made(model, biased_loss, size)(*batches)
    once = "expected one backward pass of a loss, without retain_graph=True and create_graph"
    with refused(model, once):
        function(loss, inputs=[*model.parameters()], **{option: True})
    loss.backward()  # still possible
    biased_loss(*with_gradients(plain)(*batches)).backward()
    assert_same_gradients(gradients(model), gradients(plain))
    with_gradients(model)
    with refused(model, once):
        loss.backward()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda bias, _: torch.optim.SGD([bias], lr=1.0).step(), "parameter text.layers.3.bias"),
        (lambda bias, _: setattr(bias, "data", bias.data * 2), "parameter text.layers.3.bias"),
        (lambda _, texts: texts.zero_(), "batch 1['ids'][0]"),
    ],
)
def test_a_parameter_or_a_batch_changed_in_place(change, name, size):
    model, (images, texts) = with_gradients(TwoTowers()), pairs()
    step = made(lambda x, y: model(x, y["ids"][0]), biased_loss, size)
    loss = step(images, {"ids": [texts]})
    change(model.text.layers[3].bias, texts)
    with refused(model, re.escape(name) + ".* of the model was changed in place after the step"):
        loss.backward()


@pytest.mark.parametrize("size", SIZES)
def test_a_parameter_that_is_out_of_sight(size):
    """A wrapper might be, too, which would reduce gradients in each micro-batch."""
    tower = with_gradients(Tower())
    holder = SimpleNamespace(parts=SimpleNamespace(model=tower))  # two objects deep
    step = made((lambda x: holder.parts.model(x), Tower()), clip_loss, size)
    with refused(tower, r"encoder 0 uses a parameter of shape \(\d, \d\) that is in no module"):
        step(*pairs()).backward()


@pytest.mark.parametrize("size", SIZES)
def test_compiled_autograd(size):
    model = with_gradients(TwoTowers())
    loss = made(model, biased_loss, size)(*pairs())
    compiler = torch.compile(backend="eager")
    with refused(model, "cannot compile the second pass"), compiled_autograd._enable(compiler):
        loss.backward()


def loop(step, model, backward):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        value = step(*pairs())
        backward(value)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("keep", [True, False])
def test_a_loop_without_a_backward_pass_raises_at_its_first_step(keep):
    model, kept = TwoTowers(), []
    step = GradientCache(model, biased_loss, 3)
    message = "the loss of the last step was not backpropagated: call .*backward.* before"
    with pytest.raises(RuntimeError, match=message):
        loop(step, model, kept.append if keep else lambda value: None)
    assert len(model.image.graph_recorded) == 3  # the first step's
    loop(step, model, lambda value: value.backward())


def test_losses_that_are_only_evaluated_raise_nothing():
    model, other = TwoTowers(), TwoTowers()
    step = GradientCache(model, biased_loss, 3)
    # Discarded, like one that is not finite; the next one is used.
    loop(step, model, lambda value: (step(*pairs()), step(*pairs()).backward()))
    # Another model's optimizer steps meanwhile.
    waiting = step(*pairs())
    loop(GradientCache(other, biased_loss, 3), other, lambda value: value.backward())
    waiting.backward()
    # Evaluated without a backward pass, or beside another loss.
    step(*pairs())
    with torch.no_grad():
        loop(step, model, lambda value: None)
    loop(step, model, lambda value: (value.backward(), step(*pairs())))


def backpropagated(outputs):
    """The same, after a backward pass that ends at them."""
    sum(output.sum() for output in outputs).backward()
    return outputs


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("inside", [True, False])
def test_another_loss_of_the_features_outside_of_the_steps_loss(inside, size):
    """Its gradient would end at the features, and never reach the encoders."""
    model, kept = TwoTowers(), {}

    def loss(*outputs):
        kept["features"] = outputs[0]
        kept["spread"] = outputs[0].var(0).sum()
        return biased_loss(*outputs)

    value = made(model, loss, size)(*pairs())
    spread = kept["spread"] if inside else kept["features"].var(0).sum()
    message = "reached the features that were passed to the loss, but not"
    with pytest.raises(RuntimeError, match=message):
        (value + spread).backward()
    # Reading them, and gradients that are asked for or inside the loss, stay possible.
    value = made(model, lambda *outputs: loss(*backpropagated(outputs)), size)(*pairs())
    (found,) = torch.autograd.grad(kept["spread"], kept["features"])
    assert found.shape == kept["features"].shape
    value.backward()


class Fails(nn.Module):
    """Fails in its n-th forward pass, in training mode and with random numbers."""

    def __init__(self, at, error):
        super().__init__()
        self.tower, self.norm = Tower(dropout=0.3), nn.BatchNorm1d(WIDTH)
        self.left, self.error = at, error
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.left -= 1
        self.calls += 1
        if not self.left:
            raise self.error
        return self.tower(self.norm(x))


@pytest.mark.parametrize(
    ("calls", "error"),  # two encoders of three micro-batches: 6 first
    [(7, RuntimeError("stop")), (9, KeyboardInterrupt("stop")), (12, RuntimeError("stop"))],
)
def test_an_exception_in_the_second_pass_changes_no_gradient(calls, error):
    encoder = Fails(calls, error)
    step = GradientCache((encoder, encoder), clip_loss, 3)
    loss = step(*pairs(8))
    encoder.eval()
    torch.manual_seed(5)
    torch.rand(random.randrange(9))
    state = torch.get_rng_state()
    with pytest.raises(type(error), match="stop"):
        loss.backward()
    assert encoder.calls == 6
    assert torch.equal(torch.get_rng_state(), state)
    assert gradients(encoder) == [None] * len(gradients(encoder))
    assert not any(parameter._backward_hooks for parameter in encoder.parameters())
    assert not any(module.training for module in encoder.modules())
    assert encoder.norm.track_running_stats
    with pytest.raises(RuntimeError, match="expected one backward pass"):
        loss.backward()
    step(*pairs(8)).backward()
    assert all(gradient is not None for gradient in gradients(encoder))


class MovingAverage(nn.Module):
    """A tower, and another one that its forward pass moves towards it, as in MoCo's code."""

    def __init__(self, update):
        super().__init__()
        self.tower, self.slow, self.update = Tower(), Tower().requires_grad_(False), update

    def forward(self, x):
        for slow, new in zip(self.slow.parameters(), self.tower.parameters(), strict=True):
            self.update(slow, new.detach())
        return self.tower(x) + self.slow(x)


def assign_data(slow, new):
    slow.data = slow.data * 0.9 + new * 0.1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: MovingAverage(lambda slow, new: slow.lerp_(new, 0.1)), "slow.layers.0.weight"),
        (lambda: MovingAverage(assign_data), "slow.layers.0.weight"),
        (lambda: MovingAverage(assign_data).requires_grad_(False), "slow.layers.0.weight"),
    ],
)
def test_a_parameter_that_forward_passes_change(make, name, size):
    """They would change it once for each micro-batch, and again in the second pass."""
    message = f"parameter {name} of encoder 0 was changed by a forward pass"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        made((make(), Tower()), clip_loss, size)(*pairs())


def test_a_batch_that_forward_passes_change():
    tower, message = Tower(), r"batch 0 of encoder 0 was changed by a forward pass: .* copy"
    with pytest.raises(RuntimeError, match=message):
        GradientCache((lambda x: tower(x.sub_(0.5)), Tower()), clip_loss, 3)(*pairs())
    # What has no second pass may change, such as a teacher that is its student's average.
    teacher = Tower().requires_grad_(False)
    loss = GradientCache((lambda x: teacher(x.sub_(0.5)), tower), clip_loss, 3)(*pairs())
    for parameter in teacher.parameters():
        parameter.mul_(2)
    loss.backward()
    assert all(gradient is not None for gradient in gradients(tower))


def test_a_forward_pass_may_cast_a_parameter_or_copy_it():
    """As quantised layers do with their bias."""
    model = MovingAverage(lambda slow, new: setattr(slow, "data", slow.data.to(new.dtype).clone()))
    model.slow.float()
    GradientCache((model, model), clip_loss, 3)(*pairs()).backward()
    assert all(gradient is not None for gradient in gradients(model.tower))


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
    step = made((tower, tower), clip_loss, size)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        batches = pairs()
        step(*batches).backward()
        clip_loss(*map(plain, batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_gradients([*tower.parameters()], [*plain.parameters()])
    install(tower := Checkpointed())
    loss = made((tower, Tower()), clip_loss, size)(*pairs())
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
