from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import megabatch as mb
from megabatch.similarity import soft_targets
from tests.losses.reference import assert_equal, leaves
from tests.similarity.features import MAKERS
from tests.similarity.test_precision import FACTOR, row_errors


def dense(x: Tensor, y: Tensor, scale: Tensor, *teacher: Tensor | float) -> tuple[Tensor, Tensor]:
    """Both losses by definition, from whole matrices."""
    u, v, factor = teacher
    logits, targets = scale * x @ y.T, factor * u @ v.T  # type: ignore[operator, union-attr]
    labels = torch.arange(len(x))
    contrastive = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    distill = [
        -(t.softmax(1) * s.log_softmax(1)).sum(1).mean()
        for s, t in ((logits, targets), (logits.T, targets.T))
    ]
    return contrastive, sum(distill) / 2


def features(kind: str, m: int, d: int, width: int) -> list[Tensor]:
    x, y = MAKERS[kind](m, m, d)
    u, v = MAKERS["clustered"](m, m, width)
    return [x, y, u, v]


@settings(max_examples=60)
@given(
    kind=st.sampled_from(sorted(MAKERS)),
    m=st.integers(1, 40),
    d=st.integers(1, 9),
    width=st.integers(1, 9),
    scale=st.sampled_from([0.01, 1.0, 20.0, 200.0]),
    factor=st.sampled_from([0.01, 5.0, 100.0]),
    blocks=st.sampled_from([None, 64 << 10]),
)
def test_equals_the_dense_losses(
    kind: str, m: int, d: int, width: int, scale: float, factor: float, blocks: int | None
) -> None:
    x, y, u, v = features(kind, m, d, width)
    before = mb.similarity.set_workspace(blocks)
    try:
        for k, share in enumerate((0.0, 1.0)):
            assert_equal(
                lambda *a, k=k, share=share: (
                    share * mb.DistillClipLoss()(*a, u, v, factor)[1 - k]
                    + mb.DistillClipLoss()(*a, u, v, factor)[k]
                ),
                lambda *a, k=k, share=share: (
                    share * dense(*a, u, v, factor)[1 - k] + dense(*a, u, v, factor)[k]
                ),
                x,
                y,
                scale,
            )
    finally:
        mb.similarity.set_workspace(before)


def test_many_blocks_in_one_small_workspace() -> None:
    x, y, u, v = features("random", 700, 6, 3)
    before = mb.similarity.set_workspace(64 << 10)
    try:
        assert_equal(
            lambda *a: mb.DistillClipLoss()(*a, u, v, 30.0)[1],
            lambda *a: dense(*a, u, v, 30.0)[1],
            x,
            y,
            50.0,
        )
    finally:
        mb.similarity.set_workspace(before)


def test_equals_openclip() -> None:
    open_clip = pytest.importorskip("open_clip")
    x, y, u, v = (F.normalize(t, dim=1) for t in features("random", 30, 8, 12))
    mine, theirs = leaves(x, y, 14.3), leaves(x, y, 14.3)
    ours = mb.DistillClipLoss()(*mine, u, v, 20.0, output_dict=True)
    truth = open_clip.loss.DistillClipLoss()(*theirs, u, v, 20.0, output_dict=True)
    assert ours.keys() == truth.keys()
    for losses in (ours, truth):
        sum(losses.values()).backward()
    for name in truth:
        torch.testing.assert_close(ours[name], truth[name], rtol=0, atol=1e-11)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-11)


def test_a_teacher_that_agrees_gives_no_gradient() -> None:
    """The cross-entropy is the entropy of the targets, and its gradient vanishes."""
    x, y, *_ = (t.requires_grad_() for t in features("random", 25, 6, 4))
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    distill = mb.DistillClipLoss()(x, y, scale, x, y, scale)[1]
    targets = (7 * x @ y.T).detach()
    entropy = [-(t.softmax(1) * t.log_softmax(1)).sum(1).mean() for t in (targets, targets.T)]
    torch.testing.assert_close(distill, sum(entropy) / 2, rtol=0, atol=1e-12)
    for gradient in torch.autograd.grad(distill, (x, y, scale)):
        assert gradient.abs().max() < 1e-13


def test_only_the_student_gets_gradients() -> None:
    inputs = [t.requires_grad_() for t in features("random", 9, 4, 5)]
    scales = [torch.tensor(3.0, requires_grad=True) for _ in range(2)]
    sum(mb.DistillClipLoss()(*inputs[:2], scales[0], *inputs[2:], scales[1])).backward()
    for tensor in (*inputs[:2], scales[0]):
        assert tensor.grad is not None
    for tensor in (*inputs[2:], scales[1]):
        assert tensor.grad is None


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_frozen_inputs(frozen: tuple[int, ...]) -> None:
    x, y, u, v = features("random", 12, 4, 5)
    full, some = leaves(x, y, 6.0), leaves(x, y, 6.0)
    for k in frozen:
        some[k].requires_grad_(False)
    for inputs in (full, some):
        sum(mb.DistillClipLoss()(*inputs, u, v, 9.0)).backward()
    for k in range(3):
        if k in frozen:
            assert some[k].grad is None
        else:
            torch.testing.assert_close(some[k].grad, full[k].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("agree", [False, True])
@pytest.mark.parametrize("scale", [0.01, 1.0, 14.3, 100.0, 200.0])
@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_bfloat16_is_as_exact_as_the_dense_expression(kind: str, scale: float, agree: bool) -> None:
    """Row by row, against logits and softmax in float32 with dS rounded once."""
    x, y, u, v = (t.bfloat16() for t in features(kind, 96, 32, 24))
    if agree:
        u, v = x.clone(), y.clone()
    x.requires_grad_()
    distill = mb.DistillClipLoss()(x, y, scale, u, v, scale)[1]
    (ours,) = torch.autograd.grad(distill, x)

    def gradient(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        a, b, c, d = (t.detach().to(dtype) for t in (x, y, u, v))
        s = (scale * a @ b.T).requires_grad_()
        t = scale * c @ d.T
        value = sum(
            -(q.softmax(1) * p.log_softmax(1)).sum(1).mean() for p, q in ((s, t), (s.T, t.T))
        )
        (ds,) = torch.autograd.grad(value / 2, s)
        return value.detach() / 2, scale * (ds.bfloat16().to(dtype) @ b)

    def exact() -> tuple[Tensor, Tensor]:
        a, b, c, d = (t.detach().double() for t in (x, y, u, v))
        a.requires_grad_()
        value = dense(a, b, torch.tensor(scale), c, d, scale)[1]
        return value.detach(), torch.autograd.grad(value, a)[0]

    truth, dx = exact()
    near, dense_dx = gradient(torch.float32)
    wide = [t.detach().double() for t in (x, y)]
    size = max(1.0, scale * (wide[0] @ wide[1].T).abs().max().item())
    rounding = 2**-22 * max(size, truth.item())
    assert abs(distill.item() - truth.item()) <= 2 * abs(near.item() - truth.item()) + rounding
    # dS = P - T: if teacher and student agree, only the rounding of float32 logits is left, which
    # is the same for both matrices of the dense expression.
    noise = 2**-21 * size * scale * wide[1].norm(dim=1).max().item() / len(x)
    assert (row_errors(ours, dx) <= FACTOR * row_errors(dense_dx.bfloat16(), dx) + noise).all()


def test_wrong_arguments() -> None:
    x, y, u, v = (t.float() for t in features("random", 4, 3, 5))
    call = mb.DistillClipLoss()
    for arguments, error, words in (
        ((x, y, 1.0, u, v[:3], 1.0), ValueError, "dist_text_features: expected 4 rows"),
        ((x, y, 1.0, u[:3], v[:3], 1.0), ValueError, "dist_image_features: expected 4 rows"),
        ((x, y, 1.0, u, v[:, :2], 1.0), ValueError, "dist_text_features: expected width 5"),
        (
            (x, y, 1.0, u.double(), v.double(), 1.0),
            TypeError,
            "dist_image_features: expected torch",
        ),
        ((x, y, 1.0, u, v, "one"), TypeError, "dist_logit_scale: expected a number"),
        ((x, y, 1.0, None, v, 1.0), TypeError, "dist_image_features: expected a tensor"),
    ):
        with pytest.raises(error, match=words):
            call(*arguments)
    with pytest.raises(ValueError, match="teacher_y: expected 4 rows"):
        soft_targets(x, y, 1.0, u, v[:2], 1.0)


def test_nan_features_give_nan() -> None:
    x, y, u, v = features("random", 6, 3, 4)
    for k in range(4):
        inputs = [t.clone() for t in (x, y, u, v)]
        inputs[k][2, 1] = torch.nan
        distill = mb.DistillClipLoss()(*inputs[:2], 1.0, *inputs[2:], 1.0)[1]
        assert distill.isnan()


def test_soft_targets_gives_both_sides() -> None:
    x, y, u, v = features("random", 11, 4, 6)
    rows, columns = soft_targets(x, y, 2.0, u, v, 3.0)
    split, _ = mb.similarity.split_logsumexp(x, y, 2.0)
    for a, b in zip(rows, split, strict=False):
        torch.testing.assert_close(a, b)
    t = (3 * u @ v.T).T.softmax(1)
    wanted = -(t * (2 * x @ y.T).T.log_softmax(1)).sum(1)
    torch.testing.assert_close(columns.cross_entropy, wanted)
