"""Zero-shot classification with prompt templates, after CLIP (Radford et al. 2021, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from megabatch.data import glyphs
from megabatch.evaluation.prompts import Prompts
from megabatch.evaluation.samples import Sample

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# In the words of Unicode's character names, which is all that a glyph model has read.
UNICODE_DIGITS = Prompts(
    tuple((name,) for name in _DIGITS),
    ("digit {}", "mathematical sans-serif digit {}", "mathematical monospace digit {}"),
    "in the words of Unicode's names, since the model was trained on glyphs",
)
# For models of natural captions: the templates that CLIP's authors used on MNIST and its kin.
CAPTIONED_DIGITS = Prompts(
    tuple((digit,) for digit in "0123456789"),
    ('a photo of the number: "{}".',),
    "CLIP's for digits, since the model was not trained on glyphs",
)


class DigitLabels:
    """Scikit-learn's 1,797 handwritten digits as labelled images; see `handwritten_digits`."""

    templates: Path | None = None

    def __init__(self) -> None:
        self.images, self._labels = handwritten_digits()
        self.classes: list[str] | None = list(_DIGITS)
        self.n_classes = len(_DIGITS)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample[int]:
        return Sample(self.images[index], int(self._labels[index]), f"digit {index}")

    def labels(self) -> Tensor:
        """The digit of every image, int64 (1797,)."""
        return self._labels


def class_features(encode_texts: Callable[[Iterable[str]], Tensor], prompts: Prompts) -> Tensor:
    """One feature a class (c, d): the normalised mean of the normalised features of its texts.

    `encode_texts`: gives the features (n, d) of n texts.

    Raises:
        ValueError: no class, a class without a name, no template, or a template without `{}`.
    """
    if not prompts.names or not prompts.templates or not all(prompts.names):
        raise ValueError(f"prompts need a name for each class and a template, got {prompts}")
    for template in prompts.templates:
        if "{}" not in template:
            raise ValueError(f"a template has {{}} where the class name goes, got {template!r}")
    texts = prompts.texts()
    features = F.normalize(encode_texts([text for of_class in texts for text in of_class]), dim=-1)
    means = [part.mean(0) for part in features.split([len(of_class) for of_class in texts])]
    return F.normalize(torch.stack(means), dim=-1)


def handwritten_digits() -> tuple[list[Image.Image], Tensor]:
    """Scikit-learn's 1,797 handwritten digits, set like a glyph, and their labels int64 (1797,).

    The originals are 8×8 with ink from 0 to 16. Each is enlarged to the height of a printed digit
    and put on the glyph images' baseline, in white on black as they are.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    height = round(0.75 * glyphs.EM)  # DejaVu's digits are 0.73 em high
    corner = ((glyphs.SIZE - height) // 2, glyphs.BASELINE - height)
    images = []
    for ink in digits.images:
        small = Image.fromarray((ink * (255 / 16)).round().astype(np.uint8))
        image = Image.new("L", (glyphs.SIZE, glyphs.SIZE))
        image.paste(small.resize((height, height), Image.Resampling.BICUBIC), corner)
        images.append(image)
    return images, torch.from_numpy(digits.target.astype(np.int64))
