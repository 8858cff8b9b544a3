from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import megabatch as mb
from tests.losses.reference import assert_equal, siglip_of_logits
from tests.similarity.exact import leaves
from tests.similarity.features import MAKERS

PAIRS = [("image", "text"), ("audio", "text"), ("image", "audio")]
NAMES = ("image", "text", "audio")
B = 9


def some_features(b: int = B, d: int = 5) -> list[Tensor]:
    return [*MAKERS["learnt"](b, b, d), MAKERS["random"](b, b, d)[0]]


@pytest.mark.parametrize("normalize", [False, True])
def test_values_of_missing_rows_are_ignored(normalize: bool) -> None:
    image, text, audio = some_features()
    mask = torch.arange(B) % 3 > 0
    features = {"image": image, "text": text, "audio": audio}
    loss = mb.MultiModalLoss(PAIRS, normalize=normalize)
    clean = loss(features, 10.0, present={"audio": mask})
    for nothing in (torch.nan, torch.inf, 0.0):
        dirty = audio.masked_fill(~mask[:, None], nothing).requires_grad_()
        value = loss({**features, "audio": dirty}, 10.0, present={"audio": mask})
        value.backward()
        assert value == clean
        assert dirty.grad is not None
        assert dirty.grad.isfinite().all()
        assert not dirty.grad[~mask].any()


def test_a_modality_that_is_absent() -> None:
    image, text, _ = some_features()
    loss = mb.MultiModalLoss(PAIRS)({"image": image, "text": text, "audio": None}, 10.0)
    assert loss == mb.ClipLoss()(image, text, 10.0)
    (x,) = leaves(image)
    nothing = mb.MultiModalLoss([("image", "text")])({"image": x, "text": None}, 10.0)
    nothing.backward()
    assert nothing == 0
    assert not x.grad.any()


def test_sigmoid_loss_and_a_scale_for_each_pair() -> None:
    pairs = PAIRS[:2]
    loss = mb.MultiModalLoss(pairs, loss=mb.SigLipLoss())
    assert_equal(
        lambda i, t, a, s, r, c: loss(
            {"image": i, "text": t, "audio": a}, {pairs[0]: s, pairs[1]: r}, c
        ),
        lambda i, t, a, s, r, c: (
            siglip_of_logits(s * i @ t.T + c) + siglip_of_logits(r * a @ t.T + c)
        ),
        *some_features(),
        10.0,
        3.0,
        -2.0,
    )


def test_a_custom_loss_gets_features_in_their_dtype() -> None:
    seen = []

    def loss(x: Tensor, y: Tensor, *rest: Any, weights: Tensor) -> Tensor:
        seen.append((x.dtype, y.dtype))
        return x.sum() + y.sum()

    x = torch.randn(4, 3)
    made = mb.MultiModalLoss([("a", "b")], loss=loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made({"a": x, "b": x.bfloat16()}, 1.0)
    assert seen == [(torch.float32, torch.bfloat16)]
