"""Low precision: gradients of each loss, row by row, have no larger errors than the dense one's.

The criterion is that of tests/similarity/test_precision.py: logits and softmax in float32, dS
rounded to the features' dtype once, float32 accumulation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from tests.losses.reference import clip_of_logits, siglip_of_logits, soft_cross_entropy
from tests.similarity.features import MAKERS
from tests.similarity.test_precision import FACTOR, row_errors

#: Some feature matrices have rows that are not of unit length.
pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")

B, D, K = 96, 32, 40
BIAS = -5.0
IDS = torch.arange(B) % 37
LABELS = torch.arange(2 * B) % 11


def shared_negatives(y: Tensor) -> Tensor:
    """K further rows from the distribution of y's."""
    return y[:K].roll(1, dims=1)


def guides() -> tuple[Tensor, Tensor]:
    """A guide's queries and positives on a grid, so that float32 sums their products exactly."""
    steps = torch.arange(B * 4).view(B, 4)
    return (steps % 7 - 3) / 4, (steps % 5 - 1) / 4


def guided(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    features = zip(("guide_query", "guide_positive"), guides(), strict=True)
    return mb.InfoNCELoss(1 / scale, margin=0.53)(x, y, **dict(features))


def dense_guided(s: Tensor) -> Tensor:
    similarity = guides()[0] @ guides()[1].T
    left_out = similarity > similarity.diagonal()[:, None] + 0.53
    left_out &= ~torch.eye(B, dtype=torch.bool)
    return F.cross_entropy(s.masked_fill(left_out, -torch.inf), torch.arange(B))


def soft_labels(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    features = zip(("dist_image_features", "dist_text_features"), guides(), strict=True)
    return mb.SigLipLoss()(x, y, scale, BIAS, dist_logit_scale=3.0, **dict(features))


def dense_soft_labels(s: Tensor) -> Tensor:
    labels = torch.sigmoid(3 * (guides()[0] @ guides()[1].T).to(s.dtype))
    return F.binary_cross_entropy_with_logits(s + BIAS, labels, reduction="none").sum(1).mean()


def self_logits(s: Tensor) -> Tensor:
    return s.masked_fill(torch.eye(len(s), dtype=torch.bool), -torch.inf)


def ntxent(s: Tensor) -> Tensor:
    return F.cross_entropy(self_logits(s), torch.arange(2 * B).roll(B))


def supcon(s: Tensor, form: str = "out") -> Tensor:
    positive = (LABELS[:, None] == LABELS) & ~torch.eye(2 * B, dtype=torch.bool)
    if form == "in":
        p = self_logits(s).log_softmax(1).masked_fill(~positive, -torch.inf)
        return (positive.sum(1).log() - p.logsumexp(1)).mean()
    target = positive / positive.sum(1, keepdim=True)
    return soft_cross_entropy(self_logits(s), target.to(s.dtype)).mean()


def sincere(s: Tensor) -> Tensor:
    same = LABELS[:, None] == LABELS
    negative = s.masked_fill(same, -torch.inf).logsumexp(1)
    pairs = F.softplus(negative[:, None] - s)
    positive = same & ~torch.eye(2 * B, dtype=torch.bool)
    return ((pairs * positive).sum(1) / positive.sum(1)).mean()


class Case(NamedTuple):
    ours: Callable[[Tensor, Tensor, Tensor], Tensor]
    dense: Callable[[Tensor], Tensor]  #: of the logits of `columns`
    columns: str = "y"
    smoothing: float = 0.0  #: its gradient through all columns is rounded separately


def weighted(s: Tensor) -> Tensor:
    """A negative of cosine c has the weight e^(scale * c)."""
    negative = ~torch.eye(*s.shape, dtype=torch.bool)
    return F.cross_entropy(s + s.detach() * negative, torch.arange(B))


CASES = {
    "clip, shared captions": Case(
        lambda x, y, s: mb.ClipLoss()(x, y, s, ids=IDS), lambda s: clip_of_logits(s, IDS)
    ),
    "clip, label smoothing": Case(
        lambda x, y, s: mb.ClipLoss(label_smoothing=0.1)(x, y, s),
        lambda s: clip_of_logits(s, smoothing=0.1),
        smoothing=0.1,
    ),
    "siglip": Case(
        lambda x, y, s: mb.SigLipLoss()(x, y, s, BIAS), lambda s: siglip_of_logits(s + BIAS)
    ),
    "siglip, teacher": Case(soft_labels, dense_soft_labels),
    "infonce": Case(
        lambda x, y, s: mb.InfoNCELoss(1 / s)(x, y, shared_negatives(y)),
        lambda s: F.cross_entropy(s, torch.arange(B)),
        "y and negatives",
    ),
    "infonce, weighted": Case(
        lambda x, y, s: mb.InfoNCELoss(
            1 / s, hardness_mode="all_negatives", hardness_strength=s.item()
        )(x, y, shared_negatives(y)),
        weighted,
        "y and negatives",
    ),
    "infonce, joint": Case(
        lambda x, y, s: mb.InfoNCELoss(1 / s, reverse="joint")(x, y, shared_negatives(y)),
        lambda s: (torch.cat([s, s[:, :B].T], 1).logsumexp(1) - s.diagonal()).mean(),
        "y and negatives",
    ),
    "infonce, guide": Case(guided, dense_guided),
    "ntxent": Case(lambda x, y, s: mb.NTXentLoss(1 / s)(x, y), ntxent, "both"),
    "supcon, out": Case(
        lambda x, y, s: mb.SupConLoss(1 / s)(torch.cat([x, y]), LABELS), supcon, "both"
    ),
    "supcon, in": Case(
        lambda x, y, s: mb.SupConLoss(1 / s, form="in")(torch.cat([x, y]), LABELS),
        lambda s: supcon(s, "in"),
        "both",
    ),
    "sincere": Case(
        lambda x, y, s: mb.SincereLoss(1 / s)(torch.cat([x, y]), LABELS), sincere, "both"
    ),
}


def sides(case: Case, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the matrix."""
    if case.columns == "both":
        return (torch.cat([x, y]),) * 2
    return x, y if case.columns == "y" else torch.cat([y, shared_negatives(y)])


def on_inputs(case: Case, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and y, or their bounds, from those of rows and columns."""
    if case.columns == "both":
        return rows[:B] + columns[:B], rows[B:] + columns[B:]
    dy = columns[:B].clone()
    if case.columns == "y and negatives":
        extra = columns[B:]
        dy[:K] += extra.roll(-1, dims=1) if extra.dim() == 2 else extra
    return rows, dy


def gradients(
    case: Case, x: Tensor, y: Tensor, scale: float, dtype: torch.dtype, rounded: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dy, dscale) with logits and softmax in `dtype`, dS rounded once to `rounded`."""
    left, right = (t.to(dtype) for t in sides(case, x, y))
    s = (scale * (left @ right.T)).requires_grad_()
    case.dense(s).backward()
    if (
        case.columns == "both"
    ):  # each pair is computed once, with the sum of both entries' gradients
        ds = (s.grad + s.grad.T).to(rounded).to(dtype)
        rows, columns = scale * (ds @ right), torch.zeros_like(right)
        return *on_inputs(case, rows, columns), (left * (ds @ right)).sum() / 2
    ds = s.grad.to(rounded).to(dtype)
    dx, dy = on_inputs(case, scale * (ds @ right), scale * (ds.T @ left))
    return dx, dy, (left * (ds @ right)).sum()


def float32_noise(case: Case, x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Errors of each row and of dscale if logits and log-sum-exps are rounded to float32."""
    left, right = (t.double() for t in sides(case, x, y))
    s = (scale * (left @ right.T)).requires_grad_()
    case.dense(s).backward()
    largest = s.detach().abs().max() + torch.tensor(s.shape[1]).log() + abs(BIAS)
    noise = 2 * torch.finfo(torch.float32).eps * (1 + largest) * s.grad.abs()
    dscale = (noise * s.detach().abs()).sum() / scale
    rows, columns = scale * (noise @ right.norm(dim=1)), scale * (noise.T @ left.norm(dim=1))
    return *on_inputs(case, rows, columns), dscale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [0.01, 14.3, 100.0])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", CASES)
def test_per_row_error_is_no_larger_than_the_dense_expressions(
    name: str, maker: str, scale: float, dtype: torch.dtype
) -> None:
    case = CASES[name]
    x, y = (t.to(dtype) for t in MAKERS[maker](B, B, D))
    exact = gradients(case, x.double(), y.double(), scale, torch.float64, torch.float64)
    peer = gradients(case, x, y, scale, torch.float32, dtype)
    noise = float32_noise(case, x, y, scale)
    a, b = (t.clone().requires_grad_() for t in (x, y))
    s = torch.tensor(scale, requires_grad=True)
    case.ours(a, b, s).backward()
    half = torch.finfo(dtype).eps / 2
    second = case.smoothing * half * scale / B * max(x.norm(dim=1).max(), y.norm(dim=1).max())
    tiny = max(torch.finfo(dtype).smallest_normal, 4e-21 * scale / B)
    for mine, i in ((a.grad, 0), (b.grad, 1)):
        theirs = row_errors(peer[i], exact[i])
        limit = FACTOR * theirs.maximum(theirs.median()) + half * exact[i].norm(dim=1)
        assert (row_errors(mine, exact[i]) <= limit + noise[i] + second + tiny).all()
    terms = (x.double() * exact[0]).sum(1).abs().sum() / scale
    limit = 2 * half * terms + noise[2] + FACTOR * abs(peer[2] - exact[2])
    assert abs(s.grad - exact[2]) <= limit + tiny


@pytest.mark.parametrize("name", CASES)
def test_a_learnt_pair_keeps_its_gradient_in_bfloat16(name: str) -> None:
    case = CASES[name]
    x, y = (t.bfloat16() for t in MAKERS["learnt"](B, B, D))
    exact = gradients(case, x.double(), y.double(), 100.0, torch.float64, torch.float64)
    a = x.clone().requires_grad_()
    case.ours(a, y, torch.tensor(100.0)).backward()
    relative = row_errors(a.grad, exact[0]) / exact[0].norm(dim=1)
    assert relative.median() < 0.004


def test_one_direction_s_own_negatives_and_same_tower_in_bfloat16() -> None:
    """Each sweep rounds the queries' gradient once, and there are several."""
    query, positive = (t.bfloat16() for t in MAKERS["learnt"](B, B, D))
    own = MAKERS["random"](B, B * 4, D)[1].view(B, 4, D).bfloat16()
    loss = mb.InfoNCELoss(0.05, same_tower=("query", "positive"))
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [t.to(dtype).detach().clone().requires_grad_() for t in (query, positive, own)]
        loss(*leaves).backward()
        results.append([t.grad.double().flatten(0, -2) for t in leaves])
    for mine, exact in zip(*results, strict=True):
        error = (mine - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-6)
        assert error.median() < 0.005
        assert error.max() < 0.02
