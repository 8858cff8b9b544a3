"""Locked parts of one model: run once, remembered in the second pass."""

import copy

import pytest
import torch
from torch import nn

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    BATCH,
    DIMS,
    Tower,
    TwoTowers,
    assert_same_gradients,
    biased_loss,
    clip_loss,
    gradients,
    pairs,
)


def one_graph_in_micro_batches(model, batches, loss, size):
    parts = [model(*part) for part in zip(*(batch.split(size) for batch in batches), strict=True)]
    x, y = (torch.cat([part[i] for part in parts]) for i in range(2))
    loss(x, y, *parts[0][2:]).backward()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("locked", ["image", "text"])
def test_a_locked_tower_of_one_model_is_not_run_again(locked, dropout):
    model = TwoTowers(dropout=dropout)  # the locked tower draws random numbers as well
    frozen, live = model.image, model.text
    if locked == "text":
        frozen, live = live, frozen
    frozen.requires_grad_(False)
    reference, batches = copy.deepcopy(model), pairs()
    torch.manual_seed(1)
    one_graph_in_micro_batches(reference, batches, biased_loss, 3)
    torch.manual_seed(1)
    GradientCache(model, biased_loss, 3)(*batches)
    assert len(frozen.graph_recorded) == 3
    # That the tower is constant shows in the graph of the first micro-batch.
    assert live.graph_recorded == [True, False, False] + [True] * 3
    assert_same_gradients(gradients(model), gradients(reference))
    assert model._modules["image"] is model.image
    assert isinstance(model.image, Tower)


def test_the_model_is_whole_again_after_an_error():
    model = TwoTowers()
    model.image.requires_grad_(False)
    image = model.image

    def loss(*outputs):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        GradientCache(model, loss, 3)(*pairs())
    assert model.image is image


class Model(nn.Module):
    """`head` is frozen; what it is applied to, and how often, is the test's."""

    def __init__(self, use):
        super().__init__()
        self.tower, self.head, self.use = Tower(), nn.Linear(DIMS, DIMS), use
        self.head.requires_grad_(False).calls = 0
        self.head.register_forward_hook(self.count)

    @staticmethod
    def count(head, args, output):
        head.calls += 1

    def forward(self, x, y):
        return self.use(self, x, y)


@pytest.mark.parametrize(
    ("use", "calls"),
    [
        # A frozen head on trained features: run again, its gradient passes through.
        (lambda m, x, y: (m.head(m.tower(x)), m.tower(y)), 6),
        # Twice in each pass: both remembered, in their order.
        (lambda m, x, y: (m.head(x[:, :DIMS]), m.tower(y) + m.head(y[:, :DIMS])), 6),
        # No vector a sample: as large as activations, and run again.
        (lambda m, x, y: (m.head(x[:, None, :DIMS]).squeeze(1), m.tower(y)), 6),
        # Asked for more than to be called.
        (lambda m, x, y: (m.head(x[:, :DIMS]) / m.head.in_features, m.tower(y)), 3),
        # Constant, but used by its weight alone: nothing to note.
        (lambda m, x, y: (x[:, :DIMS] @ m.head.weight, m.tower(y)), 0),
    ],
)
def test_how_a_frozen_module_is_used(use, calls):
    model, batches = Model(use), pairs()
    clip_loss(*model(*batches)).backward()
    expected = gradients(model)
    model.zero_grad()
    model.head.calls = 0
    GradientCache(model, clip_loss, 3)(*batches)
    assert model.head.calls == calls
    assert_same_gradients(gradients(model), expected)


def test_a_module_with_two_parents_and_inputs_that_require_gradients():
    model, (images, texts) = TwoTowers(), (batch.requires_grad_() for batch in pairs())
    model.alias = model.image.requires_grad_(False)
    biased_loss(*model(images, texts)).backward()
    expected = [images.grad, texts.grad]
    images.grad = texts.grad = None
    GradientCache(model, biased_loss, 3)(images, texts)  # the locked tower passes a gradient on
    assert_same_gradients([images.grad, texts.grad], expected)


def test_locks_may_change_between_steps():
    model, batches = TwoTowers(), pairs(BATCH)
    step = GradientCache(model, biased_loss, 3)
    counts = []
    for trained in (True, False, True):
        model.image.requires_grad_(trained)
        model.image.graph_recorded.clear()
        step(*batches)
        counts.append(len(model.image.graph_recorded))
    assert counts == [6, 3, 6]
