from __future__ import annotations

import pytest
import torch

import megabatch as mb
from megabatch.similarity import dense
from tests.similarity.features import MAKERS


@pytest.mark.parametrize("scale", [0.01, 14.3, 200.0])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("b", [1, 2, 65])
def test_equals_two_cross_entropies(maker: str, scale: float, b: int) -> None:
    x, y = MAKERS[maker](b, b, 16)
    inputs = (x, y, torch.tensor(scale, dtype=torch.float64))
    mine, theirs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    ours, truth = mb.ClipLoss()(*mine), dense.clip_loss(*theirs)
    ours.backward()
    truth.backward()
    size = max(1.0, truth.item())
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-11 * size)
    for a, b_ in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b_.grad, rtol=0, atol=1e-11 * size)


def test_called_as_openclip_calls_it() -> None:
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    loss = mb.ClipLoss()(x, y, torch.tensor(10.0))
    named = mb.ClipLoss()(
        image_features=x, text_features=y, logit_scale=10.0, logit_bias=0.0, output_dict=True
    )
    assert named["contrastive_loss"] == loss
    assert loss.dtype == torch.float32


def test_scale_as_a_parameter_of_one_element() -> None:
    scale = torch.nn.Parameter(torch.tensor([10.0]))
    mb.ClipLoss()(torch.randn(5, 3), torch.randn(5, 3), scale).backward()
    assert scale.grad is not None
    assert scale.grad.shape == (1,)


def test_a_nan_feature_gives_a_nan_loss() -> None:
    x = torch.randn(5, 3)
    x[2, 1] = torch.nan
    assert mb.ClipLoss()(x, torch.randn(5, 3), 1.0).isnan()


@pytest.mark.parametrize(
    ("x", "y", "error", "words"),
    [
        (torch.randn(5, 3), torch.randn(4, 3), ValueError, ("text_features", "5 rows", "4")),
        (torch.randn(5, 3), torch.randn(5, 2), ValueError, ("text_features", "width 3", "2")),
        (torch.randn(5), torch.randn(5), ValueError, ("image_features", "(5,)")),
        (torch.ones(5, 3).long(), torch.randn(5, 3), TypeError, ("image_features", "int64")),
        (torch.randn(0, 3), torch.randn(0, 3), ValueError, ("image_features", "one row", "0")),
    ],
)
def test_bad_features(x, y, error: type, words: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error) as caught:
        mb.ClipLoss()(x, y, 1.0)
    assert all(word in str(caught.value) for word in words)
