"""Opening held-out pairs: images with captions, and pairs of texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from megabatch.data import open_pairs
from megabatch.data.pairs import (
    BadSample,
    EncodedImage,
    PairDataset,
    check_usable,
    clean_caption,
    is_blank,
)
from megabatch.data.sources import ALL_TABLES, find_files, split_spec
from megabatch.data.tables import Wanted, open_tables
from megabatch.errors import UsageError
from megabatch.evaluation.samples import Sample, Samples

GLYPHS = "glyphs"  # as `val_data`: the built-in tasks
USUAL = Wanted(lists=True)  # columns of the usual names
# Fields of `Wanted`, and the settings that give them.
_COLUMNS = {
    "image": "csv_img_key",
    "query": "csv_query_key",
    "caption": "csv_caption_key",
    "separator": "csv_separator",
}


def open_val_data(val_data: str, model: str, first: str, settings: Mapping[str, Any]) -> Samples:
    """Open held-out pairs for a model.

    Args:
        val_data: a source for `open_captioned`.
        model: its name, for messages.
        first: the model's first input, "image" or "text".
        settings: of a run or an evaluation, some of which name the columns of tables.

    Raises:
        UsageError: the data cannot be opened, or are not of the kind that the model takes.
    """
    columns: dict[str, Any] = {field: settings.get(name) for field, name in _COLUMNS.items()}
    columns["query" if first == "image" else "image"] = None
    samples = open_captioned(val_data, Wanted(**columns, lists=True))
    if samples.first != first:
        raise UsageError(f"{model} takes {first}s with texts, but {val_data} has {samples.first}s")
    return samples


def open_captioned(spec: str, wanted: Wanted = USUAL) -> Samples:
    """Open images with one or several captions each, or first texts with second ones.

    Args:
        spec: tables (.csv, .tsv, .parquet, .jsonl, .jsonl.gz, .arrow, a folder of them or one that
            Hugging Face's datasets saved) with a row for each caption or, except in CSV, a list of
            captions in each row: rows with the same image, by name or bytes, or the same first text
            are joined; or anything else that `megabatch.data.open_pairs` takes, where each line of
            a caption is one of its own.
        wanted: the columns of tables.

    Raises:
        UsageError: nothing matches, a column is missing, no image has a caption.
    """
    specs = split_spec(spec)
    is_table = [_is_table(one) for one in specs]
    if len(specs) > 1 and (any(is_table) or GLYPHS in specs):
        raise UsageError(
            f"{spec}: tables and glyphs are evaluated with no other source; a pattern such as "
            "'tables/*.csv' names several tables"
        )
    if not is_table[0]:
        return CaptionedPairs(open_pairs(spec))
    rows = JoinedRows(open_tables(find_files(spec), wanted))
    check_usable(rows, spec)
    return rows


def _is_table(source: str) -> bool:
    return source != GLYPHS and find_files(source)[0].name.endswith(ALL_TABLES)


class CaptionedPairs(Samples):
    """Images with captions: each line of an image's caption is a caption of its own."""

    def __init__(self, pairs: PairDataset) -> None:
        self.pairs = pairs
        self.first = getattr(pairs, "first", "image")
        self.damage = getattr(pairs, "damage", [])

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        pair = self.pairs[index]
        # Not str.splitlines: captions from the web have U+2028 and other separators within a line.
        lines = re.split(r"[\r\n]+", pair.caption)
        return Sample(pair.image, _cleaned(lines, pair.key), pair.key)


def _cleaned(captions: list[Any], key: str) -> list[str]:
    """The captions, stripped, without the empty ones; BadSample if none is left or is not text."""
    kept = [clean_caption(one, key) for one in captions if not is_blank(one)]
    return kept or [clean_caption("", key)]


class JoinedRows(Samples):
    """The images or first texts of tables, each once, with the captions of all their rows.

    The same name is the same image if it is looked for in the same folders. A row that cannot be
    used is a sample of its own, a bad one. Second texts that are equal are one.
    """

    def __init__(self, rows: PairDataset) -> None:
        self.tables: list[Any] = getattr(rows, "datasets", [rows])
        self.first = self.tables[0].first
        self.damage = [line for table in self.tables for line in table.damage]
        samples: dict[Any, tuple[int, int, list[str]]] = {}  # the first table, its row, captions
        for number, table in enumerate(self.tables):
            for row in range(len(table)):
                try:
                    same, captions = _read(table, row)
                except BadSample:
                    same, captions = None, []
                place = number, row
                *_, joined = samples.setdefault(place if same is None else same, (*place, []))
                joined.extend(captions)
        self._samples = list(samples.values())

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        number, row, captions = self._samples[index]
        table = self.tables[number]
        if not captions:
            _read(table, row)  # raises BadSample
        key, first = table.key(row), table.first_of(row)
        if self.first == "text":
            return Sample(first.strip(), list(dict.fromkeys(captions)), key)
        image = EncodedImage(table.files.read(first, key), key)
        return Sample(image, captions, key)


def _read(table: Any, row: int) -> tuple[Any, list[str]]:
    """The identity of a row's image or first text, None if it has none, and the row's captions."""
    key, first, captions = table.key(row), table.first_of(row), table.caption_of(row)
    captions = _cleaned(captions if isinstance(captions, list) else [captions], key)
    if table.first == "text":
        return clean_caption(first, key, "query"), captions
    if isinstance(first, dict):  # Hugging Face's struct: the bytes, or else the path
        first = first.get("bytes") or first.get("path")
    if isinstance(first, str) and first:
        return (table.files, str(Path(first))), captions
    return sha256(first).digest() if first else None, captions
