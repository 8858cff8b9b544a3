"""Each loss on several processes against one process with the whole batch, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megabatch import losses
from megabatch.similarity import global_mean, logsumexp, paired, replicated
from megabatch.similarity.distributed.comm import rank_and_size
from tests.similarity.distributed import comparison
from tests.similarity.distributed.comparison import double
from tests.similarity.distributed.processes import World, on_devices, on_processes
from tests.similarity.distributed.transfers import transferring

D = 6


class Batch:
    """What a loss is called with; `negatives` also serve as a teacher's or a guide's features."""

    def __init__(self, *tensors: Tensor) -> None:
        self.x, self.y, self.scale, self.ids, self.weights, self.negatives = tensors
        self.pair, self.given = (self.x, self.y), {"ids": self.ids, "weights": self.weights}
        self.temperature = {"temperature": 1 / self.scale}
        self.own = self.negatives[:, None]  #: negatives of each row
        self.two = self.own * torch.tensor([[1.0], [-1.0]], dtype=self.x.dtype)
        #: another model's features, of a width of their own
        self.others = self.negatives[:, :4], self.negatives[:, 2:].cos()


def info_nce(group: object, **options: Any) -> Callable[..., Tensor]:
    return losses.InfoNCELoss(1.0, group=group, **options)


def clip(group: object, b: Batch) -> Tensor:
    return losses.ClipLoss(group=group)(*b.pair, b.scale)


def clip_smoothed(group: object, b: Batch) -> Tensor:
    loss = losses.ClipLoss(label_smoothing=0.1, group=group)
    return loss(*b.pair, b.scale, **b.given) + loss(*b.pair, b.scale)


def clip_ignored(group: object, b: Batch) -> Tensor:
    return losses.ClipLoss(duplicates="ignored", group=group)(*b.pair, b.scale, **b.given)


def info_nce_shared(group: object, b: Batch) -> Tensor:
    """Negatives are shared over all processes."""
    loss = info_nce(group, same_tower=("query", "positive"))
    return loss(*b.pair, b.negatives, ids=b.ids, **b.temperature)


def info_nce_margin(group: object, b: Batch) -> Tensor:
    queue = torch.linspace(-1, 1, 3 * D, dtype=b.x.dtype).view(3, D)
    plain = info_nce(group)(*b.pair, b.two, queue=queue, weights=b.weights, **b.temperature)
    return plain + info_nce(group, margin=0.1)(*b.pair, b.two, queue=queue, **b.temperature)


def info_nce_weighted(group: object, b: Batch) -> Tensor:
    total = torch.zeros((), dtype=b.x.dtype)
    for mode in ("in_batch_negatives", "all_negatives"):
        hard: dict[str, Any] = {"hardness_mode": mode, "hardness_strength": 3.0}
        loss = info_nce(group, same_tower=("positive",), share_negatives=True, **hard)
        total = total + loss(*b.pair, b.two, **b.temperature)
    return total


def info_nce_both_directions(group: object, b: Batch) -> Tensor:
    joint = info_nce(group, reverse="joint", same_tower=("query", "positive"))
    separate = info_nce(group, reverse="separate", margin=0.1)
    return joint(*b.pair, b.negatives, **b.temperature) + separate(
        *b.pair, ids=b.ids, **b.temperature
    )


def info_nce_smoothed(group: object, b: Batch) -> Tensor:
    loss = info_nce(group, label_smoothing=0.1)
    return loss(*b.pair, b.negatives, **b.temperature) + loss(
        *b.pair, b.own, weights=b.weights, **b.temperature
    )


def info_nce_guided(group: object, b: Batch) -> Tensor:
    guide_query, guide_positive = b.others
    guides = {"guide_query": guide_query, "guide_positive": guide_positive}
    options = {"margin": -0.1, "margin_strategy": "relative", "same_tower": ("query", "positive")}
    loss, guides["guide_negatives"] = info_nce(group, **options), b.negatives[:, 1:5]
    return loss(*b.pair, b.negatives, ids=b.ids, **b.temperature, **guides)


def debiased(group: object, b: Batch) -> Tensor:
    nt_xent = losses.NTXentLoss(1.0, tau_plus=0.1, group=group)(*b.pair, **b.temperature)
    return nt_xent + info_nce(group, tau_plus=0.1)(*b.pair, b.x + b.y, **b.temperature)


def nt_xent(group: object, b: Batch) -> Tensor:
    return losses.NTXentLoss(1.0, group=group)(*b.pair, **b.temperature)


def dcl(group: object, b: Batch) -> Tensor:
    weighted = losses.DCLLoss(1.0, sigma=0.5, group=group)(*b.pair, **b.temperature)
    return weighted + losses.DCLLoss(1.0, group=group)(*b.pair, b.negatives, **b.temperature)


def of_labels(kind: Any, group: object, b: Batch, **other: str) -> Tensor:
    """SupCon or SINCERE, of all rows and with references, in its two forms."""
    loss = kind(1.0, group=group)(torch.cat(b.pair), b.ids.repeat(2), **b.temperature)
    references = b.x, b.ids, b.y, b.ids
    return loss + kind(1.0, group=group, **other)(*references, temperature=b.scale)


sup_con = partial(of_labels, losses.SupConLoss, form="in")
sincere = partial(of_labels, losses.SincereLoss, average="pairs")


def distilled(group: object, b: Batch) -> Tensor:
    contrastive, distill = losses.DistillClipLoss(group=group)(*b.pair, b.scale, *b.others, 3.0)
    return contrastive + 2 * distill


def matryoshka(group: object, b: Batch) -> Tensor:
    return losses.MatryoshkaLoss(losses.ClipLoss(group=group), [2, D])(*b.pair, b.scale)


def several_modalities(group: object, b: Batch) -> Tensor:
    loss = losses.MultiModalLoss([("a", "b"), ("b", "c")], group=group)
    features = {"a": b.x, "b": b.y, "c": b.x * 2 - b.y}
    return loss(features, b.scale, present={"c": b.ids == 1})


def sig_lip(group: object, b: Batch) -> Tensor:
    loss, numbers = losses.SigLipLoss(group=group), (b.scale, -b.scale)
    return loss(*b.pair, *numbers) + loss(*b.pair, *numbers, **b.given)


def sig_lip_soft_labels(group: object, b: Batch) -> Tensor:
    names = ("image_features", "text_features", "logit_scale", "logit_bias")
    teacher = zip(names, (*b.others, 2.0, -1.0), strict=True)
    options: dict[str, Any] = {f"dist_{name}": value for name, value in teacher}
    loss = losses.SigLipLoss(group=group)
    return loss(*b.pair, b.scale, -b.scale, weights=b.weights, **options)


def custom(group: object, b: Batch) -> Tensor:
    """A loss that uses its scale elsewhere, too."""
    scale = replicated(b.scale, group)
    rows, _ = logsumexp(*b.pair, scale, sides="rows", group=group)
    return global_mean(rows - paired(*b.pair, scale) + 0.1 * scale.log() ** 2, group)


LOSSES: list[Callable[[object, Batch], Tensor]] = [
    *(clip, clip_smoothed, clip_ignored, info_nce_shared, info_nce_margin, info_nce_weighted),
    *(info_nce_both_directions, info_nce_smoothed, info_nce_guided, debiased, nt_xent, dcl),
    *(sup_con, sincere, distilled, matryoshka, several_modalities, sig_lip, sig_lip_soft_labels),
    custom,
]


def compare(world: World, sizes: list[int], loss: Callable[..., Tensor]) -> None:
    """Compare shares of the loss and their gradients with the whole batch's.

    The averaging of DDP and FSDP divides by the number of processes.
    """

    def share(group: object, *tensors: Tensor) -> Sequence[Tensor]:
        return [loss(group, Batch(*tensors)) / rank_and_size(group)[1]]

    n = sum(sizes)
    inputs: list[tuple[Tensor, comparison.Sizes]] = [
        *((F.normalize(double(n, D), dim=1), sizes) for _ in range(2)),
        # Of shape (1,), which FSDP2 requires; losses use it outside the engine as well.
        (torch.tensor([5.0], dtype=torch.float64), None),
        (torch.randint(-1, 3, (n,)), sizes),
        (torch.rand(n, dtype=torch.float64), sizes),
        (double(n, D), sizes),
    ]
    comparison.compare(world, share, inputs, [None], frozen="45")


@on_devices(3)
def test_every_loss(world: World) -> None:
    for sizes, loss in product(([2, 6, 4], [5, 0, 4]), LOSSES):
        compare(world, sizes, loss)


@on_devices(4)
def test_every_loss_on_a_grid(world: World) -> None:
    with transferring(columns=2):
        for loss in LOSSES:
            compare(world, [2, 5, 3, 4], loss)


@on_processes(2)
def test_another_default_device(world: World) -> None:
    """Tensors of the handshake stay on the CPU, whatever the default device."""
    local = [double(3, D).requires_grad_(), double(3, D).requires_grad_(), double(3).abs()]
    scale = torch.tensor(5.0, dtype=torch.float64)
    for loss in (losses.ClipLoss(), lambda *a, **w: losses.SigLipLoss()(*a, -scale, **w)):
        for weights in (None, local[2]):
            plain = loss(*local[:2], scale, weights=weights)
            expected = torch.autograd.grad(plain, local[:2])
            with torch.device("meta"):
                value = loss(*local[:2], scale, weights=weights)
                found = torch.autograd.grad(value, local[:2])
            assert torch.equal(value, plain)
            assert all(map(torch.equal, found, expected))


@on_devices(2, 3)
def test_an_empty_batch_everywhere_is_an_error_on_every_process(world: World) -> None:
    x = torch.empty(0, D, requires_grad=True)
    with pytest.raises(ValueError, match="image_features: expected at least one row"):
        losses.ClipLoss()(x, x, 1.0)


@on_processes(2)
def test_distributed_tensors_are_refused_and_their_parts_are_taken(world: World) -> None:
    """A parameter that FSDP2 shards, outside of the model's forward, and features."""
    mesh = init_device_mesh("cpu", (world.size,))
    x, y = torch.randn(2, 6, 4, dtype=torch.float64)
    scale: Any = distribute_tensor(torch.ones(1, dtype=torch.float64), mesh, [Shard(0)])
    scale.requires_grad_()
    rows: Any = distribute_tensor(x, mesh, [Shard(0)])
    part = world.shard(y, [3] * 2)
    loss = losses.ClipLoss()
    with pytest.raises(TypeError, match=r"logit_scale: .* DTensor; pass logit_scale.full_tensor"):
        loss(part, part, scale.exp())
    with pytest.raises(TypeError, match=r"image_features: expected a tensor of this process, got"):
        loss(rows, part, 3.0)
    loss(rows.to_local(), part, scale.exp().full_tensor()).backward()
    whole = torch.ones(1, dtype=torch.float64, requires_grad=True)
    losses.ClipLoss(group="local")(x, y, whole.exp()).backward()
    torch.testing.assert_close(scale.grad.full_tensor(), whole.grad, rtol=1e-12, atol=0)
