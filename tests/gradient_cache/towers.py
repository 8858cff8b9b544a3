"""Small encoders, dense losses and comparisons."""

import random
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCH, WIDTH, DIMS = 7, 5, 4
MICRO_BATCH_SIZES = (1, 2, 3, 4, 7, 100)  # 2, 3, 4 leave a smaller last micro-batch


def clip_loss(image_features, text_features, logit_scale=3.0):
    logits = logit_scale * image_features @ text_features.T
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class Tower(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, DIMS)
        )
        #: For each forward pass, whether it recorded a graph.
        self.graph_recorded = []

    def forward(self, x):
        self.graph_recorded.append(torch.is_grad_enabled())
        return F.normalize(self.layers(x), dim=-1)


class Checkpointed(Tower):
    """The first layer's weights are behind a checkpoint that starts a backward pass of its own."""

    def forward(self, x):
        x = checkpoint(self.layers[0], x.clone().requires_grad_(), use_reentrant=True)
        return F.normalize(self.layers[1:](x), dim=-1)


class TwoTowers(nn.Module):
    """Returns features, scale and bias in the given form, as open_clip's models do."""

    def __init__(self, form=tuple, dropout=0.0, scale_shape=()):
        super().__init__()
        self.image, self.text = Tower(dropout), Tower(dropout)
        self.logit_scale = nn.Parameter(torch.full(scale_shape, 1.2))
        self.logit_bias = nn.Parameter(torch.full(scale_shape, -0.3))
        self.form = form

    def forward(self, images, texts):
        outputs = {
            "image_features": self.image(images),
            "text_features": self.text(texts),
            "logit_scale": self.logit_scale.exp(),
            "logit_bias": self.logit_bias,  # the parameter itself
        }
        return outputs if self.form is dict else tuple(outputs.values())


class SavedTensor:
    """A tensor packed by a saved-tensor hook, without its graph, which would make a cycle."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()


def biased_loss(image_features, text_features, logit_scale, logit_bias):
    logits = logit_scale * image_features @ text_features.T + logit_bias
    return F.softplus(-logits * (2 * torch.eye(len(logits)) - 1)).sum() / len(logits)


def pairs(batch=BATCH):
    return torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)


def gradients(*modules):
    return [p.grad for module in modules for p in module.parameters()]


def assert_same_gradients(actual, expected, tolerance=1e-9):
    assert len(actual) == len(expected) > 0
    for a, e in zip(actual, expected, strict=True):
        if e is None:
            assert a is None
        else:
            torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


def assert_same(cached, plain, *modules, tolerance=1e-9):
    """Two functions give the same loss, gradients and buffers of modules; return the gradients.

    With the same random numbers: afterwards the generators' states are the same, too.
    """
    found = []
    seed = int(torch.randint(1 << 30, ()))
    before = [buffer.clone() for module in modules for buffer in module.buffers()]
    for loss_of in (plain, cached):
        seed_all(seed)
        for module in modules:
            module.zero_grad()
        buffers = (buffer for module in modules for buffer in module.buffers())
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        loss = loss_of()
        loss.backward()
        buffers = [buffer.clone() for module in modules for buffer in module.buffers()]
        found.append(([loss.detach(), *buffers], gradients(*modules), random_states()))
    (expected, wanted, after), (values, actual, states) = found
    torch.testing.assert_close(values, expected, rtol=tolerance, atol=tolerance)
    assert_same_gradients(actual, wanted, tolerance)
    assert states == after
    return actual


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def random_states():
    """The states of all generators, comparable."""
    return (
        torch.get_rng_state().tolist(),
        [state.tolist() for state in torch.cuda.get_rng_state_all()],
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


def one_graph(encoders, batches, loss, micro_batch_size):
    """The loss by definition: all micro-batches are encoded in one graph, one after the other."""
    features = [
        torch.cat([encoder(part) for part in batch.split(micro_batch_size)])
        for encoder, batch in zip(encoders, batches, strict=True)
    ]
    return loss(*features)


def seen_in(run, part):
    """The warnings with this part that a function's call gives, as strings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in seen if w.category is UserWarning and part in str(w.message)]
