"""Gradients of whole models under DDP and FSDP2 against one process, in float64, to 1e-9.

The losses are called with all outputs of an OpenCLIP model, its unused bias included, and of a
tower that none of the pairs needs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientCache
from megabatch.losses import ClipLoss, MultiModalLoss, NTXentLoss, SigLipLoss
from tests.gradient_cache.parallel import gradients, sharded
from tests.similarity.distributed.processes import World, on_devices, shard_sizes

WIDTH, D = 5, 4


class Model(nn.Module):
    """Three towers, a scale, and a bias that cancels in a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.audio = (nn.Linear(WIDTH, D) for _ in range(3))
        # FSDP2 takes no 0-d parameter.
        self.scale, self.bias = (nn.Parameter(torch.tensor([v])) for v in (1.5, -1.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:
        towers = (self.image, images), (self.text, texts), (self.audio, images)
        features = (F.normalize(tower(batch).tanh(), dim=-1) for tower, batch in towers)
        return *features, self.scale.exp(), self.bias


class Loss:
    """Several losses in one step, one of them weighted; or one whose bias does not cancel."""

    def __init__(self, group: object, with_bias: bool) -> None:
        self.with_bias = with_bias
        self.clip, self.sigmoid = ClipLoss(group=group), SigLipLoss(group=group)
        self.nt_xent = NTXentLoss(0.5, group=group)
        self.modalities = MultiModalLoss([("image", "text")], group=group)

    def __call__(
        self, x: Tensor, y: Tensor, z: Tensor, scale: Tensor, bias: Tensor, weights: Tensor
    ) -> Tensor:
        if self.with_bias:
            return self.sigmoid(x, y, scale, bias, weights=weights) + 0 * z.sum()
        total = self.clip(x, y, scale, bias, weights=weights)
        total = total + self.nt_xent(x, y, temperature=1 / scale)
        return total + self.modalities({"image": x, "text": y, "audio": z}, scale, bias)


def new_model(frozen: bool) -> Model:
    torch.manual_seed(0)
    model = Model().double()
    model.text.requires_grad_(not frozen)
    return model


def under_ddp_but_for_the_numbers(model: Model) -> nn.Module:
    """All towers are in DDP; nothing averages the gradients of the scale and the bias."""
    for name in ("image", "text", "audio"):
        if any(p.requires_grad for p in getattr(model, name).parameters()):
            setattr(model, name, DistributedDataParallel(getattr(model, name)))
    return model


def under_fsdp(model: Model) -> nn.Module:
    for module in (model.image, model.text, model.audio, model):
        sharded(module)
    return model


WRAPPERS = (DistributedDataParallel, under_fsdp, under_ddp_but_for_the_numbers)


def compare(
    world: World,
    wrap: Callable[[Model], nn.Module],
    sizes: list[int],
    with_bias: bool = False,
    cached: bool = False,
    frozen: bool = False,
) -> None:
    torch.manual_seed(1)
    images, texts = (torch.randn(sum(sizes), WIDTH).double() for _ in range(2))
    weights = torch.rand(sum(sizes)).double()
    truth, model = new_model(frozen), wrap(new_model(frozen))
    expected = Loss("local", with_bias)(*truth(images, texts), weights)
    images, texts, weights = (world.shard(t, sizes) for t in (images, texts, weights))
    loss = Loss(None, with_bias)
    if cached:
        value = GradientCache(model, loss, 2)(images, texts, weights=weights)
    else:
        value = loss(*model(images, texts), weights)
    expected.backward()
    value.backward()
    dist.all_reduce(mean := value.detach().clone())
    torch.testing.assert_close(mean / world.size, expected.detach(), rtol=0, atol=1e-9)
    found, wanted = gradients(model), gradients(truth)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert (gradient is None) == (wanted[name] is None) == (frozen and "text" in name)
        if gradient is not None:
            torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-9)
    assert (found["bias"] == 0) == (not with_bias)


@on_devices(2)
def test_gradients_of_wrapped_models(world: World) -> None:
    for wrap, sizes in product(WRAPPERS, shard_sizes(world.size)):
        compare(world, wrap, sizes)
        compare(world, wrap, sizes, with_bias=True)
        if 0 not in sizes:  # gradient caching refuses a batch without rows
            compare(world, wrap, sizes, cached=True)
        if wrap is not under_fsdp:
            compare(world, wrap, sizes, frozen=True)
            compare(world, wrap, [3, 3], cached=True, frozen=True)
