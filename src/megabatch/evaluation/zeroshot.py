"""Class names and prompt templates for zero-shot classification (CLIP, Radford et al. 2021)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from megabatch.data import glyphs
from megabatch.errors import UsageError
from megabatch.evaluation.samples import Sample, read_lines


@dataclass(frozen=True)
class Prompts:
    """The classes' names, and templates with `{}` where a name goes.

    source: a description of where both come from.
    """

    names: tuple[str, ...]
    templates: tuple[str, ...]
    source: str = ""

    def texts(self) -> list[list[str]]:
        """The texts of each class: its name in each template."""
        return [[one.replace("{}", name) for one in self.templates] for name in self.names]

    def shown(self) -> str:
        """The first templates, how many more there are, and their origin."""
        first = ", ".join(f"“{template}”" for template in self.templates[:3])
        more = f" and {len(self.templates) - 3} more" if len(self.templates) > 3 else ""
        return f"{first}{more} ({self.source})"

    def distinct_names(self, classes: Sequence[str] | None) -> list[str]:
        """Each class's name, with its folder's if two share it, as in ImageNet."""
        folders = classes or [str(i) for i in range(len(self.names))]
        again = Counter(self.names)
        return [
            name if again[name] == 1 else f"{name} ({i if folder == name else folder})"
            for i, (name, folder) in enumerate(zip(self.names, folders, strict=True))
        ]


def class_features(encode_texts: Callable[[Iterable[str]], Tensor], prompts: Prompts) -> Tensor:
    """Features of classes (c, d): each the normalised mean of its texts' normalised features.

    `encode_texts` returns the features (n, d) of n texts.
    """
    texts = [text for of_class in prompts.texts() for text in of_class]
    features = F.normalize(encode_texts(texts), dim=-1)
    return F.normalize(features.unflatten(0, (len(prompts.names), -1)).mean(1), dim=-1)


def read_templates(choice: str) -> tuple[str, ...]:
    """Read templates with `{}` where the class name goes.

    Args:
        choice: "openai", the 80 that CLIP was evaluated with on ImageNet; "simple", the 7 of them
            that do nearly as well; or a text file with one per line, `{}` or `{c}` for the name.

    Raises:
        UsageError: there is no such file, or a line has no placeholder.
    """
    if choice in ("openai", "simple"):
        import open_clip

        known = getattr(open_clip, f"{choice.upper()}_IMAGENET_TEMPLATES")
        return tuple(template("{}") for template in known)
    if not Path(choice).is_file():
        raise UsageError(f"--templates {choice}: expected openai, simple or a file")
    lines = tuple(line.replace("{c}", "{}") for line in read_lines(Path(choice)))
    for line in lines:
        if "{}" not in line:
            raise UsageError(f"--templates {choice}: no {{}} for the class name in {line!r}")
    return lines


def read_names(
    choice: str | None, classes: Sequence[str] | None, n_classes: int
) -> tuple[str, ...]:
    """Read the name of each class.

    Args:
        choice: "imagenet", OpenCLIP's names of ImageNet's 1,000 classes; a text file with one name
            per line, in the order of the classes; None for `classes` with spaces for underscores.
        classes: the folders' names, or names that came with the data; None if classes only have
            numbers.
        n_classes: the number of classes.

    Raises:
        UsageError: there is no such file, a class has no name, or the number of names is wrong.
    """
    if choice is None:
        if classes is None:
            raise UsageError("the shards have no classnames.txt: give names by --class-names")
        names = [name.replace("_", " ").strip() or name for name in classes]
    elif choice == "imagenet":
        import open_clip

        names = open_clip.IMAGENET_CLASSNAMES
    elif Path(choice).suffix == ".json" or not Path(choice).is_file():
        raise UsageError(f"--class-names {choice}: expected imagenet or a text file, a name a line")
    else:
        names = read_lines(Path(choice))
    if len(names) != n_classes:
        raise UsageError(
            f"--class-names {choice}: {len(names)} names, but the data have {n_classes} classes"
        )
    return tuple(names)


_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# In the words of Unicode's character names, the only texts that a glyph model was trained on.
UNICODE_DIGITS = Prompts(
    _DIGITS,
    ("digit {}", "mathematical sans-serif digit {}", "mathematical monospace digit {}"),
    "in the words of Unicode's names, since the model was trained on glyphs",
)
# For models of natural captions: the template that CLIP's authors used on MNIST.
CAPTIONED_DIGITS = Prompts(
    tuple("0123456789"),
    ('a photo of the number: "{}".',),
    "CLIP's for digits, since the model was not trained on glyphs",
)


class DigitLabels:
    """Scikit-learn's 1,797 handwritten digits as labelled images; see `handwritten_digits`."""

    templates: Path | None = None
    n_classes = len(_DIGITS)

    def __init__(self) -> None:
        self.images, self.labels = handwritten_digits()
        self.classes: list[str] | None = list(_DIGITS)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample[int]:
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
