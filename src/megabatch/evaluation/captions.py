"""Images with one or several captions each: tables, COCO's JSON, Karpathy's, shards, pairs."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megabatch.data import open_pairs
from megabatch.data.pairs import BadSample, decode_image
from megabatch.data.sources import TABLES, find_files
from megabatch.data.svg import SVG_SIZE
from megabatch.data.tables import CAPTION_COLUMNS, IMAGE_COLUMNS
from megabatch.errors import UsageError
from megabatch.evaluation.samples import CaptionedPairs, Captions, Sample, Samples, clean_captions
from megabatch.evaluation.tar_samples import TarSamples, first_members


@dataclass(frozen=True)
class Listed:
    """An image, as a path or as a file's bytes, with all captions that a list has for it."""

    image: Any
    captions: list[Any]
    key: str


@dataclass(frozen=True)
class ListedImages:
    """Images named by a list; `damage`: what of the list could not be used."""

    images: Sequence[Listed]
    damage: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample[Captions]:
        listed = self.images[index]
        captions = clean_captions(listed.captions, listed.key)
        data = _image_bytes(listed.image, listed.key)
        return Sample(decode_image(data, listed.key), captions, listed.key)


class ShardCaptions:
    """Shards whose `json` has a list of captions, as "caption" or "captions"."""

    def __init__(self, paths: list[Path]) -> None:
        self._samples = TarSamples(paths)
        self.damage = self._samples.damage

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample[Captions]:
        key = self._samples.key(index)
        captions = _captions_in(self._samples.read(index, "json"))
        if captions is None:
            raise BadSample("no caption", key)
        return Sample(self._samples.image(index), clean_captions(captions, key), key)


def open_captioned(
    spec: str,
    *,
    image_folder: Path | None = None,
    split: str | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    separator: str | None = None,
    svg_size: int = SVG_SIZE,
) -> Samples[Captions]:
    """Open images with one or several captions each.

    Args:
        spec: a .csv, .tsv or .parquet table with a row for each caption (rows that name the same
            image belong together) or with a list of captions in each row; a .json file of COCO's
            ("images", "annotations") or Karpathy's ("images" with "sentences"); shards, where each
            line of a txt is a caption, or json holds a list of them; or anything else that
            `megabatch.data.open_pairs` takes.
        image_folder: where the images of a table or JSON file are; default: the file's folder.
        split: of Karpathy's JSON: train, restval, val or test; default: test.
        image_column, caption_column, separator, svg_size: as for `open_pairs`.

    Raises:
        UsageError: nothing matches, a column or field is missing, no image has a caption.
    """
    if spec.endswith(".json"):
        return _open_json(Path(spec), image_folder, split)
    if split is not None:
        raise UsageError(f"split {split!r}: only Karpathy's JSON files have splits, not {spec}")
    paths = _files(spec)
    if paths and paths[0].suffix in TABLES:
        return _open_tables(paths, image_folder, image_column, caption_column, separator)
    if paths and paths[0].suffix == ".tar" and _has_list(paths[0]):
        return ShardCaptions(paths)
    return CaptionedPairs(open_pairs(spec, svg_size=svg_size))


def _files(spec: str) -> list[Path]:
    try:
        return find_files(spec)
    except UsageError:  # open_pairs knows other kinds of sources too, and how to complain
        return []


def _open_tables(
    paths: list[Path], image_folder: Path | None, *columns_and_separator: str | None
) -> ListedImages:
    images, damage = [], []
    for path in paths:
        found, left_out = _read_table(path, image_folder or path.parent, *columns_and_separator)
        images += found
        damage += left_out
    if not images:
        raise UsageError(f"no rows in {', '.join(map(str, paths[:3]))}")
    return ListedImages(images, damage)


def _read_table(
    path: Path, folder: Path, image: str | None, caption: str | None, separator: str | None
) -> tuple[list[Listed], list[str]]:
    """Images in order of first use; and what rows were left out, in words."""
    read = _read_parquet if path.suffix == ".parquet" else _read_csv
    pictures, values, damage = read(path, image, caption, separator)
    found: dict[Any, Listed] = {}
    for row, (picture, value) in enumerate(zip(pictures, values, strict=True), 1):
        if isinstance(picture, dict):  # Hugging Face's struct: the bytes, or else the path
            picture = picture.get("bytes") or picture.get("path")
        # Without a picture a row is an image of its own, to be counted as one that is missing.
        place = row if picture is None else picture
        if isinstance(picture, str):
            picture = str(folder / picture)
        listed = found.setdefault(place, Listed(picture, [], f"{path.name}:row {row}"))
        listed.captions.extend(value if isinstance(value, list) else [value])
    return list(found.values()), damage


def _read_parquet(
    path: Path, image: str | None, caption: str | None, _: str | None
) -> tuple[list[Any], list[Any], list[str]]:
    try:
        names = pyarrow.parquet.read_schema(path).names
        image = _choose(image, IMAGE_COLUMNS, names, path, "image")
        caption = _choose(caption, CAPTION_COLUMNS, names, path, "caption")
        table = pyarrow.parquet.read_table(path, columns=[image, caption])
        return table.column(image).to_pylist(), table.column(caption).to_pylist(), []
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {' '.join(str(error).split())}") from error


def _read_csv(
    path: Path, image: str | None, caption: str | None, separator: str | None
) -> tuple[list[Any], list[Any], list[str]]:
    delimiter = separator or ("\t" if path.suffix == ".tsv" else ",")
    pictures, captions, left_out = [], [], 0
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            rows = csv.reader(file, delimiter=delimiter)
            names = next(rows, [])
            picture_at = names.index(_choose(image, IMAGE_COLUMNS, names, path, "image"))
            caption_at = names.index(_choose(caption, CAPTION_COLUMNS, names, path, "caption"))
            for row in filter(None, rows):
                if len(row) != len(names) or "\ufffd" in row[caption_at]:  # was no UTF-8
                    left_out += 1
                    continue
                pictures.append(row[picture_at])
                captions.append(row[caption_at])
    except (OSError, csv.Error, TypeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    damage = f"{path}: {left_out} rows left out: a wrong number of fields, or not UTF-8"
    return pictures, captions, [damage] if left_out else []


def _choose(
    wanted: str | None, usual: Sequence[str], present: list[str], path: Path, what: str
) -> str:
    candidates = [wanted] if wanted is not None else usual
    for name in candidates:
        if name in present:
            return name
    raise UsageError(
        f"{path} has no {what} column {' or '.join(map(repr, candidates))};"
        f" its columns are {', '.join(map(repr, present))}"
    )


def _open_json(path: Path, image_folder: Path | None, split: str | None) -> ListedImages:
    folder = image_folder or path.parent
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
        images = document["images"]
        if "annotations" in document:
            if split is not None:
                raise UsageError(f"split {split!r}: COCO's JSON is one split, not {path}")
            listed = _coco(images, document["annotations"], folder)
        else:
            listed = _karpathy(images, split or "test", folder)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: expected COCO's captions (images with id and file_name, annotations with "
            f"image_id and caption) or Karpathy's (images with sentences); wrong at {error}"
        ) from error
    if not listed:
        raise UsageError(f"{path} has no image with a caption")
    return ListedImages(listed)


def _coco(
    images: list[dict[str, Any]], annotations: list[dict[str, Any]], folder: Path
) -> list[Listed]:
    by_id = {i["id"]: Listed(str(folder / i["file_name"]), [], i["file_name"]) for i in images}
    for annotation in annotations:
        by_id[annotation["image_id"]].captions.append(annotation["caption"])
    return [listed for listed in by_id.values() if listed.captions]


def _karpathy(images: list[dict[str, Any]], split: str, folder: Path) -> list[Listed]:
    present = sorted({image["split"] for image in images})
    if split not in present:
        raise UsageError(f"split: {split!r}; the file has {', '.join(present)}")
    return [
        Listed(
            str(folder / image.get("filepath", "") / image["filename"]),
            [sentence["raw"] for sentence in image["sentences"]],
            image["filename"],
        )
        for image in images
        if image["split"] == split
    ]


def _has_list(path: Path) -> bool:
    return isinstance(_captions_in(first_members(path).get("json", b"")), list)


def _captions_in(data: bytes) -> Any:
    """A json member's captions, one or several; None where it has none."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    return document.get("captions", document.get("caption"))


def _image_bytes(value: Any, key: str) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise BadSample("no image", key)
    try:
        return Path(value).read_bytes()
    except (OSError, ValueError) as error:
        raise BadSample("missing image file", key) from error
