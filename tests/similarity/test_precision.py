"""Errors of log-sum-exps and of CLIP's gradients in low precision; see precision.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import megabatch as mb
from megabatch import similarity
from tests.similarity import dense
from tests.similarity.features import MAKERS
from tests.similarity.precision import FACTOR, Case, check, gradients, product, row_errors


def negatives(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exps over each row's and each column's negatives."""
    eye = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    others = logits.masked_fill(eye, -torch.inf)
    return others.logsumexp(1), others.logsumexp(0)


def clip_from_negatives(logits: Tensor) -> Tensor:
    """Exact also where p is close to 1."""
    own = logits.diagonal()
    return -sum(logsigmoid(own - side) for side in negatives(logits)).mean() / 2


CLIP = Case(mb.ClipLoss(), clip_from_negatives)


def assert_row_errors(x: Tensor, y: Tensor, scale: float, exponents: int = 1) -> None:
    """Compare log-sum-exps and gradients; `exponents`: see `check`."""
    check(CLIP, x, y, scale, exponents)
    ours = similarity.split_logsumexp(x, y, scale)
    truth = dense.split_logsumexp(x.double(), y.double(), scale)
    theirs = negatives(scale * product(x, y.T, torch.float32))
    eps = torch.finfo(torch.float32).eps
    for mine, exact, peer in zip(ours, truth, theirs, strict=True):
        assert mine is not None
        slack = (2 + 2 * exponents) * eps * exact.negative.abs()
        limit = FACTOR * (peer - exact.negative).abs().max() + slack
        assert ((mine.negative - exact.negative).abs() <= limit).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [0.01, 14.3, 200.0])
@pytest.mark.parametrize("maker", MAKERS)
def test_per_row_error_is_no_larger_than_the_dense_expressions(
    maker: str, scale: float, dtype: torch.dtype
) -> None:
    assert_row_errors(*(t.to(dtype) for t in MAKERS[maker](256, 256, 64)), scale)


def test_a_learnt_pair_keeps_its_gradient_in_bfloat16() -> None:
    """p is close to 1 at scale 100, where a difference of two rounded terms would cancel."""
    x, y = (t.bfloat16() for t in MAKERS["learnt"](512, 512, 128))
    exact, *_ = gradients(CLIP, x.double(), y.double(), 100.0, torch.float64)
    a = x.clone().requires_grad_()
    mb.ClipLoss()(a, y, 100.0).backward()
    relative = row_errors(a.grad, exact) / exact.norm(dim=1)
    assert relative.median() < 0.004
