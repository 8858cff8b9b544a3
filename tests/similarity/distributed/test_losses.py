"""Each loss on several processes against one process with the whole batch, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megabatch import losses
from megabatch.similarity.distributed.means import replicated
from tests.similarity.distributed.processes import World, on_devices, on_processes, shard_sizes

D = 6


def clip(group: object, x: Tensor, y: Tensor, scale: Tensor, own: dict[str, Tensor]) -> Tensor:
    return losses.ClipLoss(group=group)(x, y, scale)


def clip_smoothed(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    loss = losses.ClipLoss(label_smoothing=0.1, group=group)
    return loss(x, y, scale, ids=own["ids"], weights=own["weights"]) + loss(x, y, scale)


def clip_ignored(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    loss = losses.ClipLoss(duplicates="ignored", group=group)
    return loss(x, y, scale, ids=own["ids"], weights=own["weights"])


def info_nce(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    loss = losses.InfoNCELoss(1.0, same_tower=("query", "positive"), group=group)
    negatives = own["negatives"]  # shared over all processes
    return loss(x, y, negatives, ids=own["ids"], temperature=1 / scale)


def info_nce_margin(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    loss = losses.InfoNCELoss(1.0, margin=0.1, group=group)
    each = own["negatives"][:, None] * torch.tensor([[1.0], [-1.0]], dtype=x.dtype)
    queue = torch.linspace(-1, 1, 3 * D, dtype=x.dtype).view(3, D)
    plain = losses.InfoNCELoss(1.0, group=group)
    return loss(x, y, each, queue=queue, temperature=1 / scale) + plain(
        x, y, each, queue=queue, weights=own["weights"], temperature=1 / scale
    )


def info_nce_weighted(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    each = own["negatives"][:, None] * torch.tensor([[1.0], [-1.0]], dtype=x.dtype)
    total = 0.0
    for mode in ("in_batch_negatives", "all_negatives"):
        loss = losses.InfoNCELoss(
            1.0,
            same_tower=("positive",),
            share_negatives=True,
            hardness_mode=mode,
            hardness_strength=3.0,
            group=group,
        )
        total = total + loss(x, y, each, temperature=1 / scale)
    return total


def info_nce_both_directions(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    joint = losses.InfoNCELoss(1.0, reverse="joint", same_tower=("query", "positive"), group=group)
    separate = losses.InfoNCELoss(1.0, reverse="separate", margin=0.1, group=group)
    return joint(x, y, own["negatives"], temperature=1 / scale) + separate(
        x, y, ids=own["ids"], temperature=1 / scale
    )


def info_nce_smoothed(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    loss = losses.InfoNCELoss(1.0, label_smoothing=0.1, group=group)
    each = own["negatives"][:, None]
    return loss(x, y, own["negatives"], temperature=1 / scale) + loss(
        x, y, each, weights=own["weights"], temperature=1 / scale
    )


def debiased(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    info_nce = losses.InfoNCELoss(1.0, tau_plus=0.1, group=group)
    nt_xent = losses.NTXentLoss(1.0, tau_plus=0.1, group=group)
    return info_nce(x, y, x + y, temperature=1 / scale) + nt_xent(x, y, temperature=1 / scale)


def info_nce_guided(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    options = {"margin": -0.1, "margin_strategy": "relative", "same_tower": ("query", "positive")}
    negatives = own["negatives"]
    guides = {
        "guide_query": negatives[:, :4],
        "guide_positive": negatives[:, 2:].cos(),
        "guide_negatives": negatives[:, 1:5],
    }
    loss = losses.InfoNCELoss(1.0, group=group, **options)
    return loss(x, y, negatives, ids=own["ids"], temperature=1 / scale, **guides)


def nt_xent(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    return losses.NTXentLoss(1.0, group=group)(x, y, temperature=1 / scale)


def dcl(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    weighted = losses.DCLLoss(1.0, sigma=0.5, group=group)(x, y, temperature=1 / scale)
    plain = losses.DCLLoss(1.0, group=group)(x, y, own["negatives"], temperature=1 / scale)
    return plain + weighted


def sup_con(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    labels, out = own["ids"], losses.SupConLoss(1.0, group=group)
    inside = losses.SupConLoss(1.0, form="in", group=group)
    anchors = torch.cat([x, y]), labels.repeat(2)
    return out(*anchors, temperature=1 / scale) + inside(x, labels, y, labels, temperature=scale)


def sincere(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    labels, loss = own["ids"], losses.SincereLoss(1.0, group=group)
    pairs = losses.SincereLoss(1.0, average="pairs", group=group)
    anchors = torch.cat([x, y]), labels.repeat(2)
    return loss(*anchors, temperature=1 / scale) + pairs(x, labels, y, labels, temperature=scale)


def distilled(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    teacher = own["negatives"][:, :4], own["negatives"][:, 2:].cos()  # of a width of their own
    contrastive, distill = losses.DistillClipLoss(group=group)(x, y, scale, *teacher, 3.0)
    return contrastive + 2 * distill


def matryoshka(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    return losses.MatryoshkaLoss(losses.ClipLoss(group=group), [2, D])(x, y, scale)


def several_modalities(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    loss = losses.MultiModalLoss([("a", "b"), ("b", "c")], group=group)
    features = {"a": x, "b": y, "c": x * 2 - y}
    return loss(features, scale, present={"c": own["ids"] == 1})


def sig_lip(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    loss, bias = losses.SigLipLoss(group=group), -scale
    ids, weights = own["ids"], own["weights"]
    return loss(x, y, scale, bias) + loss(x, y, scale, bias, ids=ids, weights=weights)


def sig_lip_soft_labels(group, x, y, scale, own):  # type: ignore[no-untyped-def]
    loss, negatives = losses.SigLipLoss(group=group), own["negatives"]
    teacher = {
        "dist_image_features": negatives[:, :4],
        "dist_text_features": negatives[:, 2:].cos(),
        "dist_logit_scale": 2.0,
        "dist_logit_bias": -1.0,
    }
    return loss(x, y, scale, -scale, weights=own["weights"], **teacher)


LOSSES: list[Callable[..., Tensor]] = [
    clip,
    clip_smoothed,
    clip_ignored,
    info_nce,
    info_nce_margin,
    info_nce_weighted,
    info_nce_both_directions,
    info_nce_smoothed,
    debiased,
    info_nce_guided,
    nt_xent,
    dcl,
    sup_con,
    sincere,
    distilled,
    matryoshka,
    several_modalities,
    sig_lip,
    sig_lip_soft_labels,
]


def batch(n: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    features = [torch.nn.functional.normalize(torch.randn(n, D).double(), dim=1) for _ in range(2)]
    own = {
        "ids": torch.randint(-1, 3, (n,)),
        "weights": torch.rand(n).double(),
        "negatives": torch.randn(n, D).double(),
    }
    return features, own


def compare(world: World, sizes: list[int], loss: Callable[..., Any], group: object = None) -> None:
    """Compare shares of the loss and their gradients with the whole batch's."""
    features, own = batch(sum(sizes))
    whole = [t.clone().requires_grad_() for t in features]
    local = [world.shard(t, sizes).clone().requires_grad_() for t in features]
    mine = {name: world.shard(t, sizes) for name, t in own.items()}
    # Of shape (1,), which FSDP2 requires; losses use them outside the engine as well.
    scales = [torch.tensor([5.0], dtype=torch.float64, requires_grad=True) for _ in range(2)]

    truth = loss("local", *whole, scales[0], own)
    share = loss(group, *local, scales[1], mine)
    mean = share.detach().clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / world.size, truth.detach(), rtol=0, atol=1e-10)

    truth.backward()
    share.backward()
    for a, b in zip(local, whole, strict=True):
        # The averaging of DDP and FSDP divides by the number of processes.
        wanted = world.shard(b.grad, sizes)
        torch.testing.assert_close(a.grad / world.size, wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(scales[1].grad, scales[0].grad, rtol=0, atol=1e-9)


@on_devices(3)
def test_every_loss(world: World) -> None:
    for sizes in shard_sizes(world.size):
        for loss in LOSSES:
            compare(world, sizes, loss)


@on_devices(2, 3)
def test_a_custom_loss_that_uses_its_scale_elsewhere(world: World) -> None:
    from megabatch.similarity import logsumexp, paired
    from megabatch.similarity.distributed.means import global_mean

    def loss(group, x, y, scale, own):  # type: ignore[no-untyped-def]
        scale = replicated(scale, group)
        rows, _ = logsumexp(x, y, scale, sides="rows", group=group)
        return global_mean(rows - paired(x, y, scale) + 0.1 * scale.log() ** 2, group)

    for sizes in shard_sizes(world.size):
        compare(world, sizes, loss)


@on_processes(2)
def test_another_default_device(world: World) -> None:
    """Tensors of the handshake stay on the CPU, whatever the default device."""
    features, own = batch(6)
    local = [world.shard(t, [3, 3]).requires_grad_() for t in (*features, own["weights"])]
    scale = torch.tensor(5.0, dtype=torch.float64)
    for loss in (losses.ClipLoss(), lambda *a, **w: losses.SigLipLoss()(*a, -scale, **w)):
        for weights in (None, local[2].detach()):
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
