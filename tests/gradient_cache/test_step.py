"""The step against one graph of the whole batch; numbers of forward passes, memory, outputs."""

import functools
import gc
import os
import signal
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    BATCH,
    DIMS,
    MICRO_BATCH_SIZES,
    WIDTH,
    SavedTensor,
    Tower,
    TwoTowers,
    assert_same,
    assert_same_gradients,
    biased_loss,
    clip_loss,
    gradients,
    pairs,
)

#: Layers of an encoder that are frozen; through the last one a gradient passes.
FROZEN = {"nothing": [], "first": [0], "last": [3], "all": [0, 3]}


def retrieval_loss(queries, passages):
    """The passages of a query are consecutive, its positive first."""
    k = len(passages) // len(queries)
    return F.cross_entropy(queries @ passages.T, torch.arange(len(queries)) * k)


@settings(max_examples=30)
@given(
    queries=st.integers(2, 7),
    passages=st.integers(1, 4),
    sizes=st.tuples(*2 * [st.sampled_from(MICRO_BATCH_SIZES)]),
    kept=st.tuples(*2 * [st.sampled_from([0, 0, 1, 2, 100])]),
    frozen=st.tuples(*2 * [st.sampled_from(sorted(FROZEN))]),
    shared=st.booleans(),
    leaves=st.tuples(*2 * [st.booleans()]),
    device=st.sampled_from([None, "cpu"]),
    as_function=st.booleans(),
)
def test_two_encoders_and_a_parameter_of_the_loss(
    queries, passages, sizes, kept, frozen, shared, leaves, device, as_function
):
    """Encoders of their own or one, partly frozen, and batches that require a gradient or not."""
    scale = nn.ParameterList([torch.tensor(1.2)])
    towers = (tower := Tower(), tower if shared else Tower())
    for one, name in zip(towers, frozen, strict=True):
        for layer in FROZEN[name]:
            one.layers[layer].requires_grad_(False)
    rows = queries, passages * queries
    batches = nn.ParameterList(
        nn.Parameter(torch.randn(n, WIDTH), requires_grad=needs)
        for n, needs in zip(rows, leaves, strict=True)
    )
    seen = [[], []]

    def counted(i, x):
        seen[i].append(len(x))
        return towers[i](x)

    def loss(x, y):
        return scale[0].exp() * retrieval_loss(x, y)

    encoders = [functools.partial(counted, i) for i in range(2)] if as_function else towers
    step = GradientCache(encoders, loss, list(sizes), kept_micro_batches=kept, device=device)
    plain = lambda: loss(towers[0](batches[0]), towers[1](batches[1]))  # noqa: E731
    assert_same(lambda: step(*batches), plain, *towers, batches, scale)
    if as_function:
        several = any(n > size for n, size in zip(rows, sizes, strict=True))
        for i, (n, size) in enumerate(zip(rows, sizes, strict=True)):
            parts = [len(part) for part in torch.arange(n).split(size)]
            differentiated = leaves[i] or any(p.requires_grad for p in towers[i].parameters())
            again = parts[: max(0, len(parts) - kept[i])] if several and differentiated else []
            assert seen[i] == parts + again


@pytest.mark.parametrize("kept", [0, 1, 2, 100])  # of 3 micro-batches: 7 rows, 3 at a time
@pytest.mark.parametrize(("form", "scale_shape"), [(tuple, ()), (dict, (1,))])
def test_one_model_that_returns_scale_and_bias(form, scale_shape, kept):
    """Micro-batches whose graphs are kept are encoded once."""
    model, batches = TwoTowers(form, scale_shape=scale_shape), pairs()

    def plain():
        outputs = model(*batches)
        return biased_loss(**outputs) if form is dict else biased_loss(*outputs)

    step = GradientCache(model, biased_loss, 3, kept_micro_batches=1)
    step.kept_micro_batches = kept  # may change between steps
    assert_same(lambda: step(*batches), plain, model, tolerance=1e-12)
    assert model.logit_scale.grad.abs().item() > 1e-6
    recorded = [True] + [False] * max(0, 3 - kept) + [True] * 3
    assert model.image.graph_recorded == model.text.graph_recorded == recorded


def test_a_batch_of_one_micro_batch_is_an_ordinary_step():
    """Bit for bit, with dropout and batch normalisation; it is encoded once, with a graph."""
    model, seen = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)), []
    step, batches = GradientCache((model, model), clip_loss, 6), pairs(6)
    assert_same(lambda: step(*batches), lambda: clip_loss(*map(model, batches)), model, tolerance=0)
    model.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    step(*batches).backward()
    assert seen == [True, True]


@pytest.mark.parametrize(
    ("encoder", "loss", "error", "message"),
    [
        (None, lambda x, y: x @ y.T, ValueError, r"loss.*\(7, 7\)"),
        (None, lambda x, y: 1.0, TypeError, "loss.*float"),
        (None, lambda x, y: {"loss": x.sum()}, TypeError, "loss.*dict"),
        (None, lambda x, y: x.detach().sum(), ValueError, "loss.*requires a gradient"),
        (lambda x: {"a": x, "b": x}, None, TypeError, r"encoder 1 returned \(Tensor, Tensor\)"),
        (lambda x: (None,), None, TypeError, r"encoder 1 returned \(NoneType\)"),
        (lambda x: "no", None, TypeError, "encoder 1.*got str"),
    ],
)
def test_bad_losses_and_outputs_of_several_encoders(encoder, loss, error, message):
    tower = Tower()
    with pytest.raises(error, match=message):
        GradientCache((tower, encoder or tower), loss or clip_loss, 3)(*pairs()).backward()
    assert all(gradient is None for gradient in gradients(tower))


@pytest.mark.parametrize("of", [lambda t: t, lambda t: t.forward, lambda t: lambda x: t(x)])
def test_a_frozen_tower_runs_once(of):
    (x, y), frozen, tower = pairs(), Tower().requires_grad_(False), Tower()
    step = GradientCache((of(frozen), of(tower)), clip_loss, 3)
    assert_same(lambda: step(x, y), lambda: clip_loss(frozen(x), tower(y)), tower)
    assert len(frozen.graph_recorded) == 1 + 3
    # The first pass records no graph if a second one will come, as a module's parameters show, or
    # the graph of a function's first micro-batch.
    module = isinstance(of(tower), Tower)
    assert tower.graph_recorded[1:] == [not module, False, False] + [True] * 3


def outputs_of(extra, loss, micro_batch_size=3, plain=True):
    """One step of a model that returns two features and `extra(model, features)`."""
    model, batches = TwoTowers(), pairs()

    def encode(images, texts):
        x, y = model(images, texts)[:2]
        return {"x": x, "y": y, **extra(model, x)}

    def one_graph():
        return loss(**{k: v for k, v in encode(*batches).items() if v is not None})

    step = GradientCache(encode, loss, micro_batch_size)
    assert_same(lambda: step(*batches), one_graph if plain else lambda: step(*batches), model)


@pytest.mark.parametrize("micro_batch_size", [2, 3, 7])
def test_outputs_of_other_kinds(micro_batch_size):
    def loss(x, y, weight, tokens, labels, bias=None):
        assert weight.shape == (BATCH,)
        assert tokens.shape == (BATCH, 2, DIMS)
        assert labels.dtype == torch.int64
        assert bias is None
        return clip_loss(x, y) + tokens[labels > 0].square().sum() + (weight * (x * y).sum(1)).sum()

    def extra(model, x):
        return {
            "weight": x[:, 0].exp(),
            "tokens": torch.stack([x, 2 * x], dim=1),
            "labels": (x[:, 0] > 0).long(),
            "bias": None,  # left out of the loss's keywords
        }

    outputs_of(extra, loss, micro_batch_size)


def test_outputs_of_a_tuple_by_position():
    model, batches = Tower(), pairs()
    for encode, loss, outputs in (
        (lambda a, b: (model(a), None, model(b)), lambda x, _, y: clip_loss(x, y), None),
        (lambda a, b: (model(a), len(a), model(b)), lambda y, x: clip_loss(x, y), (2, 0)),
    ):
        step = GradientCache(encode, loss, 3, outputs=outputs)
        plain = lambda: clip_loss(*map(model, batches))  # noqa: E731
        assert_same(lambda step=step: step(*batches), plain, model)


def test_an_output_that_the_loss_ignores_gets_no_gradient_as_in_a_plain_step():
    head = nn.Linear(DIMS, 3)
    outputs_of(lambda m, x: {"aux": head(x)}, lambda x, y, aux: clip_loss(x, y))
    assert all(gradient is None for gradient in gradients(head))


@pytest.mark.parametrize(("kept", "passes"), [(0, 6), (2, 4)])
def test_an_encoder_that_the_loss_ignores_has_no_second_pass(kept, passes):
    towers = (Tower(), Tower())
    step = GradientCache(towers, lambda x, y: x[:, 0].sum(), 3, kept_micro_batches=kept)
    step(*pairs()).backward()
    assert [len(tower.graph_recorded) for tower in towers] == [passes, 3]
    assert gradients(towers[1]) == [None] * 4


@pytest.mark.parametrize(
    ("extra", "micro_batch_size", "error", "message"),
    [
        (lambda m, x: {"z": x.exp().mean()}, 3, ValueError, r"'z'.*differs"),
        (lambda m, x: {"z": x[:, 0]}, 1, ValueError, r"'z'.*at least 2 rows"),
        (lambda m, x: {"z": m.image.layers[0].weight}, 3, ValueError, r"'z'.*\(8, 5\).*3 or 1"),
        (lambda m, x: {"z": x.T @ x}, 3, ValueError, r"'z'.*row per sample"),
        (lambda m, x: {"z": x @ x.T}, 3, ValueError, r"'z'.*\(3, 3\) or \(1, 1\)"),
        (lambda m, x: {"z": 3.0}, 3, TypeError, "'z'.*float"),
        (lambda m, x: {"z": None if len(x) == 1 else x}, 3, ValueError, "'z'.*None"),
        (lambda m, x: {"z": x} if len(x) == 1 else {}, 3, ValueError, "different outputs"),
    ],
)
def test_outputs_that_cannot_be_joined(extra, micro_batch_size, error, message):
    with pytest.raises(error, match=message):
        outputs_of(extra, lambda x, y, z: clip_loss(x, y), micro_batch_size, plain=False)


def test_a_scale_that_is_nan_gives_a_nan_loss():
    model = TwoTowers()
    model.logit_scale.data.fill_(torch.nan)
    assert GradientCache(model, biased_loss, 3)(*pairs()).isnan()


@pytest.mark.parametrize("kind", [torch.Tensor.requires_grad_, nn.Parameter])
def test_tensors_of_no_module_get_their_gradients(kind):
    weight = kind(torch.randn(WIDTH, 4))
    expected = weight.detach().clone().requires_grad_()
    batches = pairs()
    for _ in range(2):
        GradientCache((lambda x: x @ weight,) * 2, clip_loss, 3)(*batches).backward()
        clip_loss(*(batch @ expected for batch in batches)).backward()
    assert_same_gradients([weight.grad], [expected.grad])


class Graphs:
    """Counts the living graphs of towers: each saves one tensor of 8 columns."""

    def __init__(self):
        self._alive, self.peak = weakref.WeakSet(), 0

    def __call__(self):
        return len(self._alive)

    def pack(self, tensor):
        saved = SavedTensor(tensor)
        if tensor.shape[1:] == (8,) and type(tensor.grad_fn).__name__ == "AddmmBackward0":
            self._alive.add(saved)
            self.peak = max(self.peak, self())
        return saved


@pytest.fixture
def graphs():
    gc.disable()
    counted = Graphs()
    with torch.autograd.graph.saved_tensors_hooks(counted.pack, lambda saved: saved.tensor):
        yield counted
    gc.enable()


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: lambda x: t(x)], ids=["module", "lambda"])
@pytest.mark.parametrize(("kept", "most"), [(0, 1), (1, 2), (2, 4), (6, 12)])  # of both encoders
def test_peak_memory_is_that_of_the_kept_micro_batches(kept, most, wrap, graphs):
    tower = Tower()
    step = GradientCache((wrap(tower), wrap(tower)), clip_loss, 2, kept_micro_batches=kept)
    step(*pairs(12)).backward()
    assert graphs.peak == most


def test_the_graphs_that_are_kept_and_freed(graphs):
    towers = (Tower(), Tower())
    step = GradientCache(towers, clip_loss, 2, kept_micro_batches=2)
    with torch.no_grad():
        step(*pairs())
    assert graphs() == 0
    loss = step(*pairs())
    assert graphs() == 4
    del loss
    assert graphs() == 0
    towers[0].requires_grad_(False).graph_recorded.clear()
    loss = step(*pairs())
    assert graphs() == 2
    loss.backward()
    assert len(towers[0].graph_recorded) == 4  # once per micro-batch


class Stop(Exception):
    pass


@pytest.mark.parametrize("where", ["encoder", "loss", "second pass"])
def test_an_exception_frees_the_graphs_though_its_traceback_lives(graphs, where):
    towers = (Tower(), Tower())
    before = {"encoder": 3, "second pass": 4}.get(where)

    def interrupt(*_):
        if len(towers[1].graph_recorded) == before:
            os.kill(os.getpid(), signal.SIGINT)

    handle = towers[1].register_forward_pre_hook(interrupt)

    def loss(x, y):
        assert graphs() == 4
        if where == "loss":
            raise Stop
        return clip_loss(x, y)

    step = GradientCache(towers, loss, 2, kept_micro_batches=2)
    with pytest.raises((Stop, KeyboardInterrupt)) as caught:
        step(*pairs()).backward()
    assert caught.value.__traceback__ is not None
    assert graphs() == 0
    assert gradients(*towers) == [None] * len(gradients(*towers))
    handle.remove()
    GradientCache(towers, clip_loss, 2)(*pairs()).backward()  # the next step works
