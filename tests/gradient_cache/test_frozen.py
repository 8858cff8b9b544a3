"""Frozen parts of a model run once; the second pass reuses their outputs."""

import functools
import inspect
import threading
from types import SimpleNamespace

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
    assert_same,
    biased_loss,
    clip_loss,
    pairs,
)


def one_graph_in_micro_batches(model, batches, loss, size):
    parts = [model(*part) for part in zip(*(batch.split(size) for batch in batches), strict=True)]
    x, y = (torch.cat([part[i] for part in parts]) for i in range(2))
    return loss(x, y, *parts[0][2:])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("locked", ["image", "text"])
def test_a_frozen_tower_of_one_model_runs_once(locked, dropout):
    model = TwoTowers(dropout=dropout)  # the locked tower draws random numbers as well
    frozen, live = (model.image, model.text)[:: 1 if locked == "image" else -1]
    frozen.requires_grad_(False)
    step, batches = GradientCache(model, biased_loss, 3), pairs()
    plain = functools.partial(one_graph_in_micro_batches, model, batches, biased_loss, 3)
    assert_same(lambda: step(*batches), plain, model)
    assert len(frozen.graph_recorded) == 3 + 3
    # The graph of the first micro-batch shows that the tower is constant.
    assert live.graph_recorded[3:] == [True, False, False] + [True] * 3


class Counted(nn.Linear):
    """Counts its forward passes without changing an attribute."""

    def __init__(self, width=DIMS, out=DIMS):
        super().__init__(width, out)
        self.requires_grad_(False).seen = SimpleNamespace(calls=0)

    def forward(self, x):
        self.seen.calls += 1
        return super().forward(x)


class Model(nn.Module):
    """`head` is frozen; the test determines its inputs and the number of calls."""

    def __init__(self, use, head=None):
        super().__init__()
        self.tower, self.use = Tower(), use
        self.head = Counted() if head is None else head.requires_grad_(False)

    def forward(self, x, y):
        return self.use(self, x, y)


def assert_cached_as_plain(model, step=None):
    """A step in micro-batches is as one graph; counts are those of the step."""
    batches, step = pairs(), step or GradientCache(model, clip_loss, 3)

    def cached():
        for module in model.modules():
            if isinstance(module, Counted):
                module.seen.calls = 0
        return step(*batches)

    assert_same(cached, lambda: clip_loss(*model(*batches)), model)
    model.zero_grad()


@pytest.mark.parametrize(
    ("use", "calls"),
    [
        # On trained features it runs again, as a gradient passes through it.
        (lambda m, x, y: (m.head(m.tower(x)), m.tower(y)), 6),
        # Called twice per pass: both outputs are recorded, in order.
        (lambda m, x, y: (m.head(x[:, :DIMS]), m.tower(y) + m.head(y[:, :DIMS])), 6),
        # No vector per sample, but as large as activations: it runs again.
        (lambda m, x, y: (m.head(x[:, None, :DIMS]).squeeze(1), m.tower(y)), 6),
        # One of its attributes is read.
        (lambda m, x, y: (m.head(x[:, :DIMS]) / m.head.in_features, m.tower(y)), 3),
        # Constant, but only its weight is used: there is nothing to record.
        (lambda m, x, y: (x[:, :DIMS] @ m.head.weight, m.tower(y)), 0),
        # Its output is changed in place: the recorded one is no longer valid.
        (lambda m, x, y: (m.head(x[:, :DIMS]).mul_(2), m.tower(y)), 6),
        # Inference mode does not record changes of its output.
        (lambda m, x, y: (in_inference_mode(m.head, x[:, :DIMS]).clone(), m.tower(y)), 6),
        # Called twice with a graph, once without: 2 + 1 + 1, then 2 in each micro-batch.
        (lambda m, x, y: (m.head(once_more_with_a_graph(m, x)[:, :DIMS]), m.tower(y)), 10),
    ],
)
def test_how_a_frozen_module_is_used(use, calls):
    model = Model(use)
    assert_cached_as_plain(model)
    assert model.head.seen.calls == calls


def head_and_tower(model, x, y):
    return model.head(x[:, :DIMS]), model.tower(y)


def in_inference_mode(module, x):
    with torch.inference_mode():
        return module(x)


def once_more_with_a_graph(model, x):
    if torch.is_grad_enabled():
        model.head(x[:, :DIMS] + 1)
    return x


def seen_inside(model):
    """Everything that a model's code can see of its frozen parts while it runs."""
    parts = [model.layers[0], *model.layers, *model.stack, model.named["a"], model.plain]
    return {
        "classes": [(type(part), isinstance(part, nn.Linear)) for part in parts],
        "identity": [id(part) for part in parts],
        "parameters": [id(next(part.parameters())) for part in parts],
        "modules": [id(module) for module in model.modules()],
        "state": list(model.state_dict()),
        "attributes": [(part.training, part.in_features, part.note) for part in parts],
        "slice": [type(model.stack[:1]), type(model.layers[1:])],
        "signature": [str(inspect.signature(part.forward)) for part in parts],
        "hooks": [len(part._forward_hooks) for part in parts],
    }


class Containers(nn.Module):
    """Frozen layers in all of PyTorch's containers; iterates over them in its forward."""

    def __init__(self, trained_beside):
        super().__init__()
        self.layers = nn.ModuleList([Counted(WIDTH, DIMS), Counted(), Counted()])
        self.stack = nn.Sequential(Counted(), Counted())
        self.named = nn.ModuleDict({"a": Counted()})
        self.plain = Counted().eval()
        self.plain.register_forward_hook(lambda *_: None)
        self.tower = Tower()
        if trained_beside:  # then each frozen layer is a part, otherwise each container
            self.layers.append(nn.Linear(2, 2))
            self.stack.register_parameter("unused", nn.Parameter(torch.ones(2)))
            self.named["b"] = nn.Linear(2, 2)
        for module in self.modules():
            module.note = object()
        self.seen = SimpleNamespace(inside=[])

    def forward(self, x, y):
        self.seen.inside.append(seen_inside(self))
        for layer in list(self.layers)[:3]:
            x = layer(x)
        for layer in self.stack:
            x = layer(x)
        return self.plain(self.named["a"](self.stack(x))), self.tower(y)


@pytest.mark.parametrize("trained_beside", [False, True])
def test_a_models_code_sees_no_difference(trained_beside):
    model = Containers(trained_beside)
    expected = seen_inside(model)
    assert_cached_as_plain(model)
    assert len(model.seen.inside) == 7
    for inside in model.seen.inside:
        assert inside == expected
    assert model.plain.seen.calls == 3
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("fails_at", [2, 5])  # first pass, second pass
def test_an_error_restores_frozen_parts(fails_at):
    def use(model, x, y):
        features = model.head(x[:, :DIMS])
        calls.append(1)
        if len(calls) == fails_at:
            raise RuntimeError("stop")
        return features, model.tower(y)

    calls, model = [], Model(use)
    before = dict(vars(model.head))
    with pytest.raises(RuntimeError, match="stop"):
        GradientCache(model, clip_loss, 3)(*pairs()).backward()
    assert vars(model.head) == before
    assert model._modules["head"] is model.head


def test_a_forward_set_on_the_instance_is_restored():
    model = Model(head_and_tower)
    model.head.forward = own = functools.partial(
        checkpoint, model.head.forward, use_reentrant=False
    )
    assert_cached_as_plain(model)
    assert model.head.seen.calls == 3
    assert vars(model.head)["forward"] is own


def test_hooks_on_a_frozen_part_are_called_in_both_passes():
    model, seen = Model(head_and_tower), []
    model.head.register_forward_pre_hook(lambda head, args: (args[0] + 1,))
    model.head.register_forward_hook(lambda head, args, output: seen.append(output) or 2 * output)
    assert_cached_as_plain(model)
    assert model.head.seen.calls == 3
    assert len(seen) == 1 + 6
    for first, second in zip(seen[1:4], seen[4:], strict=True):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_a_part_with_a_hook_inside_is_run_again(kind):
    """Hooks often take features from the layers of a frozen backbone."""
    taken = {}

    def use(model, x, y):
        model.head(x)
        return taken["hidden"], model.tower(y)

    model = Model(use, nn.Sequential(Counted(WIDTH, DIMS), Counted()))
    if kind == "forward":
        model.head[0].register_forward_hook(lambda m, args, output: taken.update(hidden=output))
    else:
        model.head[1].register_forward_pre_hook(lambda m, args: taken.update(hidden=args[0]))
    assert_cached_as_plain(model)
    assert model.head[1].seen.calls == 6


class StoresHidden(nn.Module):
    """Stores its hidden features where the model reads them."""

    def __init__(self, keep):
        super().__init__()
        self.first, self.second, self.keep = Counted(WIDTH, DIMS), Counted(), keep
        self.found, self.hidden = {}, None

    def forward(self, x):
        hidden = self.first(x)
        self.keep(self, hidden)
        return self.second(hidden)


@pytest.mark.parametrize(
    ("keep", "read"),
    [
        (lambda m, hidden: setattr(m, "hidden", hidden), lambda m: m.hidden),
        (lambda m, hidden: m.found.update(hidden=hidden), lambda m: m.found["hidden"]),
        (lambda m, hidden: setattr(m.second, "input", hidden), lambda m: m.second.input),
    ],
)
def test_a_part_that_sets_attributes_is_run_again(keep, read):
    def use(model, x, y):
        model.head(x)
        return read(model.head), model.tower(y)

    model = Model(use, StoresHidden(keep))
    assert_cached_as_plain(model)
    assert model.head.second.seen.calls == 6


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_compiled_frozen_part_is_not_run_or_compiled_again(how):
    torch.compiler.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(1)
        return graph.forward

    class Head(nn.Sequential):  # PyTorch 2.9 compiles none of torch.nn's own in place
        def forward(self, x):
            return super().forward(x)

    head = Head(nn.Linear(DIMS, DIMS), nn.GELU()).requires_grad_(False)
    if how == "in place":
        head.compile(backend=backend, dynamic=True)
    else:
        head = torch.compile(head, backend=backend, dynamic=True)
    model = Model(head_and_tower, head)
    step = GradientCache(model, clip_loss, 3)
    assert_cached_as_plain(model, step)
    before = len(compiled)
    assert before > 0
    assert_cached_as_plain(model, step)
    assert len(compiled) == before
    if how == "in place":
        assert model.head.__dict__["_compiled_call_impl"].__name__ != "replacement"


def test_another_thread_runs_the_part_itself():
    """Such as a thread that evaluates with the module during a step."""
    outputs = []

    def use(model, x, y):
        thread = threading.Thread(target=lambda: outputs.append(model.head(torch.zeros(5, DIMS))))
        thread.start()
        thread.join()
        return model.head(x[:, :DIMS]), model.tower(y)

    model = Model(use)
    assert_cached_as_plain(model)
    assert len(outputs) == 7
    for output in outputs:
        torch.testing.assert_close(output, model.head.bias.expand(5, DIMS))


def test_a_fast_path_that_calls_no_layer():
    """PyTorch's transformer layers call their children in training or with a graph only."""
    layer = nn.TransformerEncoderLayer(WIDTH + 3, 2, 8, 0.0, batch_first=True)
    layer.requires_grad_(False).eval()
    layer.linear1.requires_grad_()

    def use(model, x, y):
        padded = torch.nn.functional.pad(x, (0, 3))
        return model.head(padded[:, None])[:, 0, :DIMS], model.tower(y)

    model = Model(use)
    model.head = layer
    assert_cached_as_plain(model)


def test_a_module_with_two_parents_and_inputs_that_require_gradients():
    model, batches = TwoTowers(), nn.ParameterList(pairs())
    model.alias = model.image.requires_grad_(False)  # it passes a gradient on
    step = GradientCache(model, biased_loss, 3)
    assert_same(lambda: step(*batches), lambda: biased_loss(*model(*batches)), batches)


def test_requires_grad_may_change_between_steps():
    model, batches = TwoTowers(), pairs(BATCH)
    step = GradientCache(model, biased_loss, 3)
    counts = []
    for trained in (True, False, True):
        model.image.requires_grad_(trained)
        model.image.graph_recorded.clear()
        step(*batches).backward()
        counts.append(len(model.image.graph_recorded))
    assert counts == [6, 3, 6]
