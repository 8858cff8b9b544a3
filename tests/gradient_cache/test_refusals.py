"""Refused backward passes change no gradient; tensors and hooks that change something."""

import contextlib
import functools
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
    HiddenTower,
    Tower,
    TwoTowers,
    assert_same,
    assert_same_gradients,
    biased_loss,
    clip_loss,
    gradients,
    one_graph,
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
        (
            lambda bias, texts: torch.optim.SGD([bias], lr=1.0).step(),
            "parameter text.layers.3.bias",
        ),
        (lambda bias, texts: setattr(bias, "data", bias.data * 2), "parameter text.layers.3.bias"),
        (lambda bias, texts: texts.zero_(), "batch 1['ids'][0]"),
    ],
)
def test_a_parameter_or_a_batch_changed_in_place(change, name, size):
    model, (images, texts) = with_gradients(TwoTowers()), pairs()
    step = made(lambda x, y: model(x, y["ids"][0]), biased_loss, size)
    loss = step(images, {"ids": [texts]})
    change(model.text.layers[3].bias, texts)
    with refused(model, re.escape(name) + ".* of the model was changed in place after the step"):
        loss.backward()


def test_an_encoder_without_a_second_pass_may_change():
    """Such as a teacher that is a moving average of its student."""
    teacher, student = Tower().requires_grad_(False), Tower()
    loss = GradientCache((teacher, student), clip_loss, 3)(*pairs())
    for parameter in teacher.parameters():
        parameter.mul_(2)
    loss.backward()
    assert all(gradient is not None for gradient in gradients(student))


class Holder:
    """An object that hides a model two objects deep."""

    def __init__(self, model):
        self.parts = SimpleNamespace(model=model)

    def encode(self, x):
        return self.parts.model(x)


@pytest.mark.parametrize("size", SIZES)
def test_a_parameter_that_is_out_of_sight(size):
    """A wrapper might be, too, which would reduce gradients in each micro-batch."""
    tower = with_gradients(Tower())
    for encoder in (Holder(tower).encode, HiddenTower(tower)):
        step = made((encoder, Tower()), clip_loss, size)
        with refused(tower, r"encoder 0 uses a parameter of shape \(\d, \d\) that is in no module"):
            step(*pairs()).backward()


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
def test_a_loop_without_a_backward_pass_raises_at_its_first_step(keep):
    model, kept = TwoTowers(), []
    step = GradientCache(model, biased_loss, 3)
    message = "the loss of the last step was not backpropagated: call loss.backward() before"
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
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.left -= 1
        self.calls += 1
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


def test_an_exception_between_the_passes():
    """In the loss, or in the caller's code: the next step works normally."""
    towers, batches, broken = (Tower(), Tower()), pairs(), [True, False]

    def loss(x, y):
        if broken.pop(0):
            raise RuntimeError("stop")
        return clip_loss(x, y)

    step = GradientCache(towers, loss, 3)
    with pytest.raises(RuntimeError, match="stop"):
        step(*pairs())
    plain = functools.partial(one_graph, towers, batches, clip_loss, 3)
    assert_same(lambda: step(*batches), plain, *towers)


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
        made((make(), Tower()), clip_loss, size)(*pairs())


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


@pytest.mark.parametrize("size", SIZES)
def test_a_hook_on_several_parameters_is_called_once(size):
    tower, calls = Tower(), []
    tower.unused = nn.Linear(2, 2)
    torch.autograd.graph.register_multi_grad_hook(tuple(tower.parameters()), calls.append)
    made((tower, tower), clip_loss, size)(*pairs()).backward()
    (found,) = calls
    assert_same_gradients([*found], gradients(tower))
