"""A refused backward pass changes no gradient; loops without a backward pass raise."""

import contextlib
import random
import re

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    WIDTH,
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
@pytest.mark.parametrize(
    ("backward", "message"),
    [
        (lambda loss, p: loss.backward(retain_graph=True), "retain_graph=True is not possible"),
        (lambda loss, p: loss.backward(create_graph=True), "create_graph=True is not possible"),
        (
            lambda loss, p: torch.autograd.grad(loss, p, retain_graph=True),
            "retain_graph=True is not possible",
        ),
        (lambda loss, p: torch.autograd.grad(loss, p, create_graph=True), "create_graph=True"),
    ],
)
def test_retain_graph_and_create_graph(size, backward, message):
    model, plain, batches = with_gradients(TwoTowers()), TwoTowers(), pairs()
    plain.load_state_dict(model.state_dict())
    loss = made(model, biased_loss, size)(*batches)
    with refused(model, message):
        backward(loss, list(model.parameters()))
    loss.backward()  # still possible
    biased_loss(*with_gradients(plain)(*batches)).backward()
    assert_same_gradients(gradients(model), gradients(plain))


@pytest.mark.parametrize("size", SIZES)
def test_a_second_backward_pass(size):
    model = TwoTowers()
    loss = made(model, biased_loss, size)(*pairs())
    loss.backward()
    with_gradients(model)
    with refused(model, "expected one backward pass of a loss, got a second one"):
        loss.backward()


@pytest.mark.parametrize("size", SIZES)
def test_a_parameter_changed_in_place(size):
    model = with_gradients(TwoTowers())
    loss = made(model, biased_loss, size)(*pairs())
    torch.optim.SGD([model.text.layers[3].bias], lr=1.0).step()
    message = "parameter text.layers.3.bias of the model was changed in place after the step"
    with refused(model, message):
        loss.backward()


def test_a_parameters_data_replaced_in_between():
    model = with_gradients(TwoTowers())
    loss = made(model, biased_loss, (3, 0))(*pairs())
    model.logit_bias.data = model.logit_bias.data * 2
    with refused(model, "parameter logit_bias of the model was changed in place"):
        loss.backward()


@pytest.mark.parametrize("size", SIZES)
def test_a_batch_changed_in_place(size):
    model, (images, texts) = with_gradients(TwoTowers()), pairs()
    step = made(lambda x, y: model(x, y["ids"][0]), biased_loss, size)
    loss = step(images, {"ids": [texts]})
    texts.zero_()
    with refused(model, r"batch 1\['ids'\]\[0\] of the model was changed in place"):
        loss.backward()


def test_an_encoder_without_a_second_pass_may_change():
    """Such as a teacher that is a moving average of its student."""
    teacher, student = Tower().requires_grad_(False), Tower()
    loss = GradientCache((teacher, student), clip_loss, 3)(*pairs())
    for parameter in teacher.parameters():
        parameter.mul_(2)
    loss.backward()
    assert all(gradient is not None for gradient in gradients(student))


@pytest.mark.parametrize("size", SIZES)
def test_compiled_autograd(size):
    model = with_gradients(TwoTowers())
    loss = made(model, biased_loss, size)(*pairs())
    compiler = torch.compile(backend="eager")
    with refused(model, "cannot compile the second pass"), compiled_autograd._enable(compiler):
        loss.backward()


def loop(step, model, backward, optimizer=None, steps=3):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        value = step(*pairs())
        backward(value)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("keep", [True, False])
def test_a_loop_without_a_backward_pass_raises_at_its_second_step(keep):
    model, kept = TwoTowers(), []
    step = GradientCache(model, biased_loss, 3)
    message = "the loss of the previous step was never backpropagated: call loss.backward() before"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        loop(step, model, kept.append if keep else lambda value: None)
    assert len(model.image.graph_recorded) == 3  # the first step's
    loop(step, model, lambda value: value.backward())


def test_losses_that_are_only_evaluated_raise_nothing():
    model, other = TwoTowers(), TwoTowers()
    step = GradientCache(model, biased_loss, 3)
    # Discarded, like one that is not finite; the next one is used.
    loop(step, model, lambda value: (step(*pairs()), step(*pairs()).backward()))
    for _ in range(3):
        step(*pairs())
    # Another model's optimizer steps meanwhile.
    waiting = step(*pairs())
    loop(GradientCache(other, biased_loss, 3), other, lambda value: value.backward())
    step(*pairs())
    waiting.backward()
    # Evaluated between training steps.
    with torch.no_grad():
        step(*pairs())
    loop(step, model, lambda value: value.backward())
    with torch.no_grad():
        loop(step, model, lambda value: None)


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
    with pytest.raises(
        RuntimeError, match="reached the features that were passed to the loss, but not"
    ):
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

    def forward(self, x):
        self.left -= 1
        if not self.left:
            raise self.error
        return self.tower(self.norm(x))


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt("stop")])
@pytest.mark.parametrize("calls", [7, 9, 12])  # two encoders of three micro-batches: 6 first
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
    assert torch.equal(torch.get_rng_state(), state)
    assert gradients(encoder) == [None] * len(gradients(encoder))
    assert not any(parameter._backward_hooks for parameter in encoder.parameters())
    assert not any(module.training for module in encoder.modules())
    assert encoder.norm.track_running_stats
    with pytest.raises(RuntimeError, match="got a second one"):
        loss.backward()
    step(*pairs(8)).backward()
    assert all(gradient is not None for gradient in gradients(encoder))


def test_an_exception_between_the_passes():
    """In the loss, or in the caller's code: the next step works normally."""
    towers, plain = (Tower(), Tower()), (Tower(), Tower())
    for one, other in zip(towers, plain, strict=True):
        other.load_state_dict(one.state_dict())
    broken = [True, False]

    def loss(x, y):
        if broken.pop(0):
            raise RuntimeError("stop")
        return clip_loss(x, y)

    step = GradientCache(towers, loss, 3)
    with pytest.raises(RuntimeError, match="stop"):
        step(*pairs())
    batches = pairs()
    step(*batches).backward()
    clip_loss(*(tower(b) for tower, b in zip(plain, batches, strict=True))).backward()
    assert_same_gradients(gradients(*towers), gradients(*plain))
