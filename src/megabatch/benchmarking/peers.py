"""Other libraries' losses, each called as its own documentation does.

All of them but open_clip's run on CUDA only. Those that have no scale of their own get x times the
scale, rounded to x's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LossFunction = Callable[..., Tensor]


def openclip() -> LossFunction:
    """open_clip.ClipLoss, which forms the logits of each direction."""
    import open_clip

    return open_clip.ClipLoss()


def inf_cl() -> LossFunction:
    """Inf-CL (arXiv 2410.17243). Its kernels compute in float32/TF32 whatever comes."""
    from inf_cl import cal_inf_loss

    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        # Its argument `scale` runs a collective, for which one process alone has no group.
        with torch.autocast(x.device.type, enabled=False):
            x, y = x.float(), y.float()
            value: Tensor = (cal_inf_loss(scale * x, y) + cal_inf_loss(scale * y, x)) / 2
            return value

    return loss


def memeff() -> LossFunction:
    """memeff; its temperature is a number and gets no gradient."""
    from memeff import MemoryEfficientCLIPLoss

    made: list[torch.nn.Module] = []

    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        if not made:
            temperature = 1 / scale.item()
            made.append(MemoryEfficientCLIPLoss(temperature, normalized_inputs=True, stable=False))
        value: Tensor = made[0](x, y)
        return value

    return loss


def liger() -> LossFunction:
    """Liger's linear cross-entropy, once for each direction."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    one_way = LigerFusedLinearCrossEntropyLoss()

    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        labels = torch.arange(len(x), device=x.device)
        return (one_way(y, scale * x, labels) + one_way(x, scale * y, labels)) / 2

    return loss


def cut_cross_entropy() -> LossFunction:
    """cut-cross-entropy, once for each direction.

    Without its filter, which drops what is small beside 1 and not beside the sum of many: at the
    start of training, all negatives.
    """
    from cut_cross_entropy import linear_cross_entropy

    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        labels = torch.arange(len(x), device=x.device)
        rows = linear_cross_entropy(scale * x, y, labels, filter_eps=None)
        columns = linear_cross_entropy(scale * y, x, labels, filter_eps=None)
        return (rows + columns) / 2

    return loss


def siglip_kernel() -> LossFunction:
    """siglip-kernel's own choice for the dtype."""
    from siglip_kernel import fused_siglip_loss

    def loss(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        value: Tensor = fused_siglip_loss(x, y, scale.log(), bias)
        return value

    return loss
