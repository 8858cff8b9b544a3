from __future__ import annotations

import numpy as np
import pytest

from megabatch.data.glyphs import GlyphSet
from megabatch.evaluation.builtin import DIGIT_PROMPTS, handwritten_digits


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

    # Same polarity, same position: the mean digit begins and ends within 2 pixels of a printed one.
    assert rows_of_ink(pixels) == pytest.approx(rows_of_ink(printed), abs=2)
    assert pixels[:, 0].max() == 0
    assert pixels.mean() == pytest.approx(printed.mean(), rel=0.5)


def test_digit_prompts_are_names_that_the_glyphs_have(small_glyphs: GlyphSet) -> None:
    for name in DIGIT_PROMPTS.names:
        assert DIGIT_PROMPTS.templates[0].replace("{}", name) in small_glyphs.names
