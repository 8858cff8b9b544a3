"""Every loss as a function of two feature matrices and a scale, for tests of common properties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import megabatch as mb

B, D = 7, 8
TOWERS = ("query", "positive")
MODALITIES = [("a", "b"), ("b", "c")]


def ids(x: Tensor, views: int = 1) -> Tensor:
    """(b,) ids of which most occur twice; repeated for each view."""
    return (torch.arange(len(x), device="cpu") % 4).to(x.device).repeat(views)


def weights(x: Tensor) -> Tensor:
    """(b,) from 0 to 1."""
    return torch.linspace(0, 1, len(x), device="cpu").to(x.device)


def hard(x: Tensor) -> Tensor:
    """(b, 3, d) negatives of each row."""
    return torch.stack([x.roll(i, 1) for i in (1, 2, 3)], dim=1)


def guide(x: Tensor, start: int) -> Tensor:
    """(b, 3) features of a guide, in a dtype that autocast does not cast."""
    made = torch.linspace(0, 9, len(x) * 3, dtype=torch.float64, device="cpu").view(-1, 3)
    return (made + start).sin().to(x.device, torch.promote_types(x.dtype, torch.float32))


def tokens(x: Tensor) -> Tensor:
    """(..., d) as two tokens (..., 2, d)."""
    return torch.stack([x, -x], dim=-2)


def mask(x: Tensor) -> Tensor:
    """(..., 2): of some rows the first token does not count."""
    last = torch.ones(2, dtype=torch.bool, device="cpu").to(x.device).expand(*x.shape[:-1], 2)
    return last ^ (torch.arange(len(x) * 2, device="cpu") % 6 == 0).to(x.device).view(
        -1, *[1] * (x.dim() - 2), 2
    )


def teacher(x: Tensor) -> dict[str, Any]:
    return {
        "dist_image_features": guide(x, 0),
        "dist_text_features": guide(x, 1),
        "dist_logit_scale": 3.0,
        "dist_logit_bias": -2.0,
    }


def losses(**n: Any) -> dict[str, Callable[[Any, Any, Any], Tensor]]:
    """Name -> a loss of features x and y (b, d) and a scale; `n`: whether it normalises."""
    return {
        "clip": mb.ClipLoss(**n),
        "clip, smoothing": mb.ClipLoss(label_smoothing=0.1, **n),
        "clip, ids": lambda x, y, s: mb.ClipLoss(label_smoothing=0.1, **n)(x, y, s, s, ids=ids(x)),
        "clip, ignored": lambda x, y, s: mb.ClipLoss(duplicates="ignored", **n)(
            x, y, s, ids=ids(x), weights=weights(x)
        ),
        "distillation": lambda x, y, s: sum(mb.DistillClipLoss(**n)(x, y, s, y, x.roll(1, 0), 2.0)),
        "siglip": lambda x, y, s: mb.SigLipLoss(**n)(x, y, s, -s, ids=ids(x), weights=weights(x)),
        "siglip, teacher": lambda x, y, s: mb.SigLipLoss(**n)(x, y, s, -s, **teacher(x)),
        "infonce": lambda x, y, s: mb.InfoNCELoss(1 / s, same_tower=TOWERS, **n)(
            x, y, y.roll(1, 1), queue=x.detach()
        ),
        "infonce, hard": lambda x, y, s: mb.InfoNCELoss(1.0, margin=0.1, **n)(
            x, y, hard(y), ids=ids(x), temperature=1 / s
        ),
        "infonce, joint": lambda x, y, s: mb.InfoNCELoss(
            1 / s, same_tower=TOWERS, reverse="joint", **n
        )(x, y, y.roll(1, 1)),
        "infonce, weighted": lambda x, y, s: mb.InfoNCELoss(
            1 / s, share_negatives=True, hardness_mode="hard_negatives", hardness_strength=3.0, **n
        )(x, y, hard(y)),
        "infonce, smoothing": lambda x, y, s: mb.InfoNCELoss(1 / s, label_smoothing=0.1, **n)(
            x, y, hard(y), queue=x.detach(), weights=weights(x)
        ),
        "infonce, log q": lambda x, y, s: mb.InfoNCELoss(1 / s, margin=0.1, **n)(
            *(x, y, hard(y)),
            ids=ids(x),
            queue=x.detach(),
            log_q=-weights(x),
            log_q_negatives=-weights(x)[:, None].expand(-1, 3),
            log_q_queue=-weights(x),
        ),
        "infonce, guide": lambda x, y, s: mb.InfoNCELoss(
            1 / s, margin=-0.1, same_tower=("query",), **n
        )(x, y, guide_query=guide(x, 0), guide_positive=guide(x, 1)),
        "maxsim": lambda x, y, s: mb.MaxSimLoss(1 / s, directions="both", **n)(
            tokens(x), tokens(y)
        ),
        "maxsim, masked": lambda x, y, s: mb.MaxSimLoss(1 / s, score="mean", margin=0.1, **n)(
            tokens(x),
            tokens(y),
            mask(x),
            mask(y),
            tokens(hard(y)[:, :2]),
            mask(hard(y)[:, :2]),
            ids=ids(x),
        ),
        "ntxent": lambda x, y, s: mb.NTXentLoss(1 / s, **n)(x, y),
        "ntxent, debiased": lambda x, y, s: mb.NTXentLoss(1 / s, tau_plus=0.01, **n)(x, y),
        "dcl": lambda x, y, s: mb.DCLLoss(1.0, **n)(x, y, x.roll(1, 1), temperature=1 / s),
        "dcl, weighted": lambda x, y, s: mb.DCLLoss(1 / s, sigma=5.0, **n)(x, y),
        "supcon": lambda x, y, s: mb.SupConLoss(1 / s, **n)(x, ids(x), y, ids(x)),
        "supcon, in": lambda x, y, s: mb.SupConLoss(1 / s, form="in", **n)(
            torch.cat([x, y]), ids(x, 2)
        ),
        "sincere": lambda x, y, s: mb.SincereLoss(1 / s, **n)(x, ids(x), y, ids(x)),
        "sincere, pairs": lambda x, y, s: mb.SincereLoss(1 / s, average="pairs", **n)(
            torch.cat([x, y]), ids(x, 2)
        ),
        "matryoshka": mb.MatryoshkaLoss(mb.ClipLoss(), [3, D], **n),
        "several modalities": lambda x, y, s: mb.MultiModalLoss(MODALITIES, **n)(
            {"a": x, "b": y, "c": x.roll(1, 1)}, s
        ),
        "several modalities, sigmoid": lambda x, y, s: mb.MultiModalLoss(
            MODALITIES, loss=mb.SigLipLoss(), **n
        )({"a": x, "b": y, "c": None}, s, -s),
    }


LOSSES = losses()
#: With a selection of rows, which some tracers cannot follow.
MASKED: dict[str, Callable[[Any, Any, Any], Tensor]] = {
    "masked": lambda x, y, s: mb.MultiModalLoss([("a", "b")])(
        {"a": x, "b": y}, s, present={"a": torch.arange(len(x), device="cpu") > 2}
    )
}

#: Losses that get x and y as they are, and none made from them.
DIRECT = (
    *("clip", "siglip, teacher", "infonce, guide", "ntxent", "dcl, weighted", "supcon"),
    *("sincere", "matryoshka"),
)


def features(dtype: torch.dtype = torch.float32, b: int = B) -> list[Tensor]:
    """x, y and a float32 scale, all with gradients."""
    x, y = (torch.randn(b, D).to(dtype).requires_grad_() for _ in range(2))
    return [x, y, torch.tensor(5.0, requires_grad=True)]
