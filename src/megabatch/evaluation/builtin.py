"""The built-in tasks, for models of the glyphs: held-out faces and characters, and digits."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from megabatch.data import glyphs
from megabatch.data.glyphs import GlyphSet
from megabatch.evaluation.captions import CaptionedPairs
from megabatch.evaluation.samples import Labelled, Sample
from megabatch.evaluation.tasks import ClassTask, RetrievalTask
from megabatch.evaluation.zeroshot import Prompts

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# In the words of Unicode's character names, the only texts that a glyph model was trained on.
DIGIT_PROMPTS = Prompts(
    _DIGITS,
    ("digit {}", "mathematical sans-serif digit {}", "mathematical monospace digit {}"),
    "in the words of Unicode's names",
)


def builtin_tasks(glyph_set: GlyphSet) -> list[RetrievalTask | ClassTask]:
    """Held-out faces among their own names, held-out characters among all names, and digits."""
    faces, characters = glyph_set.split("faces"), glyph_set.split("characters")
    face_names = " and ".join(sorted({glyph_set.face_names[f] for f in faces.faces}))
    return [
        RetrievalTask(
            "faces",
            "held-out faces",
            f"Every image of {face_names}, two faces that training never saw, among all names of "
            "these images.",
            CaptionedPairs(faces),
        ),
        RetrievalTask(
            "characters",
            "held-out characters",
            "Images of characters whose names training never saw, among the names of all "
            "characters.",
            CaptionedPairs(characters),
            glyph_set.names,
        ),
        ClassTask(
            "digits",
            "handwritten digits",
            "Scikit-learn's 8×8 images, enlarged.",
            DigitLabels(),
            DIGIT_PROMPTS,
        ),
    ]


class DigitLabels(Labelled):
    """Scikit-learn's 1,797 handwritten digits as labelled images; see `handwritten_digits`."""

    n_classes = len(_DIGITS)

    def __init__(self) -> None:
        self.images, self.labels = handwritten_digits()
        self.classes = list(_DIGITS)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.images[index], int(self.labels[index]), f"digit {index}")


def handwritten_digits() -> tuple[list[Image.Image], Tensor]:
    """Scikit-learn's 1,797 handwritten digits, laid out as glyphs, and labels int64 (1797,).

    The originals are 8×8 with intensities from 0 to 16. Each is enlarged to the height of a printed
    digit and placed on the baseline of the glyph images, white on black like them.
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
