"""Opening held-out pairs: images with captions, and pairs of texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from megabatch.data import open_pairs
from megabatch.data.grey import is_grey_folder
from megabatch.data.images import ImageFiles, decode_image, decoded
from megabatch.data.mixture import SEPARATOR
from megabatch.data.pairs import BadSample, PairDataset, check_usable, clean_caption
from megabatch.data.sources import ALL_TABLES, find_files, split_spec
from megabatch.errors import UsageError, one_line, plural
from megabatch.evaluation.samples import Captions, Sample, Samples

GLYPHS = "glyphs"  # as `val_data`: their held-out parts

# Arguments of `open_pairs`, and the settings that give them.
READING = {
    "image_column": "csv_img_key",
    "query_column": "csv_query_key",
    "caption_column": "csv_caption_key",
    "separator": "csv_separator",
}


def reading_of(trained: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a run read its training data, as far as that applies to other data.

    Args:
        trained: the run's settings; empty if there is no run.

    Returns:
        image_column, query_column, caption_column and separator, as `open_pairs` takes them, but no
        column names that differ between several training sources.
    """
    reading = {option: trained.get(name) for option, name in READING.items()}
    several = SEPARATOR in (trained.get("train_data") or "")
    return {k: None if several and SEPARATOR in (v or "") else v for k, v in reading.items()}


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
    if first == "image":
        return open_captioned(val_data, image_folder=image_folder, split=split, **options)
    pairs = open_pairs(val_data, **options)
    if (given := getattr(pairs, "first", "image")) != first:
        raise UsageError(f"{model} takes {first}s with texts, but {val_data} has {given}s")
    return JoinedTexts(pairs)


def open_captioned(
    spec: str,
    *,
    image_folder: Path | None = None,
    split: str | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    separator: str | None = None,
) -> Samples[Captions]:
    """Open images with one or several captions each.

    Args:
        spec: tables (.csv, .tsv, .parquet, .jsonl, .jsonl.gz, .arrow, folders that Hugging Face's
            datasets saved) with a row for each caption (rows with the same image, by name or bytes,
            are joined) or, except in CSV, with a list of captions in each row; a .json file of
            COCO's ("images", "annotations") or Karpathy's ("images" with "sentences"); or anything
            else that `megabatch.data.open_pairs` takes, where each line of a caption is one of its
            own.
        image_folder: folder of the images that a table or JSON file names; default: the file's own
            folder, else the working directory.
        split: of Karpathy's JSON: train, restval, val or test; default: test.
        image_column, caption_column, separator: as for `open_pairs`.

    Raises:
        UsageError: nothing matches, a column or field is missing, no image has a caption.
    """
    specs = split_spec(spec)
    kinds = {_kind(one) for one in specs}
    if "glyphs" in kinds or (len(specs) > 1 and kinds != {"pairs"}):
        raise UsageError(
            f"{spec}: glyphs, tables and .json files are evaluated with no other source; a pattern "
            "such as 'tables/*.csv' names several tables"
        )
    if split is not None and kinds != {"json"}:
        raise UsageError(f"--split {split!r}: only Karpathy's JSON files have splits, not {spec}")
    if kinds == {"json"}:
        return _open_json(Path(spec), image_folder, split)
    if kinds == {"table"}:
        files = find_files(spec)
        return _open_tables(files, image_folder, image_column, caption_column, separator)
    if image_folder is not None:
        raise UsageError(f"--image-folder: only a table or a .json file has one, not {spec}")
    return CaptionedPairs(open_pairs(spec))


def _kind(source: str) -> str:
    """How a source is read: as "json", "table" or "pairs"; "glyphs" are not."""
    if source == GLYPHS:
        return GLYPHS
    if source.endswith(".json"):
        return "json"
    is_table = not is_grey_folder(source) and find_files(source)[0].name.endswith(ALL_TABLES)
    return "table" if is_table else "pairs"


def clean_captions(value: Any, key: str) -> Captions:
    """The lines of a text, or the texts of a list, stripped, without the empty ones.

    Raises:
        BadSample: nothing is left, or an element is not a text.
    """
    if not isinstance(value, (list, tuple)):
        # Not str.splitlines: captions from the web have U+2028 and other separators within a line.
        value = re.split(r"[\r\n]+", clean_caption(value, key))
    kept = [clean_caption(v, key) for v in value if not _is_empty(v)]
    return kept or [clean_caption("", key)]


def _is_empty(caption: Any) -> bool:
    return caption is None or (isinstance(caption, str) and not caption.strip())


# Sources of samples.


class _OfPairs:
    """Samples that are made of pairs, whose remarks they share."""

    def __init__(self, pairs: PairDataset) -> None:
        self.pairs = pairs
        self.damage: list[str] = getattr(pairs, "damage", [])
        self.notes: list[str] = getattr(pairs, "notes", [])


class CaptionedPairs(_OfPairs):
    """Images with captions: each line of an image's caption is a caption of its own."""

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample[Captions]:
        pair = self.pairs[index]
        return Sample(decoded(pair.image), clean_captions(pair.caption, pair.key), pair.key)


class JoinedTexts(_OfPairs):
    """Pairs of texts: each first text once, with the different second texts that it is paired with.

    A pair that cannot be used stays a sample of its own, so that it is counted.
    """

    first = "text"

    def __init__(self, pairs: PairDataset) -> None:
        super().__init__(pairs)
        of_first: dict[Any, list[int]] = {}
        for index in range(len(pairs)):
            try:
                same: Any = pairs[index].image
            except BadSample:
                same = index
            of_first.setdefault(same, []).append(index)
        self._pairs_of = list(of_first.values())

    def __len__(self) -> int:
        return len(self._pairs_of)

    def __getitem__(self, index: int) -> Sample[Captions]:
        pairs = [self.pairs[i] for i in self._pairs_of[index]]
        seconds = dict.fromkeys(pair.caption for pair in pairs)
        return Sample(pairs[0].image, list(seconds), pairs[0].key)


@dataclass(frozen=True)
class _Listed:
    """An image with all captions that a table or JSON file has for it.

    image: returns a path, a file's bytes, or Hugging Face's struct of both; files: reads these.
    """

    image: Callable[[], Any]
    captions: list[Any]
    key: str
    files: ImageFiles


@dataclass(frozen=True)
class ListedImages:
    """Images named by tables or a JSON file.

    damage: a line for each part of the list that cannot be used; notes: other remarks on it.
    """

    images: Sequence[_Listed]
    damage: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample[Captions]:
        listed = self.images[index]
        captions = clean_captions(listed.captions, listed.key)
        data = listed.files.read(listed.image(), listed.key)
        return Sample(decode_image(data, listed.key), captions, listed.key)


# Lists of images.


def _open_tables(
    paths: list[Path],
    image_folder: Path | None,
    image: str | None,
    caption: str | None,
    separator: str | None,
) -> ListedImages:
    """Open tables with a row for each caption, or with a list of captions in each row."""
    from megabatch.data.tables import TablePairs, Wanted  # needs pyarrow

    wanted = Wanted(image, None, caption, separator, lists=True)
    found: dict[Any, _Listed] = {}
    damage: list[str] = []
    notes: list[str] = []
    for path in paths:
        table = TablePairs(path, wanted, ImageFiles((image_folder,)) if image_folder else None)
        if table.first == "text":
            raise UsageError(f"{path} has pairs of texts; expected images (--csv-img-key)")
        damage += _join_rows(table, found)
        notes += table.notes
    if not found:
        raise UsageError(f"no rows in {', '.join(map(str, paths[:3]))}")
    empties = [(listed.key, [*map(_is_empty, listed.captions)]) for listed in found.values()]
    if short := [key for key, empty in empties if any(empty) and not all(empty)]:
        damage.append(
            f"{', '.join(map(str, paths[:3]))}: of {plural(len(short), 'image')} with several "
            f"captions one or more are empty and left out, the first is {short[0]}"
        )
    listed = ListedImages(list(found.values()), damage, notes)
    check_usable(listed, paths[0])
    return listed


def _join_rows(table: Any, found: dict[Any, _Listed]) -> list[str]:
    """Add a table's images, with the captions of all their rows, to `found`; returns the damage.

    `found`: the images of the tables so far, in order of first use. The same name is the same image
    if it is searched for in the same folders.
    """
    bad: list[BadSample] = []
    for row in range(len(table)):
        key = table.key(row)
        try:
            image, value = table.first_of(row), table.caption_of(row)
        except BadSample as sample:
            bad.append(sample)
            continue
        if isinstance(image, dict):  # Hugging Face's struct: the bytes, or else the path
            image = image.get("bytes") or image.get("path")
        same: Any = (table.path, row)  # without an image: counted as one that is missing
        if image:
            is_name = isinstance(image, str)
            same = (table.files, str(Path(image))) if is_name else sha256(image).digest()
        # Images are read again when they are used: those in an Arrow file stay there.
        new = _Listed(partial(table.first_of, row), [], key, table.files)
        found.setdefault(same, new).captions.extend(value if isinstance(value, list) else [value])
    if not bad:
        return []
    return [f"{table.path}: {plural(len(bad), 'row')} left out, the first is {bad[0]}"]


def _open_json(path: Path, image_folder: Path | None, split: str | None) -> ListedImages:
    """Open COCO's or Karpathy's list of images with their captions."""
    files = ImageFiles((image_folder,)) if image_folder else ImageFiles.beside(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
        is_coco = "annotations" in document
        if is_coco and split is not None:
            raise UsageError(f"--split {split!r}: COCO's JSON is one split, not {path}")
        found = _coco(document) if is_coco else _karpathy(document["images"], split or "test")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {one_line(error)}") from error
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: expected COCO's captions (images with id and file_name, annotations with "
            f"image_id and caption) or Karpathy's (images with sentences); wrong at {error}"
        ) from error
    samples = [_Listed(partial(str, name), texts, name, files) for name, texts in found if texts]
    if not samples:
        raise UsageError(f"{path} has no image with a caption")
    listed = ListedImages(samples)
    check_usable(listed, path)
    return listed


def _coco(document: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    """The images' file names and captions."""
    images: dict[Any, tuple[str, list[Any]]] = {
        image["id"]: (image["file_name"], []) for image in document["images"]
    }
    if len(images) < len(document["images"]):
        raise TypeError("images, of which some have the same id")
    for annotation in document["annotations"]:
        images[annotation["image_id"]][1].append(annotation["caption"])
    return list(images.values())


def _karpathy(images: list[dict[str, Any]], split: str) -> list[tuple[str, list[Any]]]:
    """As `_coco`, of one split."""
    present = sorted({image["split"] for image in images})
    if split not in present:
        raise UsageError(f"--split {split!r}: the file has {', '.join(present)}")
    return [
        (
            str(Path(image.get("filepath", "")) / image["filename"]),
            [sentence["raw"] for sentence in image["sentences"]],
        )
        for image in images
        if image["split"] == split
    ]
