"""Images that tables or JSON files of COCO's and Karpathy's list, with all captions of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from megabatch.data.image_files import ImageFiles
from megabatch.data.pairs import BadSample, decode_image
from megabatch.data.tables import TablePairs, Wanted, no_rows
from megabatch.errors import UsageError, naming, one_line, plural
from megabatch.evaluation.caption_texts import clean_captions, some_are_empty
from megabatch.evaluation.samples import Captions, Sample


@dataclass(frozen=True)
class ListedImage:
    """An image with all captions that a table or JSON file has for it.

    image: a path, or the cell of a table that has a file's bytes; files: reads it.
    """

    image: Any
    captions: list[Any]
    key: str
    files: ImageFiles


@dataclass(frozen=True)
class ListedImages:
    """Images named by tables or a JSON file.

    damage: a line for each part of the list that cannot be used; notes: other remarks on it.
    """

    images: Sequence[ListedImage]
    damage: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample[Captions]:
        listed = self.images[index]
        captions = clean_captions(listed.captions, listed.key)
        image = listed.image.read() if isinstance(listed.image, _Cell) else listed.image
        data = listed.files.read(image, listed.key)
        return Sample(decode_image(data, listed.key), captions, listed.key)


@dataclass(frozen=True, eq=False)
class _Cell:
    """An image in a table, read on access: an Arrow file may be larger than memory."""

    table: TablePairs
    row: int

    def read(self) -> Any:
        """Return the bytes, or the struct that holds them."""
        return self.table.first_of(self.row)


# Tables.


def open_tables(
    paths: list[Path],
    image_folder: Path | None,
    image: str | None,
    caption: str | None,
    separator: str | None,
) -> ListedImages:
    """Open tables with a row for each caption, or with a list of captions in each row.

    Args:
        paths: .csv, .tsv, .parquet, .jsonl, .jsonl.gz and .arrow files.
        image_folder: as for `megabatch.evaluation.captions.open_captioned`.
        image, caption, separator: as for `megabatch.data.TablePairs`.

    Raises:
        UsageError: as for `megabatch.data.TablePairs`.
    """
    wanted = Wanted(image, None, caption, separator, lists=True)
    found: dict[Any, ListedImage] = {}
    damage: list[str] = []
    notes: list[str] = []
    for path in paths:
        table = TablePairs(path, wanted, ImageFiles((image_folder,)) if image_folder else None)
        if table.first == "text":
            raise UsageError(f"{path} has pairs of texts; expected images (--csv-img-key)")
        damage += table.damage + _join_rows(table, found)
        notes += table.notes
    images = list(found.values())
    if not images:
        raise no_rows(paths, damage)
    if short := [listed for listed in images if some_are_empty(listed.captions)]:
        damage.append(
            f"{', '.join(map(str, paths[:3]))}: of {plural(len(short), 'image')} with several "
            f"captions one or more are empty and left out, the first is {short[0].key}"
        )
    return ListedImages(images, damage, notes)


def _join_rows(table: TablePairs, found: dict[Any, ListedImage]) -> list[str]:
    """Add a table's images, with the captions of all their rows, to `found`; returns the damage.

    `found`: the images of the tables so far, in order of first use. The same name is the same image
    if it is searched for in the same folders.
    """
    bad: list[BadSample] = []
    for row in range(len(table)):
        key = table.key(row)
        try:
            image = _path_or_bytes(table.first_of(row))
            value = table.caption_of(row)
        except BadSample as sample:
            bad.append(sample)
            continue
        if isinstance(image, str) and image:
            same: Any = (table.files, str(Path(image)))
        elif image:
            same = sha256(image).digest()
        else:  # stays a sample of its own, to be counted as one that is missing
            same = (table.path, row)
        own = _Cell(table, row) if isinstance(image, bytes) else image
        listed = found.setdefault(same, ListedImage(own, [], key, table.files))
        listed.captions.extend(value if isinstance(value, list) else [value])
    if not bad:
        return []
    return [
        f"{table.path}: {plural(len(bad), 'row')} left out, the first is {bad[0].key}: "
        f"{bad[0].reason}"
    ]


def _path_or_bytes(image: Any) -> Any:
    if isinstance(image, dict):  # Hugging Face's struct: the bytes, or else the path
        return image.get("bytes") or image.get("path")
    return image


# JSON.


def open_json(path: Path, image_folder: Path | None, split: str | None) -> ListedImages:
    """Open COCO's or Karpathy's list of images with their captions.

    Args:
        path: the .json file.
        image_folder, split: as for `megabatch.evaluation.captions.open_captioned`.

    Raises:
        UsageError: the file cannot be read, is neither of them, lacks the split or any caption.
    """
    files = ImageFiles((image_folder,)) if image_folder else ImageFiles.beside(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
        images = document["images"]
        if "annotations" in document:
            if split is not None:
                raise UsageError(f"--split {split!r}: COCO's JSON is one split, not {path}")
            with naming(str(path)):
                listed = _coco(images, document["annotations"], files)
        else:
            listed = _karpathy(images, split or "test", files)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {one_line(error)}") from error
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: expected COCO's captions (images with id and file_name, annotations with "
            f"image_id and caption) or Karpathy's (images with sentences); wrong at {error}"
        ) from error
    if not listed:
        raise UsageError(f"{path} has no image with a caption")
    notes = files.look(len(listed), lambda i: listed[i].image, lambda i: listed[i].key, path)
    return ListedImages(listed, notes=notes)


def _coco(
    images: list[dict[str, Any]], annotations: list[dict[str, Any]], files: ImageFiles
) -> list[ListedImage]:
    by_id = {i["id"]: ListedImage(i["file_name"], [], i["file_name"], files) for i in images}
    if len(by_id) < len(images):
        raise UsageError(f"of {len(images)} images some have the same id")
    for annotation in annotations:
        image_id = annotation["image_id"]
        if image_id not in by_id:
            raise UsageError(f"a caption is of image_id {image_id}, which no image has")
        by_id[image_id].captions.append(annotation["caption"])
    return [listed for listed in by_id.values() if listed.captions]


def _karpathy(images: list[dict[str, Any]], split: str, files: ImageFiles) -> list[ListedImage]:
    present = sorted({image["split"] for image in images})
    if split not in present:
        raise UsageError(f"--split {split!r}: the file has {', '.join(present)}")
    return [
        ListedImage(
            str(Path(image.get("filepath", "")) / image["filename"]),
            [sentence["raw"] for sentence in image["sentences"]],
            image["filename"],
            files,
        )
        for image in images
        if image["split"] == split
    ]
