"""Images with captions, and pairs of texts: shards, tables, COCO's and Karpathy's JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from megabatch.data import open_pairs
from megabatch.data.image_files import ImageFiles
from megabatch.data.mixture import SEPARATOR
from megabatch.data.pairs import BadSample, PairDataset, clean_caption, decode_image
from megabatch.data.shards import TarSamples
from megabatch.data.sources import ALL_TABLES, find_files, one_each, split_spec
from megabatch.data.svg import SVG_SIZE
from megabatch.data.table_files import Column, MappedColumn
from megabatch.data.tables import Table, Wanted, is_text, look_at_images, no_rows, open_table
from megabatch.errors import UsageError, one_line
from megabatch.evaluation.samples import Captions, ConcatSamples, Sample, Samples, first_of

_COLUMNS = {
    "image_column": "csv_img_key",
    "query_column": "csv_query_key",
    "caption_column": "csv_caption_key",
}


def reading_of(trained: Mapping[str, Any], val_data: str) -> dict[str, Any]:
    """Return how a run read its training data, as far as that applies to other data.

    Args:
        trained: the run's settings; empty if there is no run.
        val_data: the other data.

    Returns:
        image_column, query_column, caption_column, separator and svg_size, as `open_pairs` takes
        them. Column names that differ between several training sources are kept only if `val_data`
        has as many sources.
    """
    reading = {option: trained.get(name) for option, name in _COLUMNS.items()}
    if len((trained.get("train_data") or "").split(SEPARATOR)) > 1:
        sources = len(split_spec(val_data))
        for option, names in reading.items():
            if names is not None and len(names.split(SEPARATOR)) not in (1, sources):
                reading[option] = None
    separator, svg_size = trained.get("csv_separator"), trained.get("svg_size", SVG_SIZE)
    return {**reading, "separator": separator, "svg_size": svg_size}


def open_val_data(
    val_data: str,
    model: str,
    first: str,
    reading: Mapping[str, Any],
    *,
    image_folder: Path | None = None,
    split: str | None = None,
) -> Samples[Captions]:
    """Open held-out pairs for a model.

    Args:
        val_data: a source for `open_captioned` or, for a model of text pairs, `open_pairs`.
        model: its name, for messages.
        first: the model's first input, "image" or "text".
        reading: as `reading_of` returns it.
        image_folder, split: as for `open_captioned`.

    Raises:
        UsageError: the data cannot be opened, or are not of the kind that the model takes.
    """
    unused = "query_column" if first == "image" else "image_column"
    options = {option: value for option, value in reading.items() if option != unused}
    samples: Samples[Captions]
    if first == "text":
        samples = CaptionedPairs(open_pairs(val_data, **options))
    else:
        samples = open_captioned(val_data, image_folder=image_folder, split=split, **options)
    if (given := first_of(samples)) != first:
        raise UsageError(f"{model} takes {first}s with texts, but {val_data} has {given}s")
    return samples


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
        spec: one or several sources joined by `::`. A source is: tables (.csv, .tsv, .parquet,
            .jsonl, .jsonl.gz, .arrow, folders that Hugging Face's datasets saved) with a row for
            each caption (rows with the same image, by name or bytes, are joined) or, except in CSV,
            with a list of captions in each row; a .json file of COCO's ("images", "annotations") or
            Karpathy's ("images" with "sentences"); shards, where each line of a txt is a caption,
            or json holds a list of them; or anything else that `megabatch.data.open_pairs` takes.
        image_folder: folder of the images that a table or JSON file names; default: the file's own
            folder, else the working directory.
        split: of Karpathy's JSON: train, restval, val or test; default: test.
        image_column, caption_column, separator, svg_size: as for `open_pairs`.

    Raises:
        UsageError: nothing matches, a column or field is missing, no image has a caption.
    """
    specs = split_spec(spec)
    columns = zip(
        one_each(image_column, "image_column", specs),
        one_each(caption_column, "caption_column", specs),
        strict=True,
    )
    sources = [
        _open_one(one, image_folder, split, svg_size, (*names, separator))
        for one, names in zip(specs, columns, strict=True)
    ]
    return sources[0] if len(sources) == 1 else ConcatSamples(sources)


def _open_one(
    spec: str,
    image_folder: Path | None,
    split: str | None,
    svg_size: int,
    columns_and_separator: tuple[str | None, str | None, str | None],
) -> Samples[Captions]:
    if spec.endswith(".json"):
        return _open_json(Path(spec), image_folder, split)
    if split is not None:
        raise UsageError(f"--split {split!r}: only Karpathy's JSON files have splits, not {spec}")
    try:
        paths = find_files(spec)
    except UsageError:  # open_pairs knows more kinds of sources, and has the better message
        paths = []
    if paths and paths[0].name.endswith(ALL_TABLES):
        return _open_tables(paths, image_folder, *columns_and_separator)
    if image_folder is not None:
        raise UsageError(f"--image-folder: only a table or a .json file has one, not {spec}")
    if paths and paths[0].suffix == ".tar":
        shards = ShardCaptions(paths, svg_size=svg_size)
        if shards.has(0, "json") and isinstance(_captions_in(shards.read(0, "json")), list):
            return shards
    return CaptionedPairs(open_pairs(spec, svg_size=svg_size))


# Sources of samples.


@dataclass(frozen=True)
class CaptionedPairs:
    """A data set of pairs as samples.

    Each line of an image's caption is a caption of its own; the second of two texts is one text,
    as in training.
    """

    pairs: PairDataset

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample[Captions]:
        pair = self.pairs[index]
        caption: Any = [pair.caption] if self.first == "text" else pair.caption
        return Sample(pair.image, _clean_captions(caption, pair.key), pair.key)

    @property
    def first(self) -> str:
        """Kind of the first element of a pair, "image" or "text"."""
        return str(getattr(self.pairs, "first", "image"))

    @property
    def damage(self) -> list[str]:
        """A line for each part of the pairs' files that cannot be read."""
        return list(getattr(self.pairs, "damage", []))

    @property
    def notes(self) -> list[str]:
        """Other remarks on the pairs, for the user."""
        return list(getattr(self.pairs, "notes", []))


class ShardCaptions(TarSamples):
    """Shards whose `json` has a list of captions, as "caption" or "captions"."""

    def __getitem__(self, index: int) -> Sample[Captions]:
        key = self.key(index)
        captions = _captions_in(self.read(index, "json"))
        if captions is None:
            raise BadSample("no caption", key)
        return Sample(self.image(index), _clean_captions(captions, key), key)


@dataclass(frozen=True)
class ListedImage:
    """An image with all captions that a table or JSON file has for it.

    image: a path, a file's bytes, or the cell of an Arrow file that has either; files: reads it.
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
        captions = _clean_captions(listed.captions, listed.key)
        image = listed.image.read() if isinstance(listed.image, _ArrowCell) else listed.image
        data = listed.files.read(image, listed.key)
        return Sample(decode_image(data, listed.key), captions, listed.key)


@dataclass(frozen=True, eq=False)
class _ArrowCell:
    """An image in a memory-mapped Arrow file, read on access."""

    column: Column
    row: int

    def read(self) -> Any:
        """Return the bytes, or the struct that holds them."""
        return self.column[self.row].as_py()


# Tables.


def _open_tables(
    paths: list[Path],
    image_folder: Path | None,
    image: str | None,
    caption: str | None,
    separator: str | None,
) -> ListedImages:
    """Open tables with a row for each caption, or with a list of captions in each row.

    Args:
        paths: .csv, .tsv, .parquet, .jsonl, .jsonl.gz and .arrow files.
        image_folder: as for `open_captioned`.
        image, caption, separator: as for `megabatch.data.TablePairs`.

    Raises:
        UsageError: as for `megabatch.data.TablePairs`.
    """
    wanted = Wanted(image, None, caption, separator, lists=True)
    found: dict[Any, ListedImage] = {}
    damage: list[str] = []
    notes: list[str] = []
    for path in paths:
        table = open_table(path, wanted)
        if table.first == "text":
            raise UsageError(f"{path} has pairs of texts; expected images (--csv-img-key)")
        files = ImageFiles((image_folder,)) if image_folder else ImageFiles.beside(path)
        left_out = _join_rows(table, files, found)
        damage += table.columns.damage + left_out
        notes += table.notes + (look_at_images(table, files) if len(table) else [])
    images = list(found.values())
    if not images:
        raise no_rows(paths, damage)
    if short := [listed for listed in images if _some_are_empty(listed.captions)]:
        damage.append(
            f"{', '.join(map(str, paths[:3]))}: of {len(short)} images with several captions one "
            f"or more are empty and left out, the first is {short[0].key}"
        )
    return ListedImages(images, damage, notes)


def _join_rows(table: Table, files: ImageFiles, found: dict[Any, ListedImage]) -> list[str]:
    """Add a table's images, with the captions of all their rows, to `found`; returns the damage.

    `found`: the images of the tables so far, in order of first use. The same name is the same image
    if it is searched for in the same folders.
    """
    column = table.firsts
    is_mapped = isinstance(column, MappedColumn) and not is_text(column.type)
    bad: list[BadSample] = []
    for row in range(len(table)):
        key = table.columns.key(row)
        try:
            image = _path_or_bytes(table.first_of(row))
            value = table.caption_of(row)
        except BadSample as sample:
            bad.append(sample)
            continue
        if isinstance(image, str) and image:
            same: Any = (files, str(Path(image)))
        elif image:
            same = sha256(image).digest()
        else:  # stays a sample of its own, to be counted as one that is missing
            same = (table.columns.path, row)
        own = _ArrowCell(column, row) if is_mapped else image
        listed = found.setdefault(same, ListedImage(own, [], key, files))
        listed.captions.extend(value if isinstance(value, list) else [value])
    if not bad:
        return []
    return [
        f"{table.columns.path}: {len(bad)} rows left out, the first is {bad[0].key}: "
        f"{bad[0].reason}"
    ]


def _path_or_bytes(image: Any) -> Any:
    if isinstance(image, dict):  # Hugging Face's struct: the bytes, or else the path
        return image.get("bytes") or image.get("path")
    return image


# JSON.


def _open_json(path: Path, image_folder: Path | None, split: str | None) -> ListedImages:
    files = ImageFiles((image_folder,)) if image_folder else ImageFiles.beside(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
        images = document["images"]
        if "annotations" in document:
            if split is not None:
                raise UsageError(f"--split {split!r}: COCO's JSON is one split, not {path}")
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
    for annotation in annotations:
        by_id[annotation["image_id"]].captions.append(annotation["caption"])
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


# Captions.


def _captions_in(data: bytes) -> Any:
    """The captions of a json member, one or several; None if it has none."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    return document.get("captions", document.get("caption"))


def _is_empty(caption: Any) -> bool:
    return caption is None or (isinstance(caption, str) and not caption.strip())


def _some_are_empty(captions: Sequence[Any]) -> bool:
    """Whether some captions are empty, but not all: `_clean_captions` then gives the others."""
    empty = [_is_empty(caption) for caption in captions]
    return any(empty) and not all(empty)


def _clean_captions(value: Any, key: str) -> Captions:
    """The lines of a text, or the texts of a list, stripped, without the empty ones.

    Raises:
        BadSample: nothing is left, or an element is not a text.
    """
    if not isinstance(value, (list, tuple)):
        # Not str.splitlines: captions from the web have U+2028 and other separators within a line.
        value = re.split(r"[\r\n]+", clean_caption(value, key))
    kept = [clean_caption(v, key) for v in value if not _is_empty(v)]
    return kept or [clean_caption("", key)]
