"""Low precision: gradients of each loss, row by row, have no larger errors than the dense one's.

The criterion is that of tests/similarity/precision.py. On a GPU with thousands of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from tests.losses.reference import (
    clip_of_logits,
    ntxent_of_logits,
    siglip_of_logits,
    sincere_of_logits,
    soft_cross_entropy,
    supcon_of_logits,
)
from tests.similarity.features import MAKERS
from tests.similarity.precision import Case, check, further_negatives

#: Some feature matrices have rows that are not of unit length.
pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")

B, D = 96, 32
BIAS = -5.0


def indices(x: Tensor, period: int) -> Tensor:
    """(b,) numbers that repeat, and so serve as labels."""
    return torch.arange(len(x), device=x.device) % period


def is_own(s: Tensor) -> Tensor:
    return torch.eye(*s.shape, dtype=torch.bool, device=s.device)


def guides(x: Tensor) -> tuple[Tensor, Tensor]:
    """A guide's queries and positives on a grid, so that float32 sums their products exactly."""
    steps = torch.arange(len(x) * 4, device=x.device).view(-1, 4)
    return (steps % 7 - 3) / 4, (steps % 5 - 1) / 4


def guided(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    query, positive = guides(x)
    loss = mb.InfoNCELoss(1 / scale, margin=0.53)
    return loss(x, y, guide_query=query, guide_positive=positive)


def dense_guided(s: Tensor) -> Tensor:
    query, positive = guides(s)
    similarity = query @ positive.T
    left_out = (similarity > similarity.diagonal()[:, None] + 0.53) & ~is_own(s)
    return F.cross_entropy(s.masked_fill(left_out, -torch.inf), indices(s, len(s)))


def soft_labels(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    features = zip(("dist_image_features", "dist_text_features"), guides(x), strict=True)
    return mb.SigLipLoss()(x, y, scale, BIAS, dist_logit_scale=3.0, **dict(features))


def dense_soft_labels(s: Tensor) -> Tensor:
    query, positive = guides(s)
    labels = torch.sigmoid(3 * (query @ positive.T).to(s.dtype))
    return F.binary_cross_entropy_with_logits(s + BIAS, labels, reduction="none").sum(1).mean()


def distilled(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    teacher = (features.to(x.dtype) for features in guides(x))
    return mb.DistillClipLoss()(x, y, scale, *teacher, 3.0)[1]


def dense_distilled(s: Tensor) -> Tensor:
    query, positive = guides(s)
    target = 3 * (query @ positive.T).to(s.dtype)
    near = soft_cross_entropy(s, target.softmax(1)), soft_cross_entropy(s.T, target.T.softmax(1))
    return sum(near).mean() / 2


def without_duplicates(s: Tensor) -> Tensor:
    ids = indices(s, 37)
    left_out = (ids[:, None] == ids) & ~is_own(s)
    return F.cross_entropy(s.masked_fill(left_out, -torch.inf), indices(s, len(s)))


def weighted(s: Tensor) -> Tensor:
    """A negative of cosine c has the weight e^(scale * c)."""
    return F.cross_entropy(s + s.detach() * ~is_own(s), indices(s, len(s)))


def log_q(like: Tensor, size: int, start: int = 0) -> Tensor:
    return -(torch.arange(start, start + size, device=like.device) * 7 % 150) / 10.0


def joint(s: Tensor) -> Tensor:
    both = torch.cat([s, s[:, : len(s)].T], 1)
    return (both.logsumexp(1) - s.diagonal()).mean()


def labelled(loss: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    both = torch.cat([x, y])
    return loss(both, indices(both, 11))


CASES = {
    "clip, shared captions": Case(
        lambda x, y, s: mb.ClipLoss()(x, y, s, ids=indices(x, 37)),
        lambda s: clip_of_logits(s, indices(s, 37)),
    ),
    "clip, label smoothing": Case(
        lambda x, y, s: mb.ClipLoss(label_smoothing=0.1)(x, y, s),
        lambda s: clip_of_logits(s, smoothing=0.1),
        smoothing=0.1,
    ),
    "distillation": Case(distilled, dense_distilled),
    "siglip": Case(
        lambda x, y, s: mb.SigLipLoss()(x, y, s, BIAS),
        lambda s: siglip_of_logits(s + BIAS),
        bias=BIAS,
    ),
    "siglip, teacher": Case(soft_labels, dense_soft_labels, bias=BIAS),
    "infonce": Case(
        lambda x, y, s: mb.InfoNCELoss(1 / s)(x, y, further_negatives(y)),
        lambda s: F.cross_entropy(s, indices(s, len(s))),
        "y and negatives",
    ),
    "infonce, duplicates left out": Case(
        lambda x, y, s: mb.InfoNCELoss(1 / s)(x, y, ids=indices(x, 37)), without_duplicates
    ),
    "infonce, weighted": Case(
        lambda x, y, s: mb.InfoNCELoss(
            1 / s, hardness_mode="all_negatives", hardness_strength=s.item()
        )(x, y, further_negatives(y)),
        weighted,
        "y and negatives",
    ),
    "infonce, joint": Case(
        lambda x, y, s: mb.InfoNCELoss(1 / s, reverse="joint")(x, y, further_negatives(y)),
        joint,
        "y and negatives",
    ),
    "infonce, log q": Case(
        lambda x, y, s: mb.InfoNCELoss(1 / s)(
            *(x, y, further_negatives(y)),
            log_q=log_q(x, len(x)),
            log_q_negatives=log_q(x, len(further_negatives(y)), len(x)),
        ),
        lambda s: F.cross_entropy(s - log_q(s, s.shape[1]).to(s.dtype), indices(s, len(s))),
        "y and negatives",
        bias=15.0,
    ),
    "infonce, guide": Case(guided, dense_guided),
    "ntxent": Case(
        lambda x, y, s: mb.NTXentLoss(1 / s)(x, y), lambda s: ntxent_of_logits(s, 2), "both"
    ),
    "supcon, out": Case(
        lambda x, y, s: labelled(mb.SupConLoss(1 / s), x, y),
        lambda s: supcon_of_logits(s, indices(s, 11)),
        "both",
    ),
    "supcon, in": Case(
        lambda x, y, s: labelled(mb.SupConLoss(1 / s, form="in"), x, y),
        lambda s: supcon_of_logits(s, indices(s, 11), form="in"),
        "both",
    ),
    "sincere": Case(
        lambda x, y, s: labelled(mb.SincereLoss(1 / s), x, y),
        lambda s: sincere_of_logits(s, indices(s, 11)),
        "both",
    ),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", CASES)
def test_per_row_error_is_no_larger_than_the_dense_expressions(name: str, maker: str) -> None:
    for dtype, scale in (
        *((torch.bfloat16, 0.01), (torch.bfloat16, 14.3), (torch.bfloat16, 100.0)),
        *((torch.float16, 14.3), (torch.float16, 100.0), (torch.float32, 100.0)),
    ):
        x, y = (t.to(dtype) for t in MAKERS[maker](B, B, D))
        check(CASES[name], x, y, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("b", "d"), [(2048, 256), (3001, 768)])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, b: int, d: int, dtype: torch.dtype) -> None:
    for maker in ("learnt", "clustered"):
        x, y = (t.to("cuda", dtype) for t in MAKERS[maker](b, b, d))
        check(CASES[name], x, y, 14.3)
