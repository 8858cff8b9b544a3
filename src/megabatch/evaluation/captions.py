"""Images with one or several captions each: tables, COCO's JSON, Karpathy's, shards, pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megabatch.data import open_pairs
from megabatch.data.image_files import ImageFiles
from megabatch.data.pairs import BadSample
from megabatch.data.saved_folder import is_saved, saved_files
from megabatch.data.shards import TarSamples
from megabatch.data.sources import ALL_TABLES, find_files, one_each, split_spec
from megabatch.data.svg import SVG_SIZE
from megabatch.errors import UsageError
from megabatch.evaluation.caption_tables import Listed, ListedImages, open_tables
from megabatch.evaluation.samples import (
    CaptionedPairs,
    Captions,
    OneAfterAnother,
    Sample,
    Samples,
    clean_captions,
)


class ShardCaptions(TarSamples):
    """Shards whose `json` has a list of captions, as "caption" or "captions"."""

    def __getitem__(self, index: int) -> Sample[Captions]:
        key = self.key(index)
        captions = _captions_in(self.read(index, "json"))
        if captions is None:
            raise BadSample("no caption", key)
        return Sample(self.image(index), clean_captions(captions, key), key)


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
            each caption (rows that name the same image belong together) or, but for CSV, with a
            list of captions in each row; a .json file of COCO's ("images", "annotations") or
            Karpathy's ("images" with "sentences"); shards, where each line of a txt is a caption,
            or json holds a list of them; or anything else that `megabatch.data.open_pairs` takes.
        image_folder: where the images of a table or JSON file are; default: the file's folder, else
            the working directory.
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
    return sources[0] if len(sources) == 1 else OneAfterAnother(sources)


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
    paths = _files(spec)
    if paths and paths[0].name.endswith(ALL_TABLES):
        return open_tables(paths, image_folder, *columns_and_separator)
    if image_folder is not None:
        raise UsageError(f"--image-folder: only a table or a .json file has one, not {spec}")
    if paths and paths[0].suffix == ".tar":
        shards = ShardCaptions(paths, svg_size=svg_size)
        if shards.has(0, "json") and isinstance(_captions_in(shards.read(0, "json")), list):
            return shards
    return CaptionedPairs(open_pairs(spec, svg_size=svg_size))


def _files(spec: str) -> list[Path]:
    if is_saved(Path(spec)):
        return saved_files(Path(spec))
    try:
        return find_files(spec)
    except UsageError:  # open_pairs knows other kinds of sources too, and how to complain
        return []


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
        raise UsageError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
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
) -> list[Listed]:
    by_id = {i["id"]: Listed(i["file_name"], [], i["file_name"], files) for i in images}
    for annotation in annotations:
        by_id[annotation["image_id"]].captions.append(annotation["caption"])
    return [listed for listed in by_id.values() if listed.captions]


def _karpathy(images: list[dict[str, Any]], split: str, files: ImageFiles) -> list[Listed]:
    present = sorted({image["split"] for image in images})
    if split not in present:
        raise UsageError(f"--split {split!r}: the file has {', '.join(present)}")
    return [
        Listed(
            str(Path(image.get("filepath", "")) / image["filename"]),
            [sentence["raw"] for sentence in image["sentences"]],
            image["filename"],
            files,
        )
        for image in images
        if image["split"] == split
    ]


def _captions_in(data: bytes) -> Any:
    """A json member's captions, one or several; None where it has none."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    return document.get("captions", document.get("caption"))
