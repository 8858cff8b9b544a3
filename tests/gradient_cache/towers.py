"""Small encoders, dense losses and comparisons."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

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
        # Held by another object, as a frozen module whose own attributes change is run again.
        self._seen = SimpleNamespace(graph_recorded=[])

    @property
    def graph_recorded(self):
        """For each forward pass, whether it recorded a graph."""
        return self._seen.graph_recorded

    def forward(self, x):
        self.graph_recorded.append(torch.is_grad_enabled())
        return F.normalize(self.layers(x), dim=-1)


class HiddenTower(nn.Module):
    """Calls a tower whose parameters are not among the module's own."""

    def __init__(self, tower):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.encode = tower.forward  # a method: the tower is no child of this module

    def forward(self, x):
        return self.encode(self.layer(x))


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
    """Two functions give the same loss, and the same gradients of modules; return the gradients."""
    found = []
    for loss_of in (plain, cached):
        for module in modules:
            module.zero_grad()
        loss = loss_of()
        loss.backward()
        found.append((loss.detach(), gradients(*modules)))
    (expected, wanted), (value, actual) = found
    torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
    assert_same_gradients(actual, wanted, tolerance)
    return actual


def one_graph(encoders, batches, loss, micro_batch_size):
    """A step with dropout by definition: encode all micro-batches in one graph, then the loss.

    Fills `.grad`; returns the loss and the random state after it.
    """
    features = [
        torch.cat([encoder(part) for part in batch.split(micro_batch_size)])
        for encoder, batch in zip(encoders, batches, strict=True)
    ]
    value = loss(*features)
    after = torch.get_rng_state()
    value.backward()
    return value.detach(), after
