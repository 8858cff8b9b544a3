from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import megabatch as mb
from tests.losses.reference import assert_equal, leaves, siglip_of_logits
from tests.similarity.features import MAKERS

IDS = torch.tensor([0, 1, 1, 2, -1, -1, 0, 0, 3, 4])


@pytest.mark.parametrize("bias", [-10.0, 0.0, 3.0])
@pytest.mark.parametrize("scale", [0.01, 10.0, 117.3])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("b", [1, 40])
def test_equals_binary_cross_entropies(maker: str, b: int, scale: float, bias: float) -> None:
    x, y = MAKERS[maker](b, b, 6)
    assert_equal(
        mb.SigLipLoss(),
        lambda x, y, s, c: siglip_of_logits(s * x @ y.T + c),
        x,
        y,
        scale,
        bias,
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
def test_shared_captions(maker: str, weighted: bool) -> None:
    x, y = MAKERS[maker](10, 10, 6)
    weights = torch.rand(10, dtype=torch.float64) if weighted else None
    assert_equal(
        lambda x, y, s, c: mb.SigLipLoss()(x, y, s, c, ids=IDS, weights=weights),
        lambda x, y, s, c: siglip_of_logits(s * x @ y.T + c, IDS, weights),
        x,
        y,
        10.0,
        -3.0,
    )


@pytest.mark.parametrize("b", [5, 0])
def test_weights_of_zero_give_zero(b: int) -> None:
    x, y = leaves(torch.randn(b, 3), torch.randn(b, 3))
    loss = mb.SigLipLoss()(x, y, 10.0, -1.0, weights=torch.zeros(b))
    loss.backward()
    assert loss == 0
    assert not x.grad.any()


def test_called_as_openclip_calls_it() -> None:
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    loss = mb.SigLipLoss()(x, y, torch.tensor(10.0), torch.tensor(-10.0))
    named = mb.SigLipLoss()(
        image_features=x, text_features=y, logit_scale=10.0, logit_bias=-10.0, output_dict=True
    )
    assert named["contrastive_loss"] == loss
    assert loss.dtype == torch.float32


X = torch.randn(5, 3)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((X, X[:4], 1.0, 0.0), {}, ValueError, ("text_features", "5 rows", "4")),
        ((X[:0], X[:0], 1.0, 0.0), {}, ValueError, ("image_features", "one row", "0")),
        ((X, X, "x", 0.0), {}, TypeError, ("logit_scale", "str")),
        ((X, X, 1.0, "x"), {}, TypeError, ("logit_bias", "str")),
        ((X, X, 1.0, torch.ones(2)), {}, ValueError, ("logit_bias", "(2,)")),
        ((X, X, 1.0, 0.0), {"ids": torch.arange(4)}, ValueError, ("ids", "(5,)", "(4,)")),
        ((X, X, 1.0, 0.0), {"weights": torch.ones(4)}, ValueError, ("weights", "(5,)", "(4,)")),
        (
            (X, X, 1.0, 0.0),
            {"weights": torch.ones(5, requires_grad=True)},
            ValueError,
            ("weights", "gradient"),
        ),
    ],
)
def test_bad_arguments(arguments: Any, options: Any, error: type, words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        mb.SigLipLoss()(*arguments, **options)
    assert all(word in str(caught.value) for word in words)


def test_a_teachers_labels() -> None:
    x, y = MAKERS["random"](10, 10, 6)
    u, v = MAKERS["clustered"](10, 10, 3)
    weights = torch.rand(10, dtype=torch.float64)
    teacher = {"dist_image_features": 3 * u, "dist_text_features": v, "dist_logit_scale": 5.0}
    loss = mb.SigLipLoss(normalize=True)

    def dense(x: torch.Tensor, y: torch.Tensor, s: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        logits, labels = s * x @ y.T + c, torch.sigmoid(5 * u @ v.T)
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(1)
        return (weights * losses).sum() / weights.sum()

    assert_equal(
        lambda x, y, s, c: loss(x, y, s, c, weights=weights, **teacher),
        lambda x, y, s, c: dense(F.normalize(x), F.normalize(y), s, c),
        *(x, y, 10.0, -3.0),
    )


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        ({"dist_text_features": None}, ("dist_text_features", "None")),
        ({"dist_logit_scale": None}, ("dist_logit_scale", "None")),
        ({"dist_text_features": torch.ones(5, 2)}, ("dist_text_features", "width 3", "2")),
        ({"dist_image_features": torch.ones(4, 3)}, ("dist_image_features", "5 rows", "4")),
        ({"ids": torch.arange(5)}, ("ids", "teacher")),
    ],
)
def test_bad_teachers(teacher: dict[str, Any], words: tuple[str, ...]) -> None:
    x = torch.ones(5, 3)
    good = {"dist_image_features": x, "dist_text_features": x, "dist_logit_scale": 2.0}
    with pytest.raises(ValueError, match=words[0]) as caught:
        mb.SigLipLoss()(x, x, 1.0, 0.0, **(good | teacher))
    assert all(word in str(caught.value) for word in words)
