"""Opening held-out pairs: images with captions, and pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabatch.data import open_pairs
from megabatch.data.mixture import SEPARATOR
from megabatch.data.pairs import BadSample, PairDataset
from megabatch.data.shards import TarSamples
from megabatch.data.sources import ALL_TABLES, find_files, one_each, split_spec
from megabatch.errors import UsageError
from megabatch.evaluation.caption_texts import captions_in, clean_captions
from megabatch.evaluation.listed import open_json, open_tables
from megabatch.evaluation.samples import Captions, ConcatSamples, Sample, Samples

GLYPHS = "glyphs"  # as `val_data`: their held-out parts

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
        image_column, query_column, caption_column and separator, as `open_pairs` takes them. Column
        names that differ between several training sources are kept only if `val_data` has as many
        sources.
    """
    reading = {option: trained.get(name) for option, name in _COLUMNS.items()}
    if len((trained.get("train_data") or "").split(SEPARATOR)) > 1:
        sources = len(split_spec(val_data))
        for option, names in reading.items():
            if names is not None and len(names.split(SEPARATOR)) not in (1, sources):
                reading[option] = None
    return {**reading, "separator": trained.get("csv_separator")}


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
        spec: one or several sources joined by `::`. A source is: tables (.csv, .tsv, .parquet,
            .jsonl, .jsonl.gz, .arrow, folders that Hugging Face's datasets saved) with a row for
            each caption (rows with the same image, by name or bytes, are joined) or, except in CSV,
            with a list of captions in each row; a .json file of COCO's ("images", "annotations") or
            Karpathy's ("images" with "sentences"); shards, where each line of a txt is a caption,
            or json holds a list of them; or anything else that `megabatch.data.open_pairs` takes.
        image_folder: folder of the images that a table or JSON file names; default: the file's own
            folder, else the working directory.
        split: of Karpathy's JSON: train, restval, val or test; default: test.
        image_column, caption_column, separator: as for `open_pairs`.

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
        _open_one(one, image_folder, split, (*names, separator))
        for one, names in zip(specs, columns, strict=True)
    ]
    return sources[0] if len(sources) == 1 else ConcatSamples(sources)


def _open_one(
    spec: str,
    image_folder: Path | None,
    split: str | None,
    columns_and_separator: tuple[str | None, str | None, str | None],
) -> Samples[Captions]:
    if spec == GLYPHS:  # open_pairs would take those for training
        raise UsageError(f"{GLYPHS}: evaluated alone, as --val-data {GLYPHS}, with no other source")
    if spec.endswith(".json"):
        return open_json(Path(spec), image_folder, split)
    if split is not None:
        raise UsageError(f"--split {split!r}: only Karpathy's JSON files have splits, not {spec}")
    try:
        paths = find_files(spec)
    except UsageError:  # open_pairs knows more kinds of sources, and has the better message
        paths = []
    if paths and paths[0].name.endswith(ALL_TABLES):
        return open_tables(paths, image_folder, *columns_and_separator)
    if image_folder is not None:
        raise UsageError(f"--image-folder: only a table or a .json file has one, not {spec}")
    if paths and paths[0].suffix == ".tar":
        shards = ShardCaptions(paths)
        if shards.has(0, "json") and isinstance(captions_in(shards.read(0, "json")), list):
            return shards
    return CaptionedPairs(open_pairs(spec))


# Sources of samples.


class _OfPairs:
    """Samples made of a data set of pairs."""

    def __init__(self, pairs: PairDataset) -> None:
        self.pairs = pairs

    @property
    def damage(self) -> list[str]:
        """A line for each part of the pairs' files that cannot be read."""
        return list(getattr(self.pairs, "damage", []))

    @property
    def notes(self) -> list[str]:
        """Other remarks on the pairs, for the user."""
        return list(getattr(self.pairs, "notes", []))


class CaptionedPairs(_OfPairs):
    """Images with captions: each line of an image's caption is a caption of its own."""

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample[Captions]:
        pair = self.pairs[index]
        return Sample(pair.image, clean_captions(pair.caption, pair.key), pair.key)


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


class ShardCaptions(TarSamples):
    """Shards whose `json` has a list of captions, as "caption" or "captions"."""

    def __getitem__(self, index: int) -> Sample[Captions]:
        key = self.key(index)
        captions = captions_in(self.read(index, "json"))
        if captions is None:
            raise BadSample("no caption", key)
        return Sample(self.image(index), clean_captions(captions, key), key)
