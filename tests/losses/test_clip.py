"""ClipLoss and DistillClipLoss against dense expressions, and the operator of plain pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch.losses import clip
from megabatch.similarity import backends, soft_targets
from tests.losses.reference import assert_equal, clip_of_logits
from tests.similarity.exact import leaves
from tests.similarity.features import MAKERS

SCALES = (0.01, 14.3, 100.0, 200.0)

makers = pytest.mark.parametrize("maker", MAKERS)


def test_compiled_code_does_not_ask_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile cannot trace the question, which a GPU makes it reach."""
    monkeypatch.setattr(backends, "kernels_available", lambda x: bool(input()))
    rows, columns = torch.rand(2, 4, 7).unbind()
    compiled = torch.compile(clip.paired_losses, fullgraph=True, backend="eager")
    assert compiled(rows, columns).shape == (7,)


@makers
@pytest.mark.parametrize("b", [1, 2, 65])
def test_equals_two_cross_entropies(maker: str, b: int) -> None:
    for scale in SCALES:
        x, y = MAKERS[maker](b, b, 16)
        assert_equal(mb.ClipLoss(), lambda x, y, s: clip_of_logits(s * x @ y.T), x, y, scale)


@pytest.mark.parametrize("loss", [mb.ClipLoss(), mb.SigLipLoss()])
def test_weights_of_zero_give_zero(loss: Any) -> None:
    for b in (5, 0):
        x, y = leaves(torch.randn(b, 3), torch.randn(b, 3))
        value = loss(x, y, 10.0, -1.0, weights=torch.zeros(b))
        value.backward()
        assert value == 0
        assert not x.grad.any()
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("loss", [mb.ClipLoss(), mb.SigLipLoss()])
def test_called_as_openclip_calls_it(loss: Any) -> None:
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    value = loss(x, y, torch.tensor(10.0), torch.tensor(-10.0))
    named = loss(
        image_features=x, text_features=y, logit_scale=10.0, logit_bias=-10.0, output_dict=True
    )
    assert named["contrastive_loss"] == value
    assert value.dtype == torch.float32


def test_towers_of_the_same_tensor_and_a_scale_of_one_element() -> None:
    x, y, z = (torch.ones(5, 3).cumsum(0).requires_grad_() for _ in range(3))
    scale = torch.nn.Parameter(torch.tensor([2.0]))
    mb.ClipLoss()(x, x, scale).backward()
    mb.ClipLoss()(y, z, 2.0).backward()
    torch.testing.assert_close(x.grad, y.grad + z.grad)
    assert scale.grad is not None
    assert scale.grad.shape == (1,)


# --- distillation ---------------------------------------------------------------------------------


def dense(x: Tensor, y: Tensor, scale: Tensor, *teacher: Any) -> tuple[Tensor, Tensor]:
    """Both losses by definition, from whole matrices."""
    u, v, factor = teacher
    logits, targets = scale * x @ y.T, factor * u @ v.T
    labels = torch.arange(len(x))
    contrastive = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    distill = [
        -(t.softmax(1) * s.log_softmax(1)).sum(1).mean()
        for s, t in ((logits, targets), (logits.T, targets.T))
    ]
    return contrastive, sum(distill) / 2


def features(kind: str, m: int, d: int, width: int) -> list[Tensor]:
    return [*MAKERS[kind](m, m, d), *MAKERS["clustered"](m, m, width)]


def test_many_blocks_in_one_small_workspace(small_blocks: None) -> None:
    x, y, u, v = features("random", 300, 6, 3)
    assert_equal(
        lambda *a: mb.DistillClipLoss()(*a, u, v, 30.0)[1],
        lambda *a: dense(*a, u, v, 30.0)[1],
        *(x, y, 50.0),
    )


def test_a_teacher_that_agrees_gives_no_gradient() -> None:
    """The cross-entropy is the entropy of the targets, and its gradient vanishes."""
    x, y, *_ = (t.requires_grad_() for t in features("random", 25, 6, 4))
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    named = mb.DistillClipLoss()(x, y, scale, x, y, scale, output_dict=True)
    assert list(named) == ["contrastive_loss", "distill_loss"]
    targets = (7 * x @ y.T).detach()
    entropy = [-(t.softmax(1) * t.log_softmax(1)).sum(1).mean() for t in (targets, targets.T)]
    torch.testing.assert_close(named["distill_loss"], sum(entropy) / 2, rtol=0, atol=1e-12)
    for gradient in torch.autograd.grad(named["distill_loss"], (x, y, scale)):
        assert gradient.abs().max() < 1e-13


def test_a_teacher_gets_no_gradient() -> None:
    x, y, *teacher = leaves(*features("random", 12, 4, 5), 9.0)
    sum(mb.DistillClipLoss()(x, y, 6.0, *teacher)).backward()
    assert x.grad is not None
    assert all(tensor.grad is None for tensor in teacher)


def test_soft_targets_gives_both_sides() -> None:
    x, y, u, v = features("random", 11, 4, 6)
    rows, columns = soft_targets(x, y, 2.0, u, v, 3.0)
    split, _ = mb.similarity.split_logsumexp(x, y, 2.0)
    for a, b in zip(rows, split, strict=False):
        torch.testing.assert_close(a, b)
    t = (3 * u @ v.T).T.softmax(1)
    wanted = -(t * (2 * x @ y.T).T.log_softmax(1)).sum(1)
    torch.testing.assert_close(columns.cross_entropy, wanted)
