"""lightly's contrastive criteria, with its names and arguments, without a similarity matrix.

    from megabatch.integrations.lightly import NTXentLoss  # in place of lightly.loss

Each class is a subclass of lightly's own, which checks and stores the arguments and owns the memory
bank; only `forward` is replaced. docs/integrations/lightly.md lists all differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import lightly.loss
import torch
from torch import Tensor

from megabatch.losses.arguments import check_pairs, check_temperature
from megabatch.losses.base import unit_rows
from megabatch.losses.terms import cross_entropy, minus_log_probability
from megabatch.losses.views import stack_views
from megabatch.similarity import (
    Split,
    global_mean,
    logsumexp,
    pair_ids,
    paired,
    replicated,
    split_logsumexp,
)
from megabatch.similarity.arguments import check_scalar, product_dtype

__all__ = ["DCLLoss", "DCLWLoss", "DetConBLoss", "DetConSLoss", "MACLLoss", "NTXentLoss"]


class NTXentLoss(lightly.loss.NTXentLoss):
    """NT-Xent of two views (SimCLR), or of a view against a memory bank (MoCo).

    Args:
        temperature: a positive number, or a tensor of shape () or (1,) that may be learnt.
        memory_bank_size: 0, or (number, width) of the keys of earlier batches that serve as
            negatives instead of the batch. The bank is lightly's.
        gather_distributed: with a memory bank, fill it with the keys of all processes; without one,
            take the negatives from the views of all processes.
    """

    def __init__(
        self,
        temperature: float = 0.5,
        memory_bank_size: int | Sequence[int] = 0,
        gather_distributed: bool = False,
    ) -> None:
        super().__init__(temperature, memory_bank_size, gather_distributed)
        check_temperature(temperature)

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """The mean loss; see `lightly.loss.NTXentLoss`.

        Args:
            out0, out1: (b, d) projections of two views. A memory bank is updated with `out1`
                if `out0` needs a gradient.

        Returns:
            A scalar in float32 (float64 for float64 projections).

        Raises:
            TypeError, ValueError: the message names the argument, its value and what was expected.
        """
        out0, out1 = _unit(out0, out1)
        group = _group(self.gather_distributed)
        out1, bank = self.memory_bank(out1, update=out0.requires_grad)
        if bank is not None:
            scale = _scale(self.temperature, out0, "local")
            keys = bank.T.to(device=out0.device, dtype=out0.dtype).contiguous()
            negative, _ = logsumexp(out0, keys, scale, sides="rows", group="local")
            return minus_log_probability(paired(out0, out1, scale), negative).mean()
        rows = _split_views(out0, out1, _scale(self.temperature, out0, group), group)
        return global_mean(cross_entropy(rows), group, name="out0")


class DCLLoss(lightly.loss.DCLLoss):
    """Decoupled NT-Xent: the positive is not in the denominator.

    Args:
        temperature: a positive number, or a tensor of shape () or (1,) that may be learnt.
        weight_fn: called with two normalised views (b, d) of this process, in both orders; returns
            (b,) factors of the positives' logits. Any gradient of the factors is followed.
        gather_distributed: take the negatives from the views of all processes.
    """

    def __init__(
        self,
        temperature: float = 0.1,
        weight_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        gather_distributed: bool = False,
    ) -> None:
        super().__init__(temperature, weight_fn, gather_distributed)
        check_temperature(temperature)

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """The mean loss; see `lightly.loss.DCLLoss`.

        Args:
            out0, out1: (b, d) projections of two views.

        Returns:
            A scalar in float32 (float64 for float64 projections).

        Raises:
            TypeError, ValueError: the message names the argument, its value and what was expected.
        """
        out0, out1 = _unit(out0, out1)
        group = _group(self.gather_distributed)
        rows = _split_views(out0, out1, _scale(self.temperature, out0, group), group)
        positive = rows.positive_sum
        if self.weight_fn is not None:
            weights = [self.weight_fn(out0, out1), self.weight_fn(out1, out0)]
            positive = torch.cat(weights) * positive
        return global_mean(rows.negative - positive, group, name="out0")


class DCLWLoss(lightly.loss.DCLWLoss, DCLLoss):
    """DCL whose positives are weighted by a negative von Mises-Fisher function of their cosine.

    The weights have a mean of 1 over the batch of this process, with `gather_distributed` too.

    Args:
        temperature, gather_distributed: see `DCLLoss`.
        sigma: the temperature of the weights.
    """


class MACLLoss(lightly.loss.MACLLoss):
    """NT-Xent whose temperature follows the mean cosine of the positives; see lightly's class.

    Args:
        temperature: the base temperature.
        alpha: how strongly the temperature follows the cosine, from 0 to 1.
        A_0: the mean cosine at which the temperature is the base temperature, from 0 to 1.
    """

    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        """The mean loss over the views of this process; see `lightly.loss.MACLLoss`.

        Args:
            z0, z1: (b, d) projections of two views.

        Returns:
            A scalar in float32 (float64 for float64 projections).

        Raises:
            TypeError, ValueError: the message names the argument, its value and what was expected.
        """
        z0, z1 = _unit(z0, z1, ("z0", "z1"))
        alignment = paired(z0.detach(), z1.detach()).mean()
        scale = 1 / (self.temperature * (1 + self.alpha * (alignment - self.A_0)))
        rows = _split_views(z0, z1, scale, "local")
        gap = (rows.negative - rows.positive_sum).detach()
        # 1 - p as a sigmoid, which does not cancel when p nears 1.
        weights = 1 / (torch.sigmoid(gap) + self.eps)
        return (weights * cross_entropy(rows)).mean()


class DetConBLoss(lightly.loss.DetConBLoss):
    """Cross-entropy of image regions; positives are regions of one mask in two views of an image.

    Args:
        temperature: a positive number, or a tensor of shape () or (1,) that may be learnt.
        gather_distributed: take the negatives from the regions of all processes.
    """

    def __init__(self, temperature: float = 0.1, gather_distributed: bool = True) -> None:
        super().__init__(temperature, gather_distributed)
        check_temperature(temperature)

    def forward(
        self,
        pred_view0: Tensor,
        pred_view1: Tensor,
        target_view0: Tensor,
        target_view1: Tensor,
        mask_view0: Tensor,
        mask_view1: Tensor,
    ) -> Tensor:
        """The sum of both views' mean losses; see `lightly.loss.DetConBLoss`.

        Args:
            pred_view0, pred_view1, target_view0, target_view1: (b, m, d), of m regions.
            mask_view0, mask_view1: (b, m) integers, each region's mask.

        Returns:
            A scalar in float32 (float64 for float64 projections).

        Raises:
            TypeError, ValueError: the message names the argument, its value and what was expected.
        """
        group = _group(self.gather_distributed)
        preds = _regions(pred_view0, pred_view1, ("pred_view0", "pred_view1"))
        targets = _regions(target_view0, target_view1, ("target_view0", "target_view1"))
        ids = _region_ids(mask_view0, mask_view1, pred_view0, group)
        scale = _scale(self.temperature, preds[0], group)
        first, second = (
            _region_loss(preds[i], targets[1 - i], targets[i], ids[1 - i], ids[i], scale, group)
            for i in (0, 1)
        )
        return first + second


class DetConSLoss(lightly.loss.DetConSLoss):
    """`DetConBLoss` in which one tower gives both predictions and targets.

    Args:
        temperature, gather_distributed: see `DetConBLoss`.
    """

    def __init__(self, temperature: float = 0.1, gather_distributed: bool = True) -> None:
        super().__init__(temperature, gather_distributed)
        self.detconbloss = DetConBLoss(temperature, gather_distributed)


# --- shared functions -----------------------------------------------------------------------------


def _group(gather_distributed: bool) -> str | None:
    return None if gather_distributed else "local"


def _unit(
    out0: Tensor, out1: Tensor, names: tuple[str, str] = ("out0", "out1")
) -> tuple[Tensor, Tensor]:
    """Both views with rows of unit length, in the dtype of the products."""
    check_pairs(out0, out1, names)
    return unit_rows(out0, product_dtype(out0)), unit_rows(out1, product_dtype(out1))


def _scale(temperature: float | Tensor, like: Tensor, group: object) -> Tensor:
    """1 / temperature; its gradient is averaged over the processes, as `replicated` does."""
    return replicated(check_scalar("temperature", temperature, like), group).reciprocal()


def _split_views(out0: Tensor, out1: Tensor, scale: Tensor, group: object) -> Split:
    """Each of the 2b views against all other views, split into its positive and negatives."""
    x, instances = stack_views((out0, out1), group)
    return split_logsumexp(x, None, scale, ids=instances, sides="rows", group=group)[0]


# --- regions of images ----------------------------------------------------------------------------


def _regions(view0: Tensor, view1: Tensor, names: tuple[str, str]) -> tuple[Tensor, Tensor]:
    """The (b, m, d) regions of two views as (b m, d), with rows of unit length."""
    for name, view in zip(names, (view0, view1), strict=True):
        if view.dim() != 3:
            raise ValueError(f"{name}: expected shape (b, m, d), got {tuple(view.shape)}")
    return _unit(view0.flatten(0, 1), view1.flatten(0, 1), names)


def _region_ids(
    mask_view0: Tensor, mask_view1: Tensor, view: Tensor, group: object
) -> tuple[Tensor, Tensor]:
    """Ids (b m,) of both views' regions, equal for one mask of one image of one process."""
    images, regions = view.shape[:2]
    for name, mask in (("mask_view0", mask_view0), ("mask_view1", mask_view1)):
        if mask.shape != (images, regions):
            expected = f"({images}, {regions})"
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(mask.shape)}")
    masks = torch.cat([mask_view0.flatten(), mask_view1.flatten()])
    image = torch.arange(images, device=masks.device).repeat_interleave(regions).repeat(2)
    _, ids = torch.stack([image, masks]).unique(dim=1, return_inverse=True)
    ids = pair_ids(ids.numel(), group, device=ids.device)[ids]
    return ids[: images * regions], ids[images * regions :]


def _region_loss(
    pred: Tensor,
    other: Tensor,
    same: Tensor,
    other_ids: Tensor,
    same_ids: Tensor,
    scale: Tensor,
    group: object,
) -> Tensor:
    """Cross-entropy of one view's regions against the other view's and the same view's.

    Positives are regions of the other view with the same id; those of the same view with the same
    id are left out. Each region counts as one over the number of its view's regions with its id.
    """
    ids = same_ids, other_ids
    across, _ = split_logsumexp(pred, other, scale, ids=ids, sides="rows", group=group)
    within, _ = split_logsumexp(
        pred, same, scale, ids=(same_ids, same_ids), sides="rows", group=group
    )
    # The gradient of logaddexp is NaN where both are -inf, as for one image with one mask.
    none = within.negative == -torch.inf
    joined = torch.logaddexp(across.negative, within.negative.masked_fill(none, 0.0))
    negative = torch.where(none, across.negative, joined)
    losses = cross_entropy(across._replace(negative=negative))
    return global_mean(losses / within.positive_count, group, name="pred_view0")
