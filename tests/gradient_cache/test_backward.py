"""The loss of a step in all the ways in which callers use a loss."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    BATCH,
    DIMS,
    WIDTH,
    Tower,
    TwoTowers,
    assert_same_gradients,
    biased_loss,
    clip_loss,
    gradients,
    pairs,
)

SIZES = [3, 100]  # several micro-batches; one, whose graph is kept


def twins(**options):
    model = TwoTowers(**options)
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("size", SIZES)
def test_two_losses_added_one_of_them_scaled(size):
    model, plain = twins()
    other, other_plain = twins()
    first, second, third = pairs(7), pairs(5), pairs(4)
    expected = (
        biased_loss(*plain(*first))
        + 3 * biased_loss(*plain(*second))
        - biased_loss(*other_plain(*third)) / 2
    )
    expected.backward()
    step = GradientCache(model, biased_loss, size)
    value = step(*first) + 3 * step(*second)
    value = value - GradientCache(other, biased_loss, size)(*third) / 2
    value.backward()
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    assert_same_gradients(gradients(model, other), gradients(plain, other_plain))


@pytest.mark.parametrize("size", SIZES)
def test_added_to_a_plain_loss_of_the_same_parameters(size):
    model, plain = twins()
    batches, more = pairs(), pairs(3)
    (biased_loss(*plain(*batches)) + biased_loss(*plain(*more))).backward()
    (GradientCache(model, biased_loss, size)(*batches) + biased_loss(*model(*more))).backward()
    assert_same_gradients(gradients(model), gradients(plain))


@pytest.mark.parametrize("size", SIZES)
def test_accumulation_and_clipping(size):
    model, plain = twins()
    parts = [pairs() for _ in range(3)]
    step = GradientCache(model, biased_loss, size)
    for i, batches in enumerate(parts):
        (biased_loss(*plain(*batches)) / 3).backward()
        before = [p.grad for p in model.parameters()]
        loss = step(*batches)
        loss /= 3
        loss.backward()
        if i:  # added in place, as autograd accumulates
            assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
    assert_same_gradients(gradients(model), gradients(plain))
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1e-3) for m in (model, plain)]
    torch.testing.assert_close(*norms)
    assert_same_gradients(gradients(model), gradients(plain))


@pytest.mark.parametrize("size", SIZES)
def test_torch_autograd_grad_and_inputs(size):
    model, plain = twins()
    batches = pairs()
    wanted = torch.autograd.grad(biased_loss(*plain(*batches)), list(plain.parameters()))
    step = GradientCache(model, biased_loss, size)
    found = torch.autograd.grad(step(*batches), list(model.parameters()))
    assert_same_gradients(found, wanted)
    assert gradients(model) == [None] * len(wanted)
    some = [model.logit_scale, model.image.layers[0].weight]
    for rounds in (1, 2):
        step(*batches).backward(inputs=some)
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            if any(parameter is chosen for chosen in some):
                torch.testing.assert_close(parameter.grad, rounds * gradient)
            else:
                assert parameter.grad is None


@pytest.mark.parametrize("size", SIZES)
def test_hooks_are_called_once_per_step(size):
    model, plain = twins()
    seen = {id(model): [], id(plain): []}
    for one in (model, plain):
        log = seen[id(one)]
        weight = one.image.layers[0].weight
        weight.register_hook(lambda g, log=log: log.append(("first", g.clone())))
        weight.register_hook(lambda g: 10 * g.clamp(-1e-3, 1e-3))  # not linear
        weight.register_hook(lambda g, log=log: log.append(("last", g.clone())))
        for parameter in one.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, log=log: log.append(("added", p.grad.clone()))
            )
    step = GradientCache(model, biased_loss, size)
    for _ in range(2):
        batches = pairs()
        biased_loss(*plain(*batches)).backward()
        step(*batches).backward()
    assert_same_gradients(gradients(model), gradients(plain))
    mine, theirs = seen[id(model)], seen[id(plain)]
    for kind in ("first", "last"):
        found, wanted = ([g for k, g in log if k == kind] for log in (mine, theirs))
        assert_same_gradients(found, wanted)
    assert sorted(k for k, _ in mine) == sorted(k for k, _ in theirs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("by_keyword", [True, False])
def test_keywords_and_closures_with_a_graph(size, by_keyword):
    """The scale is computed before the step and used again after it."""
    towers, log_scale = (Tower(), Tower()), nn.Parameter(torch.tensor(1.2))
    batches, gradient = pairs(), []

    def cached(scale):
        if by_keyword:
            step = GradientCache(towers, clip_loss, size)
            return step(*batches, logit_scale=scale)
        return GradientCache(towers, lambda x, y: clip_loss(x, y, scale), size)(*batches)

    def plain(scale):
        return clip_loss(*(t(b) for t, b in zip(towers, batches, strict=True)), scale)

    for loss in (plain, cached):
        scale = log_scale.exp()
        value = loss(scale)
        if by_keyword:  # the scale's graph remains the caller's
            value = value + 0.1 * scale
        value.backward()
        gradient.append([*gradients(*towers), log_scale.grad])
        log_scale.grad = None
        for tower in towers:
            tower.zero_grad()
    assert_same_gradients(gradient[1], gradient[0])


@pytest.mark.parametrize("size", SIZES)
def test_a_parameter_in_the_encoder_and_in_the_loss(size):
    model, plain = twins()
    batches = pairs()

    def loss_of(one):
        def loss(x, y, scale, bias):
            penalty = one.logit_scale.square() + one.image.layers[0].weight.square().sum()
            return biased_loss(x, y, scale, bias) + penalty

        return loss

    loss_of(plain)(*plain(*batches)).backward()
    GradientCache(model, loss_of(model), size)(*batches).backward()
    assert_same_gradients(gradients(model), gradients(plain))


@pytest.mark.parametrize("size", SIZES)
def test_batches_with_a_graph(size):
    (images, texts), towers = pairs(), (Tower(), Tower())
    stem = nn.Linear(WIDTH, WIDTH)
    found = []
    for cached in (False, True):
        x = stem(images)
        if cached:
            loss = GradientCache(towers, clip_loss, size)(x, texts)
        else:
            loss = clip_loss(towers[0](x), towers[1](texts))
        (loss + x.sum()).backward()
        found.append(gradients(stem, *towers))
        for module in (stem, *towers):
            module.zero_grad()
    assert_same_gradients(found[1], found[0])


class SharedGradients(nn.Module):
    """Gradients that autograd shares between parameters, expands, or makes sparse."""

    def __init__(self, sparse=False):
        super().__init__()
        self.table = nn.Embedding(9, DIMS, sparse=sparse)
        self.a, self.b = nn.Parameter(torch.ones(DIMS)), nn.Parameter(torch.ones(DIMS))
        self.unused = nn.Parameter(torch.ones(2))
        self.gain = nn.Parameter(torch.ones(2, DIMS).T)  # not contiguous

    def forward(self, tokens):
        return self.table(tokens).mean(1) + self.a + self.b + self.gain.sum(1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_that_are_shared_expanded_sparse_or_none(size, sparse):
    model = SharedGradients(sparse)
    plain = copy.deepcopy(model)
    tokens = [torch.randint(9, (BATCH, 3)) for _ in range(2)]
    step = GradientCache((model, model), clip_loss, size)
    for _ in range(2):
        clip_loss(*map(plain, tokens)).backward()
        step(*tokens).backward()
    assert model.unused.grad is None
    assert model.table.weight.grad.is_sparse == sparse
    assert model.gain.grad.stride() == plain.gain.grad.stride()
    for one in (model, plain):
        one.unused.requires_grad_(False)
        one.table.weight.grad = one.table.weight.grad.to_dense()
    assert_same_gradients(gradients(model), gradients(plain))


@pytest.mark.parametrize("size", SIZES)
def test_a_reentrant_checkpoint(size):
    """It starts a backward pass of its own, so each micro-batch adds to `.grad` directly."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = Tower()
            self.bias = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return checkpoint(self.tower, x + self.bias, use_reentrant=True)

    model = Checkpointed()
    plain = copy.deepcopy(model)
    x, y = pairs()
    clip_loss(plain(x), plain(y)).backward()
    step = GradientCache((model, model), clip_loss, size)
    loss = step(x, y)
    loss.backward()
    assert_same_gradients(gradients(model), gradients(plain))
    if size == 100:  # the graph is recorded before the backward pass
        with pytest.raises(RuntimeError, match=r"grad and inputs= .*encoder 0.*reentrant"):
            torch.autograd.grad(step(x, y), list(model.parameters()))
        assert_same_gradients(gradients(model), gradients(plain))


@pytest.mark.parametrize("size", SIZES)
def test_a_backward_pass_in_another_thread(size):
    model, plain = twins(dropout=0.5)
    batches = pairs()
    for one in (model, plain):
        torch.manual_seed(3)
        loss = GradientCache(one, biased_loss, size)(*batches)
        if one is model:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        else:
            loss.backward()
    assert_same_gradients(gradients(model), gradients(plain))


def test_a_dropped_cache_frees_its_encoders_at_once():
    gc.collect()
    gc.disable()
    try:
        towers = Tower(), Tower()
        weights = [weakref.ref(p) for tower in towers for p in tower.parameters()]
        step = GradientCache(towers, clip_loss, 4)
        loss = step(*pairs())
        loss.backward()
        del towers, step, loss
        assert [weight() for weight in weights] == [None] * len(weights)
    finally:
        gc.enable()


@pytest.mark.parametrize("size", SIZES)
def test_a_loss_after_its_backward_pass_holds_no_batch(size):
    model = TwoTowers()
    images, texts = pairs()
    seen, features = [weakref.ref(images), weakref.ref(texts)], []

    def loss(x, y, scale, bias):
        features.extend([weakref.ref(x), weakref.ref(y)])
        return biased_loss(x, y, scale, bias)

    value = GradientCache(model, loss, size)(images, texts)
    assert all(ref() is not None for ref in features)
    value.backward()
    del images, texts
    assert [ref() for ref in seen + features] == [None] * 4
    assert value.isfinite()


@pytest.mark.parametrize("size", SIZES)
def test_a_dropped_loss_frees_its_batch(size):
    images, texts = pairs()
    seen = weakref.ref(images)
    step = GradientCache(TwoTowers(), biased_loss, size)
    step(images, texts)
    del images
    assert seen() is None
    step(*pairs()).backward()  # the next step works


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_step_only_evaluates(size, mode):
    model, batches = TwoTowers(), pairs()
    step = GradientCache(model, biased_loss, size)
    with mode():
        value = step(*batches)
    assert not value.requires_grad
    torch.testing.assert_close(value, biased_loss(*model(*batches)).detach())
    assert gradients(model) == [None] * len(gradients(model))
    rounds = 3 if size == 3 else 1
    assert len(model.image.graph_recorded) == rounds + 1
    step(*batches).backward()  # a training step right after it works
    assert all(gradient is not None for gradient in gradients(model))


def test_a_loss_that_needs_no_gradient_can_be_evaluated():
    frozen = Tower().requires_grad_(False)
    with torch.no_grad():
        value = GradientCache((frozen, frozen), clip_loss, 3)(*pairs())
    assert value.isfinite()


@pytest.mark.parametrize("size", SIZES)
def test_copies_and_pickles(size):
    model = TwoTowers()
    step = GradientCache(model, biased_loss, size)
    batches = pairs()
    step(*batches).backward()
    expected = gradients(model)
    for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        (copied,) = other._encoders
        copied.zero_grad()
        other(*batches).backward()
        assert_same_gradients(gradients(copied), expected)


@pytest.mark.parametrize("size", SIZES)
def test_inside_torch_compile_a_step_is_left_out_of_the_graph(size):
    torch.compiler.reset()
    model, plain = twins()
    batches, compiled = pairs(), []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def scaled(step, x, y):
        return 3 * step(2 * x, y)

    step = GradientCache(model, biased_loss, size)
    value = torch.compile(scaled, backend=backend)(step, *batches)
    value.backward()
    assert compiled
    expected = 3 * biased_loss(*plain(2 * batches[0], batches[1]))
    expected.backward()
    torch.testing.assert_close(value, expected)
    assert_same_gradients(gradients(model), gradients(plain))
