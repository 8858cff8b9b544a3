"""Samples to evaluate on, by index, and labelled images: folders of a class each, or shards."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from torchvision.datasets import ImageFolder

from megabatch.data.images import ImageFiles, decode_image
from megabatch.data.pairs import BadSample
from megabatch.data.shards import TarSamples
from megabatch.data.sources import find_files
from megabatch.errors import UsageError, one_line, printable

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Captions = list[str]

# Files in CLIP benchmark's exports, next to the shards or in the folder above.
CLASS_NAMES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"

_SPLITS = {"train", "training", "val", "valid", "validation", "test"}


@dataclass(frozen=True)
class Sample(Generic[T]):
    """An image (the first text, in a pair of texts) with its class or its captions as `target`.

    `key` names the sample in messages.
    """

    image: Any
    target: T
    key: str


class Samples(Protocol[T_co]):
    """Samples by index, as `megabatch.data.PairDataset` has pairs.

    A source may also have `damage: list[str]`, a line for each part of its files that cannot be
    read, and `notes: list[str]`, other remarks that a user should see before the data are used.
    """

    def __len__(self) -> int:
        """Number of samples, bad ones included."""
        ...

    def __getitem__(self, index: int, /) -> Sample[Any]:
        """Sample `index`; raises `megabatch.data.BadSample` if it cannot be used."""
        ...


def first_of(samples: Samples[Any]) -> str:
    """The kind of the samples' first elements, "image" or "text"."""
    return str(getattr(samples, "first", "image"))


class Labelled(Samples[int], Protocol):
    """Images with class labels.

    classes: the classes' names, None if they only have numbers; n_classes: how many there are;
    templates: a file of prompt templates that came with the images.
    """

    classes: list[str] | None
    n_classes: int
    templates: Path | None


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


class FolderLabels:
    """One folder of images per class, as in torchvision's ImageFolder: `classes` names the folders.

    Raises:
        UsageError: there are no such folders, or a class has no image.
    """

    templates: Path | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            found = ImageFolder(folder)
        except OSError as error:
            raise UsageError(f"{folder}: {printable(one_line(error))}") from error
        if _SPLITS.issuperset(found.classes):
            raise UsageError(
                f"{folder} holds {', '.join(found.classes)}, which look like splits and not "
                f"like classes: give one of them, such as {folder / found.classes[0]}"
            )
        if odd := [printable(name) for name in found.classes if printable(name) != name]:
            raise UsageError(f"{folder}: the name of folder '{odd[0]}': expected text in UTF-8")
        self._images = found.samples
        self.classes: list[str] | None = found.classes
        self.n_classes = len(found.classes)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Sample[int]:
        path, label = self._images[index]
        name = Path(path).relative_to(self.folder).as_posix()
        key = printable(name)
        data = ImageFiles((self.folder,)).read(name, key)
        return Sample(decode_image(data, key), label, key)


class ShardLabels(TarSamples):
    """WebDataset shards whose samples have an image and a class index, `cls`: 0, 1 ...

    `classes`: the names in `classnames.txt`; None if there is no such file. `templates`: the path
    of the prompt templates that came with the shards, if any.

    Raises:
        UsageError: the files cannot be read, or no sample has a `cls`.
    """

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(paths)
        if not any(self.has(i, "cls") for i in range(len(self))):
            why = "; ".join(self.damage) or "no sample has a member .cls with a class index"
            raise UsageError(f"no labelled images in {', '.join(map(str, paths[:3]))}: {why}")
        names = _beside(paths[0].parent, CLASS_NAMES)
        self.classes = read_lines(names) if names else None
        self.templates = _beside(paths[0].parent, TEMPLATES)
        self.n_classes = len(self.classes) if self.classes else self._count()

    def __getitem__(self, index: int) -> Sample[int]:
        label = self._label(index)
        if self.classes is not None and label >= len(self.classes):
            raise BadSample("class index beyond the class names", self.key(index))
        return Sample(self.image(index), label, self.key(index))

    def _label(self, index: int) -> int:
        text = self.read(index, "cls")
        if not text.strip().isdigit():
            raise BadSample("class index is not a number", self.key(index))
        return int(text)

    def _count(self) -> int:
        """The number of classes: one more than the highest index."""
        labels = [0]
        for index in range(len(self)):
            with contextlib.suppress(BadSample):
                labels.append(1 + self._label(index))
        return max(labels)


def _beside(folder: Path, name: str) -> Path | None:
    """The path of a file in the folder or in its parent; None if neither has it."""
    for candidate in (folder / name, folder.resolve().parent / name):
        if candidate.is_file():
            return candidate
    return None


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
