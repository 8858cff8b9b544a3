"""Pairs listed in tables: CSV, TSV, Parquet, JSON lines, Arrow."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from megabatch.data.image_files import ImageFiles
from megabatch.data.mixture import MixedPairs
from megabatch.data.pairs import (
    BadSample,
    EncodedImage,
    Pair,
    PairDataset,
    clean_caption,
)
from megabatch.data.table_files import TEXT_TABLES, column_names, read_columns
from megabatch.errors import UsageError

# The first one that a table has is used. The names for pairs of texts are those of
# sentence-transformers' data sets.
IMAGE_COLUMNS = ("filepath", "image", "image_path", "file_name")
CAPTION_COLUMNS = ("title", "caption", "text")
QUERY_COLUMNS = ("query", "anchor", "question", "sentence1")
POSITIVE_COLUMNS = ("positive", "answer", "sentence2", *CAPTION_COLUMNS)
_NEGATIVE_COLUMN = re.compile(r"negatives?|negative_\d+")
_OPTIONS = {"image": "--csv-img-key", "query": "--csv-query-key", "caption": "--csv-caption-key"}

_CHECKED = 100  # image files, when a table is opened

First = Literal["image", "text"]


@dataclass(frozen=True)
class Wanted:
    """The columns to read from a table: their names, None for the usual ones, see `open_pairs`.

    lists: whether captions may also be lists of texts. negatives: whether pairs have negatives,
    texts (or, except in CSV, lists of them) from further columns, empty ones left out; None: if
    there are such columns.
    """

    image: str | None = None
    query: str | None = None
    caption: str | None = None
    separator: str | None = None
    lists: bool = False
    negatives: bool | None = False
    negative: str | None = None


class TablePairs:
    """Pairs in the rows of a table: of an image and a caption, or of two texts.

    The image column holds paths: absolute, or relative to the table's folder or, if there is no
    such file, to the working directory. In Parquet and Arrow it may also hold the image files'
    bytes, plain or in Hugging Face's struct {bytes, path}. The columns are kept in memory, so image
    bytes should fit there; Arrow files are memory-mapped instead, anew where pairs are unpickled.

    A CSV row with too many or too few fields and a line that is not a JSON object are left out and
    counted in `damage`. A row whose image is missing, or whose caption or query is empty, keeps its
    index and raises BadSample.

    Args:
        path: a .csv, .tsv, .parquet, .jsonl, .jsonl.gz or .arrow file.
        wanted: the columns.
        files: of images that the table names; default: beside it.

    Attributes:
        first: the kind of a pair's first element, "image" or "text".
        damage: a line for each part of the file that cannot be read. notes: other remarks for the
            user.

    Raises:
        UsageError: the file cannot be read; a column is missing (the message names it and the
            existing ones) or holds another kind of values; none of the images exists.
    """

    def __init__(self, path: Path, wanted: Wanted, files: ImageFiles | None = None) -> None:
        self.path = path
        self.files = files or ImageFiles.beside(path)
        self.notes: list[str] = []
        separator = _separator(path, wanted)
        present = column_names(path, separator)
        self.first, self._first, self._caption, negatives = _choose(present, wanted, path)
        if negatives and not wanted.negatives:
            self.notes.append(
                f"{path} has negatives ({', '.join(map(repr, negatives))}), which are not used: "
                "training uses N of a row's with --loss infonce --hard-negatives N"
            )
        if wanted.negatives is False:
            negatives = []
        lists = [self._caption, *negatives] if wanted.lists else negatives
        names = list(dict.fromkeys([self._first, self._caption, *negatives]))
        self._columns, self._left_out, self.damage = read_columns(path, names, separator, lists)
        if wanted.negatives is None:
            kinds = {name: self._columns[name].type for name in names}
            negatives = [name for name in negatives if _holds_texts(kinds[name], lists=True)]
        self._negatives = negatives
        for name in [self._first, self._caption, *negatives]:
            what = self.first if name == self._first else "text"
            _check_type(self._columns[name].type, what, path, name, name in lists)
        if len(self) and _is_text(self._columns[self._first].type) and self.first == "image":
            shown = np.linspace(0, len(self) - 1, min(len(self), _CHECKED)).astype(int)
            self.files.check(map(self._name_of, shown.tolist()), path)

    def __getstate__(self) -> dict[str, Any]:
        if self.path.suffix != ".arrow":
            return self.__dict__
        return {**self.__dict__, "_columns": list(self._columns)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["path"].suffix == ".arrow":
            state["_columns"] = read_columns(state["path"], state["_columns"]).by_name
        self.__dict__.update(state)

    def __len__(self) -> int:
        return len(self._columns[self._caption])

    def __getitem__(self, index: int) -> Pair:
        key = self.key(index)
        caption = clean_caption(self.caption_of(index), key)
        first = self.first_of(index)
        if self.first == "text":
            first = clean_caption(first, key, "query")
        else:
            first = EncodedImage(self.files.read(first, key), key)
        found: list[Any] = []
        for name in self._negatives:
            value = self._value(name, index)
            found += value if isinstance(value, list) else [value]
        negatives = tuple(text.strip() for text in found if text and text.strip())
        return Pair(first, caption, key, None, negatives)

    def key(self, row: int) -> str:
        """A row's name in messages: its number in the file, from 1, not counting the header."""
        places = self._left_out - np.arange(len(self._left_out))
        before = int(np.searchsorted(places, row, side="right"))
        return f"{self.path.name}:row {row + before + 1}"

    def first_of(self, row: int) -> Any:
        """The image or first text; BadSample if it cannot be read."""
        return self._value(self._first, row)

    def caption_of(self, row: int) -> Any:
        """The caption, or the list of them; BadSample if it cannot be read."""
        return self._value(self._caption, row)

    def _name_of(self, row: int) -> Any:
        with contextlib.suppress(BadSample):
            return self.first_of(row)

    def _value(self, name: str, row: int) -> Any:
        try:
            return self._columns[name][row].as_py()
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
        raise no_rows(paths, [line for table in tables for line in table.damage])
    return tables[0] if len(tables) == 1 else MixedPairs(tables, list(map(str, paths)))


def no_rows(paths: Sequence[Path], damage: Sequence[str]) -> UsageError:
    """The error for tables without a usable row."""
    return UsageError("; ".join([f"no rows in {', '.join(map(str, paths[:3]))}", *damage]))


def _separator(path: Path, wanted: Wanted) -> str:
    """The separator of a text table's fields."""
    if wanted.separator is None:  # OpenCLIP's .csv files have tabs
        is_text = path.suffix in TEXT_TABLES
        return "\t" if is_text and len(column_names(path, "\t")) > 1 else ","
    given = wanted.separator.replace("\\t", "\t")
    if len(given.encode()) != 1:
        raise UsageError(f"--csv-separator {given!r}: expected one character")
    return given


def _choose(present: list[str], wanted: Wanted, path: Path) -> tuple[First, str, str, list[str]]:
    """The kind of a table's first elements, and the columns of these, captions and negatives."""
    there = f"its columns are {', '.join(map(repr, present))}"

    def choose(what: str, asked: str | None, usual: Sequence[str]) -> str:
        names = usual if asked is None else (asked,)
        for name in names:
            if present.count(name) > 1:
                raise UsageError(f"{path} has more than one column {name!r}")
            if name in present:
                return name
        raise UsageError(
            f"{path} has no {what} column {_or(names)}; {there} ({_OPTIONS[what]} names it)"
        )

    first: First = "image"
    queries = [name for name in QUERY_COLUMNS if name in present]
    has_images = wanted.image is not None or not set(IMAGE_COLUMNS).isdisjoint(present)
    if wanted.query is not None or (queries and not has_images):
        first = "text"
        name = choose("query", wanted.query, queries)
    elif not has_images:
        raise UsageError(
            f"{path} has no image column {_or(IMAGE_COLUMNS)} and no query column "
            f"{_or(QUERY_COLUMNS)}; {there} (--csv-img-key or --csv-query-key names it)"
        )
    else:
        name = choose("image", wanted.image, IMAGE_COLUMNS)
    usual = CAPTION_COLUMNS if first == "image" else POSITIVE_COLUMNS
    caption = choose("caption", wanted.caption, usual)
    negatives = [name for name in present if _NEGATIVE_COLUMN.fullmatch(name)]
    missing = [] if negatives or not wanted.negatives else ["negative"]
    if wanted.negative is not None:
        negatives = [name.strip() for name in wanted.negative.split(",")]
        missing = [name for name in negatives if name not in present]
    if missing:
        raise UsageError(
            f"{path} has no column of negatives {_or(missing)}; {there} "
            "(--csv-negative-key names it)"
        )
    return first, name, caption, negatives


def _or(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names))


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def _holds_texts(kind: pa.DataType, lists: bool) -> bool:
    if lists and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        kind = kind.value_type
    return _is_text(kind) or pa.types.is_null(kind)


def _check_type(kind: pa.DataType, what: str, path: Path, name: str, lists: bool) -> None:
    images = (pa.types.is_struct, pa.types.is_binary, pa.types.is_large_binary)
    if _holds_texts(kind, lists) or (what == "image" and any(holds(kind) for holds in images)):
        return
    expected = "texts or lists of texts" if lists else "texts"
    if what == "image":
        expected = "images (paths, bytes, or {bytes, path})"
    raise UsageError(f"{path}: column {name!r} holds {kind}; expected {expected}")
