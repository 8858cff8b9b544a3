"""The loss of a step in all the ways in which callers use a loss; its pass inside autograd."""

import copy
import gc
import os
import pickle
import signal
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    BATCH,
    DIMS,
    Checkpointed,
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
from tests.planning.allocator import peak_bytes

#: Micro-batches of 3 rows; one, whose graph is kept.
both_sizes = pytest.mark.parametrize("size", [3, 100])


def twins(**options):
    model = TwoTowers(**options)
    return model, copy.deepcopy(model)


@both_sizes
def test_losses_added_and_scaled(size):
    """Two of one model, one of another one, and a plain one; one uses parameters in its loss."""
    model, other = TwoTowers(), TwoTowers()
    first, second, third, more = pairs(7), pairs(5), pairs(4), pairs(3)

    def penalised(*outputs):
        penalty = model.logit_scale.square() + model.image.layers[0].weight.square().sum()
        return biased_loss(*outputs) + penalty

    def total(of_model, of_other):
        loss = of_model(*first) + 3 * of_model(*second) - of_other(*third) / 2
        return loss + biased_loss(*model(*more))

    losses = (model, penalised), (other, biased_loss)
    steps = [GradientCache(one, loss, size) for one, loss in losses]
    plain = [lambda *batches, of=(one, loss): of[1](*of[0](*batches)) for one, loss in losses]
    assert_same(lambda: total(*steps), lambda: total(*plain), model, other)


@both_sizes
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
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1e-3) for m in (model, plain)]
    torch.testing.assert_close(*norms)
    assert_same_gradients(gradients(model), gradients(plain))


@both_sizes
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


@both_sizes
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
        one.unused = nn.Linear(2, 2)
        torch.autograd.graph.register_multi_grad_hook(
            tuple(one.parameters()), lambda found, log=log: log.append(("all", found))
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


@both_sizes
@pytest.mark.parametrize("by_keyword", [True, False])
def test_keywords_and_closures_with_a_graph(size, by_keyword):
    """The step's backward pass frees the graph of a scale that is computed before the step."""
    towers, head = nn.ModuleList([Tower(), Tower()]), nn.ParameterList([torch.tensor(1.2)])
    batches = pairs()

    def cached(scale):
        if by_keyword:
            return GradientCache(towers, clip_loss, size)(*batches, logit_scale=scale)
        return GradientCache(towers, lambda x, y: clip_loss(x, y, scale), size)(*batches)

    def plain(scale):
        return clip_loss(*(t(b) for t, b in zip(towers, batches, strict=True)), scale)

    assert_same(lambda: cached(head[0].exp()), lambda: plain(head[0].exp()), towers, head)
    scale = head[0].exp()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        (cached(scale) + 0.1 * scale).backward()


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


@both_sizes
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


@both_sizes
def test_a_reentrant_checkpoint(size):
    """Each micro-batch adds to `.grad` directly, from graphs that were kept as well."""
    model, batches = Checkpointed(), pairs()
    for kept in (0, 1):
        step = GradientCache((model, model), clip_loss, size, kept_micro_batches=kept)
        assert_same(lambda s=step: s(*batches), lambda: clip_loss(*map(model, batches)), model)
    if size == 100:  # the graph is recorded before the backward pass
        before = [gradient.clone() for gradient in gradients(model)]
        with pytest.raises(RuntimeError, match=r"grad and inputs= .*encoder 0.*reentrant"):
            torch.autograd.grad(step(*batches), list(model.parameters()))
        assert_same_gradients(gradients(model), before)


@both_sizes
def test_a_backward_pass_in_another_thread(size):
    model, batches = TwoTowers(dropout=0.5), pairs()
    step = GradientCache(model, biased_loss, size)

    def in_thread():
        value = step(*batches)
        thread = threading.Thread(target=value.backward)
        thread.start()
        thread.join()
        return value.detach().requires_grad_()  # whose own backward pass adds nothing

    assert_same(in_thread, lambda: step(*batches), model)


def test_a_dropped_cache_frees_its_encoders_at_once():
    gc.collect()
    gc.disable()
    try:
        towers = Tower(), Tower()
        weights = [weakref.ref(p) for tower in towers for p in tower.parameters()]
        step = GradientCache(towers, clip_loss, 4)
        step(*pairs()).backward()
        del towers, step
        assert [weight() for weight in weights] == [None] * len(weights)
    finally:
        gc.enable()


@both_sizes
def test_what_a_loss_holds(size):
    """Batch and features until its backward pass, or until it is dropped."""
    (images, texts), seen = pairs(), []

    def loss(x, y, scale, bias):
        seen.extend([weakref.ref(x), weakref.ref(y)])
        return biased_loss(x, y, scale, bias)

    step = GradientCache(TwoTowers(), loss, size)
    value = step(images, texts)
    assert all(ref() is not None for ref in seen)
    value.backward()
    seen += [weakref.ref(images), weakref.ref(texts)]
    del images, texts
    assert [ref() for ref in seen] == [None] * 4
    step(*pairs())  # is dropped
    assert [ref() for ref in seen] == [None] * 6


@both_sizes
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_step_only_evaluates(size, mode):
    model, batches = TwoTowers(), pairs()
    step = GradientCache(model, biased_loss, size)
    with mode():
        value = step(*batches)
    assert not value.requires_grad
    torch.testing.assert_close(value, biased_loss(*model(*batches)).detach())
    assert gradients(model) == [None] * len(gradients(model))
    assert len(model.image.graph_recorded) == (3 if size == 3 else 1) + 1
    step(*batches).backward()  # a training step right after it works
    assert all(gradient is not None for gradient in gradients(model))
    frozen = Tower().requires_grad_(False)
    with mode():
        assert GradientCache((frozen, frozen), clip_loss, size)(*batches).isfinite()


@both_sizes
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


def test_inside_torch_compile_a_step_is_left_out_of_the_graph():
    torch.compiler.reset()
    model, batches, compiled = TwoTowers(), pairs(), []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def scaled(step, x, y):
        return 3 * step(2 * x, y)

    step = GradientCache(model, biased_loss, 3)
    function = torch.compile(scaled, backend=backend)
    assert_same(
        lambda: function(step, *batches),
        lambda: 3 * biased_loss(*model(2 * batches[0], batches[1])),
        model,
    )
    assert compiled


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
@both_sizes
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


@pytest.mark.gpu
@both_sizes
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
