from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.data.glyphs import GlyphSet
from megabatch.evaluation.prompts import Prompts
from megabatch.evaluation.zeroshot import (
    CAPTIONED_DIGITS,
    UNICODE_DIGITS,
    class_features,
    handwritten_digits,
)


def test_class_features_are_normalised_means_over_names_and_templates() -> None:
    asked: list[str] = []
    torch.manual_seed(0)
    raw = torch.randn(9, 5)

    def encode(texts: Iterable[str]) -> Tensor:
        asked.extend(texts)
        return raw

    prompts = Prompts((("cat",), ("dog", "hound")), ("a {}", "{} {{}}", "two {}s"))
    got = class_features(encode, prompts)
    dogs = ["a dog", "dog {dog}", "two dogs", "a hound", "hound {hound}", "two hounds"]
    assert asked == ["a cat", "cat {cat}", "two cats", *dogs]
    unit = raw / raw.norm(dim=1, keepdim=True)
    means = torch.stack([unit[:3].mean(0), unit[3:].mean(0)])
    torch.testing.assert_close(got, means / means.norm(dim=1, keepdim=True))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (Prompts((), ("{}",)), "a name for each class and a template"),
        (Prompts((("a",), ()), ("{}",)), "a name for each class and a template"),
        (Prompts((("a",),), ()), "a name for each class and a template"),
        (Prompts((("a",),), ("no place",)), "got 'no place'"),
    ],
)
def test_bad_prompts_are_named(prompts: Prompts, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        class_features(lambda texts: torch.ones(1, 1), prompts)


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
    for (name,) in UNICODE_DIGITS.names:
        assert UNICODE_DIGITS.templates[0].replace("{}", name) in small_glyphs.names
    assert len(CAPTIONED_DIGITS.names) == len(UNICODE_DIGITS.names) == 10
    assert F.normalize(class_features(lambda t: torch.eye(10), CAPTIONED_DIGITS)).shape == (10, 10)
