"""Samples to evaluate on, by index, and labelled images: folders of a class each, or shards."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchvision.datasets import ImageFolder

from megabatch.data.images import ImageFiles
from megabatch.data.pairs import BadSample, EncodedImage
from megabatch.data.shards import TarSamples
from megabatch.data.sources import find_files
from megabatch.errors import UsageError, one_line, printable

# Files in CLIP benchmark's exports, next to the shards or in the folder above.
CLASS_NAMES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"


@dataclass(frozen=True)
class Sample:
    """An image (the first text, in a pair of texts) with its class or its captions as `target`.

    The image may be an EncodedImage. `key` names the sample in messages.
    """

    image: Any
    target: Any
    key: str


class Samples:
    """Samples by index, bad ones included; `samples[i]` raises BadSample for one of these.

    first: the kind of the samples' first elements, "image" or "text"; damage: a line for each part
    of the files that cannot be read.
    """

    first: str = "image"
    damage: Sequence[str] = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Sample:
        raise NotImplementedError


class Labelled(Samples):
    """Images with class labels.

    classes: the classes' names, None if they only have numbers; n_classes: how many there are;
    templates: a file of prompt templates that came with the images.
    """

    classes: list[str] | None = None
    n_classes: int
    templates: Path | None = None


def open_labelled(spec: str) -> Labelled:
    """Open images with class labels.

    Args:
        spec: a folder with one folder per class; or .tar shards: a file, a pattern, a folder of
            them, or CLIP benchmark's folder, which stands for its `test` folder.

    Raises:
        UsageError: there is nothing of the kind.
    """
    folder = Path(spec)
    if folder.is_dir() and not any(folder.glob("*.tar")):
        test = sorted(folder.glob("test/*.tar"))
        return ShardLabels(test) if test else FolderLabels(folder)
    paths = find_files(spec)
    if paths[0].suffix != ".tar":
        raise UsageError(
            f"{paths[0]}: expected shards (.tar) or a folder with a folder for each class"
        )
    return ShardLabels(paths)


class FolderLabels(Labelled):
    """One folder of images per class, as in torchvision's ImageFolder: `classes` names the folders.

    Raises:
        UsageError: there are no such folders, or a class has no image.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder, ImageFiles((Path(),))
        try:
            found = ImageFolder(folder)
        except OSError as error:
            raise UsageError(f"{folder}: {printable(one_line(error))}") from error
        self._images = found.samples
        self.classes = [printable(name) for name in found.classes]
        self.n_classes = len(found.classes)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Sample:
        path, label = self._images[index]
        key = printable(Path(path).relative_to(self.folder).as_posix())
        return Sample(EncodedImage(self._files.read(path, key), key).decode(), label, key)


class ShardLabels(Labelled):
    """WebDataset shards whose samples have an image and a class index, `cls`: 0, 1 ...

    `classes` are the names in `classnames.txt`, None if there is no such file.

    Raises:
        UsageError: the files cannot be read, or no sample has a `cls`.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._tar = TarSamples(paths)
        self.damage = self._tar.damage
        labels = []
        for index in range(len(self)):
            with contextlib.suppress(BadSample):
                labels.append(self._label(index))
        if not labels:
            why = "; ".join(self.damage) or "no sample has a member .cls with a class index"
            raise UsageError(f"no labelled images in {', '.join(map(str, paths[:3]))}: {why}")
        names = _beside(paths[0].parent, CLASS_NAMES)
        self.classes = read_lines(names) if names else None
        self.templates = _beside(paths[0].parent, TEMPLATES)
        self.n_classes = len(self.classes) if self.classes else 1 + max(labels)

    def __len__(self) -> int:
        return len(self._tar)

    def __getitem__(self, index: int) -> Sample:
        label, key = self._label(index), self._tar.key(index)
        if label >= self.n_classes:
            raise BadSample("class index beyond the class names", key)
        return Sample(self._tar.image(index), label, key)

    def _label(self, index: int) -> int:
        text = self._tar.read(index, "cls")
        if not text.strip().isdigit():
            raise BadSample("class index is not a number", self._tar.key(index))
        return int(text)


def _beside(folder: Path, name: str) -> Path | None:
    """The path of a file in the folder or in its parent; None if neither has it."""
    places = (folder / name, folder.resolve().parent / name)
    return next((path for path in places if path.is_file()), None)


def read_lines(path: Path) -> list[str]:
    """Return the non-blank lines of a text file, stripped.

    Raises:
        UsageError: the file cannot be read, or has no such line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    kept = [line.strip() for line in lines if line.strip()]
    if not kept:
        raise UsageError(f"{path} has no line")
    return kept
