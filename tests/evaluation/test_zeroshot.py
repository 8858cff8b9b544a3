from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.data.glyphs import GlyphSet
from megabatch.evaluation.zeroshot import (
    CAPTIONED_DIGITS,
    UNICODE_DIGITS,
    Prompts,
    class_features,
    handwritten_digits,
    zero_shot_metrics,
)


def test_class_features_are_normalised_means_of_normalised_template_features() -> None:
    asked: list[str] = []
    torch.manual_seed(0)
    raw = torch.randn(6, 5)

    def encode(texts: Iterable[str]) -> Tensor:
        asked.extend(texts)
        return raw

    got = class_features(encode, Prompts(("cat", "dog"), ("a {}", "{} {{}}", "two {}s")))
    assert asked == ["a cat", "cat {cat}", "two cats", "a dog", "dog {dog}", "two dogs"]
    unit = raw / raw.norm(dim=1, keepdim=True)
    means = torch.stack([unit[:3].mean(0), unit[3:].mean(0)])
    torch.testing.assert_close(got, means / means.norm(dim=1, keepdim=True))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (Prompts((), ("{}",)), "a class name and a template at least"),
        (Prompts(("a",), ()), "a class name and a template at least"),
        (Prompts(("a",), ("no place",)), "got 'no place'"),
    ],
)
def test_bad_prompts_are_named(prompts: Prompts, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        class_features(lambda texts: torch.ones(1, 1), prompts)


def test_accuracy_equals_counting_the_best_classes() -> None:
    torch.manual_seed(1)
    images, classes = torch.randn(300, 8), torch.randn(12, 8)
    labels = torch.randint(0, 12, (300,))
    got = zero_shot_metrics(images, labels, classes)
    best = (images @ classes.T).topk(5).indices
    right = best == labels[:, None]
    assert got["model"]["top1"] == pytest.approx(right[:, 0].float().mean().item())
    assert got["model"]["top5"] == pytest.approx(right.any(1).float().mean().item())
    assert got["chance"] == pytest.approx({"top1": 1 / 12, "top5": 5 / 12})


def test_equal_classes_score_chance() -> None:
    labels = torch.arange(10).repeat(3)
    got = zero_shot_metrics(torch.ones(30, 4), labels, torch.ones(10, 4))
    assert got["model"] == pytest.approx(got["chance"])


def test_a_label_that_is_no_class_is_refused() -> None:
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.1, got 0\.\.2"):
        zero_shot_metrics(torch.ones(3, 4), torch.arange(3), torch.ones(2, 4))


def test_handwritten_digits_are_set_like_the_glyphs(small_glyphs: GlyphSet) -> None:
    images, labels = handwritten_digits()
    assert len(images) == len(labels) == 1797
    assert labels.unique().tolist() == list(range(10))
    pixels = np.stack([np.asarray(image) for image in images])
    assert pixels.shape == (1797, *small_glyphs.images.shape[1:])
    digit = np.isin(small_glyphs.characters, [ord(c) for c in "0123456789"])
    printed = small_glyphs.images[digit]

    def rows_of_ink(of: np.ndarray) -> tuple[float, float]:
        inked = of.mean(0).max(1) > 32
        return inked.argmax(), len(inked) - inked[::-1].argmax()

    # Same polarity, same place: the mean digit's ink begins and ends within 2 pixels of print's.
    assert rows_of_ink(pixels) == pytest.approx(rows_of_ink(printed), abs=2)
    assert pixels[:, 0].max() == 0
    assert pixels.mean() == pytest.approx(printed.mean(), rel=0.5)


def test_digit_prompts_are_names_that_the_glyphs_have(small_glyphs: GlyphSet) -> None:
    for name in UNICODE_DIGITS.names:
        assert UNICODE_DIGITS.templates[0].replace("{}", name) in small_glyphs.names
    assert len(CAPTIONED_DIGITS.names) == len(UNICODE_DIGITS.names) == 10
    assert F.normalize(class_features(lambda t: torch.eye(10), CAPTIONED_DIGITS)).shape == (10, 10)
