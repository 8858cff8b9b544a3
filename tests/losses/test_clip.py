from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megabatch as mb
from tests.losses.reference import assert_equal, clip_of_logits, leaves
from tests.similarity.features import MAKERS

IDS = torch.tensor([0, 1, 1, 2, -1, -1, 0, 0, 3, 2**62 - 1])


@pytest.mark.parametrize("scale", [0.01, 14.3, 200.0])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("b", [1, 2, 65])
def test_equals_two_cross_entropies(maker: str, scale: float, b: int) -> None:
    x, y = MAKERS[maker](b, b, 16)
    assert_equal(mb.ClipLoss(), lambda x, y, s: clip_of_logits(s * x @ y.T), x, y, scale)


@pytest.mark.parametrize("scale", [0.01, 14.3, 100.0])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("duplicates", "smoothing"), [("positive", 0.0), ("positive", 0.1), ("ignored", 0.0)]
)
def test_shared_captions(
    maker: str, scale: float, duplicates: Any, smoothing: float, weighted: bool
) -> None:
    x, y = MAKERS[maker](10, 10, 6)
    weights = torch.rand(10, dtype=torch.float64) if weighted else None
    loss = mb.ClipLoss(label_smoothing=smoothing, duplicates=duplicates)
    assert_equal(
        lambda x, y, s: loss(x, y, s, ids=IDS, weights=weights),
        lambda x, y, s: clip_of_logits(s * x @ y.T, IDS, duplicates, smoothing, weights),
        x,
        y,
        scale,
    )


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_label_smoothing_and_weights(maker: str, weighted: bool) -> None:
    x, y = MAKERS[maker](33, 33, 6)
    weights = torch.rand(33, dtype=torch.float64) if weighted else None
    loss = mb.ClipLoss(label_smoothing=0.2)
    assert_equal(
        lambda x, y, s: loss(x, y, s, weights=weights),
        lambda x, y, s: clip_of_logits(s * x @ y.T, None, "positive", 0.2, weights),
        x,
        y,
        14.3,
    )


@settings(deadline=None, max_examples=40)
@given(
    ids=st.lists(st.integers(-2, 6), min_size=1, max_size=24),
    scale=st.floats(0.01, 100),
    mode=st.sampled_from(["positive", "ignored"]),
    maker=st.sampled_from(sorted(MAKERS)),
)
def test_any_ids(ids: list[int], scale: float, mode: Any, maker: str) -> None:
    b, pairs = len(ids), torch.tensor(ids)
    torch.manual_seed(b)
    x, y = MAKERS[maker](b, b, 5)
    assert_equal(
        lambda x, y, s: mb.ClipLoss(duplicates=mode)(x, y, s, ids=pairs),
        lambda x, y, s: clip_of_logits(s * x @ y.T, pairs, mode),
        x,
        y,
        scale,
    )


def test_distinct_ids_are_no_ids() -> None:
    x, y = MAKERS["clustered"](20, 20, 6)
    plain = mb.ClipLoss()(x, y, 10.0)
    for ids in (torch.full((20,), -1), torch.arange(20)):
        for mode in ("positive", "ignored"):
            other = mb.ClipLoss(duplicates=mode)(x, y, 10.0, ids=ids)
            torch.testing.assert_close(other, plain, rtol=1e-14, atol=0)


@pytest.mark.parametrize("b", [5, 0])
def test_weights_of_zero_give_zero(b: int) -> None:
    x, y = leaves(torch.randn(b, 3), torch.randn(b, 3))
    loss = mb.ClipLoss()(x, y, 10.0, weights=torch.zeros(b))
    loss.backward()
    assert loss == 0
    assert not x.grad.any()
    assert x.grad.shape == x.shape


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


@pytest.mark.parametrize("options", [{}, {"ids": IDS[:5]}, {"weights": torch.ones(5)}])
def test_a_nan_feature_gives_a_nan_loss(options: dict[str, Any]) -> None:
    x = torch.randn(5, 3)
    x[2, 1] = torch.nan
    assert mb.ClipLoss()(x, torch.randn(5, 3), 1.0, **options).isnan()
    assert mb.ClipLoss(duplicates="ignored")(x, torch.randn(5, 3), 1.0, **options).isnan()
    assert mb.ClipLoss(label_smoothing=0.1)(x, torch.randn(5, 3), 1.0, **options).isnan()


@pytest.mark.parametrize(
    ("x", "y", "error", "words"),
    [
        (torch.randn(5, 3), torch.randn(4, 3), ValueError, ("text_features", "5 rows", "4")),
        (torch.randn(5, 3), torch.randn(5, 2), ValueError, ("text_features", "width 3", "2")),
        (torch.randn(5), torch.randn(5), ValueError, ("image_features", "(5,)")),
        (torch.ones(5, 3).long(), torch.randn(5, 3), TypeError, ("image_features", "int64")),
        (torch.randn(0, 3), torch.randn(0, 3), ValueError, ("image_features", "one row", "0")),
        (torch.randn(5, 3), torch.randn(5, 3).half(), TypeError, ("text_features", "float16")),
    ],
)
def test_bad_features(x: Any, y: Any, error: type, words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        mb.ClipLoss()(x, y, 1.0)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"logit_scale": "warm"}, TypeError, ("logit_scale", "str")),
        ({"logit_scale": torch.ones(2)}, ValueError, ("logit_scale", "(2,)")),
        ({"logit_bias": torch.ones(2)}, ValueError, ("logit_bias", "(2,)")),
        ({"ids": torch.arange(4)}, ValueError, ("ids", "(5,)", "(4,)")),
        ({"ids": torch.arange(5.0)}, TypeError, ("ids", "int64", "float32")),
        ({"ids": [1, 2, 3, 4, 5]}, TypeError, ("ids", "list")),
        ({"ids": torch.arange(5) + 2**62}, ValueError, ("ids", "2**62", str(2**62 + 4))),
        ({"weights": torch.ones(4)}, ValueError, ("weights", "(5,)", "(4,)")),
        ({"weights": torch.arange(5)}, TypeError, ("weights", "int64")),
        ({"weights": torch.ones(5, 1)}, ValueError, ("weights", "(5, 1)")),
        ({"weights": torch.ones(5, requires_grad=True)}, ValueError, ("weights", "gradient")),
    ],
)
def test_bad_options(options: dict[str, Any], error: type, words: tuple[str, ...]) -> None:
    arguments = {"logit_scale": 1.0} | options
    with pytest.raises(error) as caught:
        mb.ClipLoss()(torch.randn(5, 3), torch.randn(5, 3), **arguments)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"label_smoothing": 1.0}, ValueError, ("label_smoothing", "1.0")),
        ({"label_smoothing": -0.1}, ValueError, ("label_smoothing", "-0.1")),
        ({"label_smoothing": "0.1"}, TypeError, ("label_smoothing", "str")),
        ({"label_smoothing": float("nan")}, ValueError, ("label_smoothing", "nan")),
        ({"duplicates": "dropped"}, ValueError, ("duplicates", "'dropped'", "ignored")),
        (
            {"duplicates": "ignored", "label_smoothing": 0.1},
            ValueError,
            ("label_smoothing", "ignored", "0.1"),
        ),
    ],
)
def test_bad_constructions(options: Any, error: type, words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        mb.ClipLoss(**options)
    assert all(word in str(caught.value) for word in words)


def test_bad_group() -> None:
    with pytest.raises(TypeError, match="group"):
        mb.ClipLoss(group="world")(torch.randn(5, 3), torch.randn(5, 3), 1.0)
