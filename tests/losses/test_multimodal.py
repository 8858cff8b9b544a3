from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import megabatch as mb
from tests.losses.reference import assert_equal, clip_of_logits, leaves, siglip_of_logits
from tests.similarity.features import MAKERS

PAIRS = [("image", "text"), ("audio", "text"), ("image", "audio")]
NAMES = ("image", "text", "audio")
B = 9


def some_features(b: int = B, d: int = 5) -> list[Tensor]:
    return [*MAKERS["learnt"](b, b, d), MAKERS["random"](b, b, d)[0]]


def test_weighted_sum_over_pairs() -> None:
    w = (1.0, 0.5, 0.0)
    loss = mb.MultiModalLoss(PAIRS, weights=w)
    assert_equal(
        lambda i, t, a, s: loss({"image": i, "text": t, "audio": a}, s),
        lambda i, t, a, s: (
            w[0] * clip_of_logits(s * i @ t.T)
            + w[1] * clip_of_logits(s * a @ t.T)
            + w[2] * clip_of_logits(s * i @ a.T)
        ),
        *some_features(),
        10.0,
    )


@settings(deadline=None, max_examples=40)
@given(masks=st.lists(st.tuples(*[st.booleans()] * 3), min_size=1, max_size=12), data=st.data())
def test_missing_samples_do_not_count(masks: list[tuple[bool, ...]], data: Any) -> None:
    b = len(masks)
    torch.manual_seed(b)
    have = dict(zip(NAMES, torch.tensor(masks).T, strict=True))
    named = data.draw(st.sets(st.sampled_from(NAMES)))
    present = {name: have[name] for name in named}

    def truth(i: Tensor, t: Tensor, a: Tensor, s: Tensor) -> Tensor:
        features = {"image": i, "text": t, "audio": a}
        total = 0 * s
        for first, second in PAIRS:
            rows = [
                k for k in range(b) if all(n not in named or have[n][k] for n in (first, second))
            ]
            if rows:
                total = total + clip_of_logits(s * features[first][rows] @ features[second][rows].T)
        return total

    loss = mb.MultiModalLoss(PAIRS)
    assert_equal(
        lambda i, t, a, s: loss({"image": i, "text": t, "audio": a}, s, present=present),
        truth,
        *some_features(b),
        10.0,
    )


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
