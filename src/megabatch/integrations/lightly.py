"""lightly's contrastive criteria, with its names and arguments, without a similarity matrix.

    from megabatch.integrations.lightly import NTXentLoss  # in place of lightly.loss

Each class is a subclass of lightly's own, which takes the arguments and owns the memory bank; only
`forward` is replaced. It takes two views' projections (b, d), and returns a scalar in float32
(float64 for float64 projections). It raises a TypeError or a ValueError that names the argument,
its value and what was expected. A temperature is a positive number, or a tensor of shape () or (1,)
that may be learnt. docs/integrations/lightly.md lists all differences.
"""

from __future__ import annotations

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
    paired,
    replicated,
    split_logsumexp,
)
from megabatch.similarity.arguments import check_scalar, product_dtype

__all__ = ["DCLLoss", "DCLWLoss", "MACLLoss", "NTXentLoss"]


class NTXentLoss(lightly.loss.NTXentLoss):
    """NT-Xent of two views (SimCLR), or of a view against a memory bank (MoCo).

    Args:
        temperature: see the module.
        memory_bank_size: 0, or (number, width) of the keys of earlier batches that serve as
            negatives instead of the batch. The bank is lightly's.
        gather_distributed: with a memory bank, fill it with the keys of all processes; without one,
            take the negatives from the views of all processes.
    """

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """The mean loss; a memory bank is updated with `out1` if `out0` needs a gradient."""
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
        temperature: see the module.
        weight_fn: called with two normalised views (b, d) of this process, in both orders; returns
            (b,) factors of the positives' logits. Any gradient of the factors is followed.
        gather_distributed: take the negatives from the views of all processes.
    """

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """The mean loss."""
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
    """NT-Xent of one process, whose temperature follows the mean cosine of the positives.

    Args:
        temperature: the base temperature.
        alpha: how strongly the temperature follows the cosine, from 0 to 1.
        A_0: the mean cosine at which the temperature is the base temperature, from 0 to 1.
    """

    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        """The mean loss over the views of this process."""
        z0, z1 = _unit(z0, z1, ("z0", "z1"))
        alignment = paired(z0.detach(), z1.detach()).mean()
        scale = 1 / (self.temperature * (1 + self.alpha * (alignment - self.A_0)))
        rows = _split_views(z0, z1, scale, "local")
        gap = (rows.negative - rows.positive_sum).detach()
        # 1 - p as a sigmoid, which does not cancel when p nears 1.
        weights = 1 / (torch.sigmoid(gap) + self.eps)
        return (weights * cross_entropy(rows)).mean()


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
    checked = check_scalar("temperature", check_temperature(temperature), like)
    return replicated(checked, group).reciprocal()


def _split_views(out0: Tensor, out1: Tensor, scale: Tensor, group: object) -> Split:
    """Each of the 2b views against all other views, split into its positive and negatives."""
    x, instances = stack_views((out0, out1), group)
    return split_logsumexp(x, None, scale, ids=instances, sides="rows", group=group)[0]
