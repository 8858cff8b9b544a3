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
    DIMS,
    WIDTH,
    Tower,
    TwoTowers,
    assert_same,
    biased_loss,
    clip_loss,
    pairs,
)


def test_a_frozen_tower_of_one_model_runs_once():
    model = TwoTowers(dropout=0.5)  # the locked tower draws random numbers as well
    model.image.requires_grad_(False)
    step, batches = GradientCache(model, biased_loss, 3), pairs()

    def one_graph():
        parts = [model(*part) for part in zip(*(b.split(3) for b in batches), strict=True)]
        return biased_loss(*(torch.cat([part[i] for part in parts]) for i in (0, 1)), *parts[0][2:])

    assert_same(lambda: step(*batches), one_graph, model)
    assert len(model.image.graph_recorded) == 3 + 3
    # The graph of the first micro-batch shows that the tower is constant.
    assert model.text.graph_recorded[3:] == [True, False, False] + [True] * 3
    counts = []
    for trained in (True, False, True):  # it may change between steps
        model.image.requires_grad_(trained).graph_recorded.clear()
        step(*batches).backward()
        counts.append(len(model.image.graph_recorded))
    assert counts == [6, 3, 6]


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


def head_and_tower(model, x, y):
    return model.head(x[:, :DIMS]), model.tower(y)


def in_inference_mode(module, x):
    with torch.inference_mode():
        return module(x)


def once_more_with_a_graph(model, x):
    if torch.is_grad_enabled():
        model.head(x[:, :DIMS] + 1)
    return x


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
        # Its output is changed in place: a copy is recorded.
        (lambda m, x, y: (m.head(x[:, :DIMS]).mul_(2), m.tower(y)), 3),
        (lambda m, x, y: (in_inference_mode(m.head, x[:, :DIMS]).clone(), m.tower(y)), 3),
        # Called twice with a graph, once without: 2 + 1 + 1, then 2 in each micro-batch.
        (lambda m, x, y: (m.head(once_more_with_a_graph(m, x)[:, :DIMS]), m.tower(y)), 10),
    ],
)
def test_how_a_frozen_module_is_used(use, calls):
    model = Model(use)
    assert_cached_as_plain(model)
    assert model.head.seen.calls == calls


@pytest.mark.parametrize("own_forward", [False, True])
def test_a_models_code_sees_no_difference(own_forward):
    """The part stays in place, and looks the same while it is recorded and reused."""

    def use(model, x, y):
        part = model.head
        inside.append(
            (id(part), type(part), str(inspect.signature(part.forward)), [*part._modules])
        )
        return head_and_tower(model, x, y)

    inside, model = [], Model(use)
    if own_forward:
        own = functools.partial(checkpoint, model.head.forward, use_reentrant=False)
        model.head.forward = own
    before = dict(vars(model.head))
    assert_cached_as_plain(model)
    assert inside == inside[:1] * 7
    assert model.head.seen.calls == 3
    assert vars(model.head) == before


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


class Part(nn.Module):
    """Stores its hidden features where the model reads them."""

    def __init__(self, keep=lambda part, hidden: None):
        super().__init__()
        self.first, self.second, self.keep = Counted(WIDTH, DIMS), Counted(), keep
        self.found, self.hidden = {}, None

    def forward(self, x):
        hidden = self.first(x)
        self.keep(self, hidden)
        return self.second(hidden)


def hooked(register):
    """A part with a hook that takes features, as is often done with a frozen backbone."""
    taken, part = {}, Part()
    register(part, taken)
    return part, lambda m: taken["hidden"]


@pytest.mark.parametrize(
    ("part", "read"),
    [
        (Part(lambda m, hidden: setattr(m, "hidden", hidden)), lambda m: m.hidden),
        (Part(lambda m, hidden: m.found.update(hidden=hidden)), lambda m: m.found["hidden"]),
        (Part(lambda m, hidden: setattr(m.second, "input", hidden)), lambda m: m.second.input),
        hooked(lambda m, taken: m.first.register_forward_hook(
            lambda _, args, output: taken.update(hidden=output))),
        hooked(lambda m, taken: m.second.register_forward_pre_hook(
            lambda _, args: taken.update(hidden=args[0]))),
        hooked(lambda m, taken: m.register_forward_hook(
            lambda _, args, output: taken.update(hidden=2 * output))),
    ],
)  # fmt: skip
def test_a_part_that_has_a_hook_or_sets_attributes_is_run_again(part, read):
    def use(model, x, y):
        model.head(x)
        return read(model.head), model.tower(y)

    model = Model(use, part.double())
    assert_cached_as_plain(model)
    assert model.head.second.seen.calls == 6


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_compiled_frozen_part_is_not_compiled_again(how):
    """One that is compiled in place is run again."""
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


def test_a_module_with_two_parents_and_inputs_that_require_gradients():
    model, batches = TwoTowers(), nn.ParameterList(pairs())
    model.alias = model.image.requires_grad_(False)  # it passes a gradient on
    step = GradientCache(model, biased_loss, 3)
    assert_same(lambda: step(*batches), lambda: biased_loss(*model(*batches)), batches)
