"""Images with class labels: folders of a class each, or shards with class indices."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from megabatch.data.pairs import BadSample, decode_image
from megabatch.data.shards import TarSamples
from megabatch.data.sources import find_files
from megabatch.errors import UsageError
from megabatch.evaluation.samples import Sample

# What CLIP benchmark's exports have beside the shards or in the folder above.
CLASS_NAMES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"

_SPLITS = {"train", "training", "val", "valid", "validation", "test"}


class FolderLabels:
    """A folder of images a class, as torchvision's ImageFolder: `classes` are the folders' names.

    Raises:
        UsageError: no such folders, or a class without an image.
    """

    templates: Path | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            classes, place = find_classes(folder)
            if _SPLITS.issuperset(classes):
                raise UsageError(
                    f"{folder} holds {', '.join(classes)}, which look like splits and not "
                    f"like classes: give one of them, such as {folder / classes[0]}"
                )
            self._images = make_dataset(folder, place, IMG_EXTENSIONS)
        except OSError as error:
            raise UsageError(f"{folder}: {' '.join(str(error).split())}") from error
        self.classes: list[str] | None = classes
        self.n_classes = len(classes)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Sample[int]:
        path, label = self._images[index]
        key = Path(path).relative_to(self.folder).as_posix()
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise BadSample("unreadable image file", key) from error
        return Sample(decode_image(data, key), label, key)

    def labels(self) -> Tensor:
        """The class of every sample, int64 (n,), without reading an image."""
        return torch.tensor([label for _, label in self._images], dtype=torch.int64)


class ShardLabels(TarSamples):
    """WebDataset shards whose samples have an image and a class index, `cls`: 0, 1 ...

    `classes`: the indices' names, from `classnames.txt`; None where there is none. `templates`: the
    path of the prompt templates that came with the shards, if any.

    Raises:
        UsageError: files that cannot be read, or none with a sample that has a `cls`.
    """

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(paths)
        if not any(self.has(i, "cls") for i in range(len(self))):
            why = "; ".join(self.damage) or "no sample has a member .cls with a class index"
            raise UsageError(f"no labelled images in {', '.join(map(str, paths[:3]))}: {why}")
        names = beside(paths[0].parent, CLASS_NAMES)
        self.classes = read_lines(names) if names else None
        self.templates = beside(paths[0].parent, TEMPLATES)
        self.n_classes = len(self.classes) if self.classes else int(self.labels().max()) + 1

    def __getitem__(self, index: int) -> Sample[int]:
        label = self._label(index)
        if self.classes is not None and label >= len(self.classes):
            raise BadSample("class index beyond the class names", self.key(index))
        return Sample(self.image(index), label, self.key(index))

    def labels(self) -> Tensor:
        """The class of every sample, int64 (n,), -1 where it has none, without reading an image."""
        found = []
        for index in range(len(self)):
            try:
                found.append(self._label(index))
            except BadSample:
                found.append(-1)
        return torch.tensor(found, dtype=torch.int64)

    def _label(self, index: int) -> int:
        text = self.read(index, "cls")
        if not text.strip().isdigit():
            raise BadSample("class index is no number", self.key(index))
        return int(text)


class Labelled(Protocol):
    """Images with class labels.

    classes: the classes' names, None where they are numbers only; n_classes: how many there are;
    templates: a file of prompt templates that came with the images. Some have `damage` as `Samples`
    do.
    """

    classes: list[str] | None
    n_classes: int
    templates: Path | None

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample[int]: ...

    def labels(self) -> Tensor:
        """The class of every sample, int64 (n,), -1 where it has none, without reading an image."""
        ...


def open_labelled(spec: str) -> Labelled:
    """Open images with class labels.

    Args:
        spec: a folder with one folder a class; or .tar shards: a file, a pattern, a folder of them,
            or CLIP benchmark's folder, whose `test` folder then is meant.

    Raises:
        UsageError: there is nothing of the kind.
    """
    folder = Path(spec)
    if folder.is_dir() and not any(folder.glob("*.tar")):
        test = sorted(folder.glob("test/*.tar"))
        return ShardLabels(test) if test else FolderLabels(folder)
    paths = find_files(spec)
    if paths[0].suffix != ".tar":
        raise UsageError(f"{paths[0]}: expected shards (.tar) or a folder with a folder a class")
    return ShardLabels(paths)


def beside(folder: Path, name: str) -> Path | None:
    """A file in the folder, or else in the one above; None where neither has it."""
    for candidate in (folder / name, folder.resolve().parent / name):
        if candidate.is_file():
            return candidate
    return None


def read_lines(path: Path) -> list[str]:
    """A text file's lines that are not blank, without white space around them.

    Raises:
        UsageError: the file cannot be read, or has no line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    kept = [line.strip() for line in lines if line.strip()]
    if not kept:
        raise UsageError(f"{path} has no line")
    return kept
