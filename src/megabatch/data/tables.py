"""Pairs listed in tables: CSV, TSV, Parquet, JSON lines, Arrow."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.data.images import ImageFiles
from megabatch.data.order import MixedPairs
from megabatch.data.pairs import BadSample, EncodedImage, Pair, PairDataset, clean_caption, is_blank
from megabatch.data.table_files import TEXT_TABLES, column_names, read_columns
from megabatch.errors import UsageError

# The first one that a table has is used. The names for pairs of texts are those of
# sentence-transformers' data sets.
IMAGE_COLUMNS = ("filepath", "image", "image_path", "file_name")
CAPTION_COLUMNS = ("title", "caption", "text")
QUERY_COLUMNS = ("query", "anchor", "question", "sentence1")
POSITIVE_COLUMNS = ("positive", "answer", "sentence2", *CAPTION_COLUMNS)
_NEGATIVE_COLUMN = re.compile(r"negatives?|negative_\d+")
_OPTIONS = "--csv-img-key, --csv-query-key, --csv-caption-key, --csv-negative-key name others"


@dataclass(frozen=True)
class Wanted:
    """The columns to read from a table: their names, None for the usual ones, see `open_pairs`.

    lists: whether captions may also be lists of texts. negatives: whether pairs have negatives,
    texts (or, except in CSV, lists of them) from further columns, empty ones left out.
    """

    image: str | None = None
    query: str | None = None
    caption: str | None = None
    separator: str | None = None
    lists: bool = False
    negatives: bool = False
    negative: str | None = None


class TablePairs:
    """Pairs in the rows of a table: of an image and a caption, or of two texts.

    The image column holds paths (see `ImageFiles.beside`) or, in Parquet and Arrow, the image
    files' bytes, plain or in Hugging Face's struct {bytes, path}. The columns are kept in memory;
    Arrow files are memory-mapped instead, anew where pairs are unpickled.

    Attributes:
        first: see `PairDataset`.
        damage: a line for each kind of rows that cannot be read; these raise BadSample, as rows
            without an image or a text do.

    Raises:
        UsageError: the file cannot be read; a column is missing, and the message names it and the
            existing ones.
    """

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self.path = path
        self.files = ImageFiles.beside(path)
        self._wanted = wanted
        separator = _separator(path, wanted)
        self.first, self._first, self._caption, self._negatives = _choose(
            path, column_names(path, separator), wanted
        )
        names = list(dict.fromkeys([self._first, self._caption, *self._negatives]))
        lists = [self._caption, *self._negatives] if wanted.lists else self._negatives
        self._table, self._bad = read_columns(path, names, separator, lists)
        first = {reason: row + 1 for row, reason in sorted(self._bad.items(), reverse=True)}
        self.damage = [
            f"{path}: {count:,} x {reason} (first: row {first[reason]})"
            for reason, count in Counter(self._bad.values()).items()
        ]

    def __reduce__(self) -> Any:
        if self.path.suffix == ".arrow":  # mapped anew, instead of copied
            return TablePairs, (self.path, self._wanted)
        return super().__reduce__()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Pair:
        key = self.key(index)
        caption = clean_caption(self.caption_of(index), key)
        first = self.first_of(index)
        if self.first == "text":
            first = clean_caption(first, key, "query")
        else:
            first = EncodedImage(self.files.read(first, key), key)
        negatives: list[str] = []
        for name in self._negatives:
            value = self._value(name, index)
            texts = value if isinstance(value, list) else [value]
            present = (text for text in texts if not is_blank(text))
            negatives += [clean_caption(text, key, "negative") for text in present]
        return Pair(first, caption, key, None, tuple(negatives))

    def key(self, row: int) -> str:
        """A row's name in messages: its number in the file, from 1, not counting the header."""
        return f"{self.path.name}:row {row + 1}"

    def first_of(self, row: int) -> Any:
        """The image or first text; BadSample if it cannot be read."""
        return self._value(self._first, row)

    def caption_of(self, row: int) -> Any:
        """The caption, or the list of them; BadSample if it cannot be read."""
        return self._value(self._caption, row)

    def _value(self, name: str, row: int) -> Any:
        if row in self._bad:
            raise BadSample(self._bad[row], self.key(row))
        try:
            return self._table[name][row].as_py()
        except UnicodeDecodeError as error:
            raise BadSample("text is not UTF-8", self.key(row)) from error


def open_tables(paths: Sequence[Path], wanted: Wanted) -> PairDataset:
    """The pairs of several tables, one after the other.

    Raises:
        UsageError: as for TablePairs; no table has a row; one has images and another queries.
    """
    if wanted.image is not None and wanted.query is not None:
        raise UsageError(
            f"image column {wanted.image!r} and query column {wanted.query!r}: expected one"
        )
    tables = [TablePairs(path, wanted) for path in paths]
    if not any(map(len, tables)):
        raise UsageError(f"no rows in {', '.join(map(str, paths[:3]))}")
    return tables[0] if len(tables) == 1 else MixedPairs(tables, list(map(str, paths)))


def _separator(path: Path, wanted: Wanted) -> str:
    """The separator of a text table's fields."""
    if wanted.separator is None:  # OpenCLIP's .csv files have tabs
        is_text = path.suffix in TEXT_TABLES
        return "\t" if is_text and len(column_names(path, "\t")) > 1 else ","
    given = wanted.separator.replace("\\t", "\t")
    if len(given.encode()) != 1:
        raise UsageError(f"--csv-separator {given!r}: expected one character")
    return given


def _choose(path: Path, present: list[str], wanted: Wanted) -> tuple[str, str, str, list[str]]:
    """The kind of a table's first elements, and the columns of these, captions and negatives."""

    def choose(what: str, asked: str | None, usual: Sequence[str]) -> str:
        names = usual if asked is None else (asked,)
        for name in names:
            if present.count(name) > 1:
                raise UsageError(f"{path} has more than one column {name!r}")
            if name in present:
                return name
        raise UsageError(
            f"{path} has no {what} column {' or '.join(map(repr, names))}; its columns are "
            f"{', '.join(map(repr, present))} ({_OPTIONS})"
        )

    has_queries = not set(QUERY_COLUMNS).isdisjoint(present)
    has_images = wanted.image is not None or not set(IMAGE_COLUMNS).isdisjoint(present)
    if wanted.query is not None or (has_queries and not has_images):
        kind, first = "text", choose("query", wanted.query, QUERY_COLUMNS)
        caption = choose("caption", wanted.caption, POSITIVE_COLUMNS)
    else:
        kind, first = "image", choose("image", wanted.image, IMAGE_COLUMNS)
        caption = choose("caption", wanted.caption, CAPTION_COLUMNS)
    usual = [name for name in present if _NEGATIVE_COLUMN.fullmatch(name)]
    if not wanted.negatives:
        if usual:
            unused = f"{path} has negatives ({', '.join(usual)}), which are not used"
            warnings.warn(f"megabatch: {unused}: see --hard-negatives", stacklevel=2)
        return kind, first, caption, []
    names = (usual or ["negative"]) if wanted.negative is None else wanted.negative.split(",")
    return kind, first, caption, [choose("negative", name.strip(), ()) for name in names]
