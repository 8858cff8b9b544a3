"""Class names and prompt templates for zero-shot classification (CLIP, Radford et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megabatch.errors import UsageError, plural
from megabatch.evaluation.samples import Labelled, read_lines


@dataclass(frozen=True)
class Prompts:
    """The classes' names, and templates with `{}` where a name goes.

    source: a description of where both come from.
    """

    names: tuple[str, ...]
    templates: tuple[str, ...]
    source: str = ""

    def texts(self) -> list[str]:
        """The texts of all classes, one after the other: each name in each template."""
        return [one.replace("{}", name) for name in self.names for one in self.templates]

    def __str__(self) -> str:
        return f"{plural(len(self.templates), 'template')} {self.source}"


def class_features(encode_texts: Callable[[Iterable[str]], Any], prompts: Prompts) -> Tensor:
    """Features of classes (c, d): each the normalised mean of its texts' normalised features.

    `encode_texts` returns the features (n, d) of n texts.
    """
    features = F.normalize(encode_texts(prompts.texts()), dim=-1)
    return F.normalize(features.unflatten(0, (len(prompts.names), -1)).mean(1), dim=-1)


def read_prompts(class_names: str | None, templates: str | None, test: Labelled) -> Prompts:
    """The prompts for labelled images.

    Args:
        class_names: "imagenet", OpenCLIP's names of ImageNet's 1,000 classes; a text file with one
            name per line, in the order of the classes; None for the names of the images, with
            spaces for underscores.
        templates: "openai", the 80 that CLIP was evaluated with on ImageNet; "simple", the 7 of
            them that do nearly as well; a text file with one per line, `{}` or `{c}` for the name;
            None for those that came with the images, or else "openai".
        test: the images.

    Raises:
        UsageError: there is no such file, a class has no name, the number of names is wrong, or a
            template has no placeholder.
    """
    worded_by = templates or str(test.templates or "openai")
    source = f"from {worded_by}; class names: {class_names or 'those of the data'}"
    return Prompts(_names(class_names, test), _templates(worded_by), source)


def _templates(choice: str) -> tuple[str, ...]:
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


def _names(choice: str | None, test: Labelled) -> tuple[str, ...]:
    if choice is None:
        if test.classes is None:
            raise UsageError("the shards have no classnames.txt: give names by --class-names")
        names = [name.replace("_", " ").strip() or name for name in test.classes]
    elif choice == "imagenet":
        import open_clip

        names = open_clip.IMAGENET_CLASSNAMES
    elif not Path(choice).is_file():
        raise UsageError(f"--class-names {choice}: expected imagenet or a text file, a name a line")
    else:
        names = read_lines(Path(choice))
    if len(names) != test.n_classes:
        raise UsageError(
            f"--class-names {choice}: {len(names)} names, but the data have {test.n_classes} "
            "classes"
        )
    return tuple(names)
