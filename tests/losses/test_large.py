"""Losses with masks in half precision at thousands of rows on a GPU, against float64.

The CPU runs them with a hundred rows, and compares the references here with those of `reference`,
which are written row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from tests.losses import reference

TEMPERATURE, MARGIN = 0.07, 0.1


class Pairs(NamedTuple):
    """Two views of the same instances, most of whose labels occur several times."""

    x: Tensor
    y: Tensor
    labels: Tensor


def pairs(b: int, d: int, device: str, dtype: torch.dtype) -> Pairs:
    """Clusters, whose members are hard negatives of each other; pairs have cosines around 0.6."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(-1, max(2, b // 4), (b,), generator=generator)
    centres = torch.randn(64, d, generator=generator)
    shared = centres[labels % 64] + torch.randn(b, d, generator=generator)
    x, y = (
        F.normalize(shared + 0.8 * torch.randn(b, d, generator=generator), dim=1) for _ in range(2)
    )
    return Pairs(x.to(device, dtype), y.to(device, dtype), labels.to(device))


def same(labels: Tensor) -> Tensor:
    return (labels[:, None] == labels) & (labels >= 0)[:, None]


def mean_over(logp: Tensor, positive: Tensor) -> Tensor:
    """Mean over rows of the mean of -log p over their positives; rows without any are left out."""
    count = positive.sum(1)
    losses = -logp.masked_fill(~positive, 0).sum(1)
    return losses[count > 0] / count[count > 0]


def ntxent(x: Tensor, y: Tensor, scale: Tensor, labels: Tensor) -> Tensor:
    z = torch.cat([x, y])
    eye = torch.eye(len(z), dtype=torch.bool, device=z.device)
    logp = (scale * z @ z.T).masked_fill(eye, -torch.inf).log_softmax(1)
    return mean_over(logp, eye.roll(len(x), 0)).mean()


def supcon(x: Tensor, y: Tensor, scale: Tensor, labels: Tensor) -> Tensor:
    eye = torch.eye(len(x), dtype=torch.bool, device=x.device)
    logp = (scale * x @ x.T).masked_fill(eye, -torch.inf).log_softmax(1)
    return mean_over(logp, same(labels) & ~eye).mean() + 0 * y.sum()


def clip_with_duplicates(x: Tensor, y: Tensor, scale: Tensor, labels: Tensor) -> Tensor:
    eye = torch.eye(len(x), dtype=torch.bool, device=x.device)
    s, positive = scale * x @ y.T, same(labels) | eye
    return sum(mean_over(t.log_softmax(1), positive).mean() for t in (s, s.T)) / 2


def infonce_without_duplicates(x: Tensor, y: Tensor, scale: Tensor, labels: Tensor) -> Tensor:
    eye = torch.eye(len(x), dtype=torch.bool, device=x.device)
    s = (scale * x @ y.T).masked_fill(same(labels) & ~eye, -torch.inf)
    return -s.log_softmax(1).diagonal().mean()


def infonce_with_margin(x: Tensor, y: Tensor, scale: Tensor, labels: Tensor) -> Tensor:
    products = x @ y.T
    left_out = products > products.diagonal()[:, None] + MARGIN
    s = (scale * products).masked_fill(left_out, -torch.inf)
    return -s.log_softmax(1).diagonal().mean()


#: name -> our loss and its reference in float64, both of (x, y, scale, labels)
LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "nt-xent": (lambda x, y, s, _: mb.NTXentLoss(TEMPERATURE)(x, y, temperature=1 / s), ntxent),
    "supcon": (
        lambda x, y, s, labels: (
            mb.SupConLoss(TEMPERATURE)(x, labels, temperature=1 / s) + 0 * y.sum().float()
        ),
        supcon,
    ),
    "clip, duplicates positive": (
        lambda x, y, s, labels: mb.ClipLoss()(x, y, s, ids=labels),
        clip_with_duplicates,
    ),
    "infonce, duplicates left out": (
        lambda x, y, s, labels: mb.InfoNCELoss(TEMPERATURE)(x, y, ids=labels, temperature=1 / s),
        infonce_without_duplicates,
    ),
    "infonce, margin": (
        lambda x, y, s, _: mb.InfoNCELoss(TEMPERATURE, margin=MARGIN)(x, y, temperature=1 / s),
        infonce_with_margin,
    ),
}


def undecided(made: Pairs) -> tuple[Tensor, Tensor]:
    """Rows and columns with a product so close to the margin that float32 may take either side."""
    products = made.x.double() @ made.y.double().T
    close = (products - products.diagonal()[:, None] - MARGIN).abs() < 1e-5
    return close.any(1), close.any(0)


def check(name: str, made: Pairs) -> None:
    ours, theirs = LOSSES[name]
    mine = [t.clone().requires_grad_() for t in made[:2]]
    true = [t.double().requires_grad_() for t in made[:2]]
    for inputs, dtype in ((mine, torch.float32), (true, torch.float64)):
        scale = torch.tensor(1 / TEMPERATURE, dtype=dtype, device=made.x.device)
        inputs.append(scale.requires_grad_())
    loss, truth = ours(*mine, made.labels), theirs(*true, made.labels)
    half = torch.finfo(made.x.dtype).eps
    loss_scale = 2.0**14 if made.x.dtype == torch.float16 else 1.0
    (loss_scale * loss).backward()
    truth.backward()
    unsure = undecided(made) if "margin" in name else (torch.zeros_like(made.labels).bool(),) * 2
    assert all(some.float().mean() < 0.2 for some in unsure)
    few = 2e-2 if unsure[0].any() else 0.0  # they contribute to all columns
    assert abs(loss - truth) <= (2e-5 + few) * truth.abs()
    for a, b, some in zip(mine[:2], true[:2], unsure, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        size = b.grad.norm(dim=1)
        error = (a.grad.double() / loss_scale - b.grad).norm(dim=1)
        # dS is rounded once and so is the result; a row without positives may be small.
        limit = 2 * half * size.maximum(size.median()) + few * size.mean()
        assert (error <= limit)[~some].all(), name
    error = abs(mine[2].grad / loss_scale - true[2].grad)
    assert error <= (4 * half + few) * true[2].grad.abs() + 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("b", "d"), [(2048, 256), (5001, 768), (8192, 512)])
@pytest.mark.parametrize("name", LOSSES)
def test_on_a_gpu(name: str, b: int, d: int, dtype: torch.dtype) -> None:
    check(name, pairs(b, d, "cuda", dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    check(name, pairs(90, 16, "cpu", dtype))


def test_references_equal_those_row_by_row() -> None:
    x, y, labels = pairs(12, 5, "cpu", torch.float64)
    scale = torch.tensor(3.0, dtype=torch.float64)
    z = torch.cat([x, y])
    expected = {
        "nt-xent": reference.ntxent_of_logits(scale * z @ z.T, 2),
        "supcon": reference.supcon_of_logits(scale * x @ x.T, labels),
        "clip, duplicates positive": reference.clip_of_logits(scale * x @ y.T, labels),
        "infonce, duplicates left out": reference.infonce(x, y, scale, ids=labels),
        "infonce, margin": reference.infonce(x, y, scale, margin=MARGIN),
    }
    assert expected.keys() == LOSSES.keys()
    for name, value in expected.items():
        torch.testing.assert_close(LOSSES[name][1](x, y, scale, labels), value)
