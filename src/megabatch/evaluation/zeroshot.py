"""Zero-shot classification with prompt templates, after CLIP (Radford et al. 2021, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from megabatch.data import glyphs
from megabatch.evaluation.retrieval import chance_metrics, retrieval_metrics


@dataclass(frozen=True)
class Prompts:
    """Class names, one a class, and the templates that each is put into (at its `{}`)."""

    names: tuple[str, ...]
    templates: tuple[str, ...]


_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# In the words of Unicode's character names, which is all that a glyph model has read.
UNICODE_DIGITS = Prompts(
    _DIGITS,
    ("digit {}", "mathematical sans-serif digit {}", "mathematical monospace digit {}"),
)
# For models of natural captions: the templates that CLIP's authors used on MNIST and its kin.
CAPTIONED_DIGITS = Prompts(tuple("0123456789"), ('a photo of the number: "{}".',))


def class_features(encode_texts: Callable[[Iterable[str]], Tensor], prompts: Prompts) -> Tensor:
    """One feature a class (classes, d): the normalised mean over templates of normalised features.

    `encode_texts`: gives the features (n, d) of n texts.

    Raises:
        ValueError: no class, no template, or a template without `{}`.
    """
    if not prompts.names or not prompts.templates:
        raise ValueError(f"prompts need a class name and a template at least, got {prompts}")
    for template in prompts.templates:
        if "{}" not in template:
            raise ValueError(f"a template has {{}} where the class name goes, got {template!r}")
    texts = [t.replace("{}", name) for name in prompts.names for t in prompts.templates]
    features = F.normalize(encode_texts(texts), dim=-1)
    means = features.unflatten(0, (len(prompts.names), len(prompts.templates))).mean(1)
    return F.normalize(means, dim=-1)


def zero_shot_metrics(
    image_features: Tensor, labels: Tensor, classes: Tensor, *, ks: Sequence[int] = (1, 5)
) -> dict[str, dict[str, float]]:
    """Top-k accuracy of choosing the class with the largest inner product.

    Args:
        image_features: (n, d); labels: int64 (n,), index into `classes`; classes: (c, d).
        ks: the k of top-k. Ties count as a random choice, as in `retrieval_metrics`.

    Returns:
        `{"model": {"top1": ...}, "chance": {"top1": ...}}`, fractions.

    Raises:
        ValueError, TypeError: wrong shapes or dtypes, a label that is no class.
    """
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise ValueError(
            f"labels must lie in 0..{len(classes) - 1}, got {int(labels.min())}"
            f"..{int(labels.max())}"
        )
    class_ids = torch.arange(len(classes), device=labels.device)
    found = retrieval_metrics(image_features, classes, x_ids=labels, y_ids=class_ids, ks=ks)
    chance = chance_metrics(labels, class_ids, ks=ks)
    return {
        "model": {f"top{k}": found[f"x_to_y/recall@{k}"] for k in ks},
        "chance": {f"top{k}": chance[f"x_to_y/recall@{k}"] for k in ks},
    }


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
