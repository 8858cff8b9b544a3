"""Pairs listed in tables: CSV, TSV, Parquet, JSON lines, Arrow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from megabatch.data.image_files import ImageFiles
from megabatch.data.pairs import BadSample, EncodedImage, FilePairs, Pair, clean_caption
from megabatch.data.table_files import (
    TEXT_TABLES,
    Columns,
    WrongColumns,
    column_names,
    read_columns,
)
from megabatch.errors import UsageError

# The first one that a table has is used. The names for pairs of texts are those of
# sentence-transformers' data sets.
IMAGE_COLUMNS = ("filepath", "image", "image_path", "file_name")
CAPTION_COLUMNS = ("title", "caption", "text")
QUERY_COLUMNS = ("query", "anchor", "question", "sentence1")
POSITIVE_COLUMNS = ("positive", "answer", "sentence2", *CAPTION_COLUMNS)
_NEGATIVE_COLUMN = re.compile(r"negatives?|negative_\d+")
_OPTIONS = {"image": "--csv-img-key", "query": "--csv-query-key", "caption": "--csv-caption-key"}
#: Field separators of text tables, the most usual first.
SEPARATORS = {",": "a comma", "\t": "a tab", ";": "a semicolon", "|": "a bar"}

First = Literal["image", "text"]


@dataclass(frozen=True)
class Wanted:
    """The columns to read from a table: their names, None for the usual ones.

    separator: of fields in .csv and .tsv; None: see `open_table`. lists: whether captions may also
    be lists of texts. negatives: whether to read columns of negatives too (None: if there are any),
    and `negative` their names, joined by commas.
    """

    image: str | None = None
    query: str | None = None
    caption: str | None = None
    separator: str | None = None
    lists: bool = False
    negatives: bool | None = False
    negative: str | None = None


@dataclass(frozen=True)
class Table:
    """The wanted columns of a table.

    first: the kind of values in the column `first_name`; notes: for the user, on how it was read;
    negatives: names of columns of texts or of lists of texts. An Arrow file is mapped anew where
    the table is unpickled.
    """

    path: Path
    first: First
    first_name: str
    caption_name: str
    negatives: list[str]
    notes: list[str]
    columns: Columns

    def __len__(self) -> int:
        return len(self.columns.by_name[self.caption_name])

    def __getstate__(self) -> dict[str, Any]:
        if self.path.suffix != ".arrow":
            return self.__dict__
        return {**self.__dict__, "columns": list(self.columns.by_name)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["path"].suffix == ".arrow":
            state["columns"] = read_columns(state["path"], state["columns"])
        self.__dict__.update(state)

    def key(self, row: int) -> str:
        """A row's name in messages: its number in the file, from 1, not counting the header."""
        left_out = self.columns.left_out
        before = np.searchsorted(left_out - np.arange(len(left_out)), row, side="right")
        return f"{self.path.name}:row {row + int(before) + 1}"

    def first_of(self, row: int) -> Any:
        """The image or first text; BadSample if it cannot be read."""
        return self._value(self.first_name, row)

    def caption_of(self, row: int) -> Any:
        """The caption, or the list of them; BadSample if it cannot be read."""
        return self._value(self.caption_name, row)

    def negatives_of(self, row: int) -> tuple[str, ...]:
        """The row's negatives without empty ones; BadSample if they cannot be read."""
        found: list[Any] = []
        for name in self.negatives:
            value = self._value(name, row)
            found += value if isinstance(value, list) else [value]
        return tuple(text.strip() for text in found if text and text.strip())

    def look_at_images(self, files: ImageFiles) -> list[str]:
        """`ImageFiles.look` for the table's images, if they are files."""

        def name_of(row: int) -> Any:
            try:
                return self.first_of(row)
            except BadSample:
                return None

        if not _is_text(self.columns.by_name[self.first_name].type):
            return []
        return files.look(len(self), name_of, self.key, self.path)

    def _value(self, name: str, row: int) -> Any:
        try:
            return self.columns.by_name[name][row].as_py()
        except UnicodeDecodeError as error:
            raise BadSample("text is not UTF-8", self.key(row)) from error


def open_table(path: Path, wanted: Wanted) -> Table:
    """Read the wanted columns.

    If no separator is given and the usual one (a comma, in .tsv a tab) does not give these columns,
    the first of SEPARATORS that does is used, with a line in `notes`.

    Raises:
        UsageError: the file cannot be read; a column is missing (the message names it and the
            existing ones) or holds another kind of values.
    """
    given = None if wanted.separator is None else wanted.separator.replace("\\t", "\t")
    if given is not None and len(given.encode()) != 1:
        raise UsageError(f"--csv-separator {given!r}: expected one character")
    usual = given or ("\t" if path.suffix == ".tsv" else ",")
    others = SEPARATORS if path.suffix in TEXT_TABLES and given is None else ()
    wrong: WrongColumns | None = None
    for separator in dict.fromkeys([usual, *others]):
        try:
            present = column_names(path, separator)
            first, name, caption, negatives = _choose(present, wanted, path)
            break
        except WrongColumns as error:
            wrong = wrong or error
    else:
        assert wrong is not None
        raise wrong
    notes = []
    if separator != usual:
        notes.append(f"{path} is read with {SEPARATORS[separator]} between its fields")
    if negatives and not wanted.negatives:
        notes.append(
            f"{path} has negatives ({', '.join(map(repr, negatives))}), which are not used: "
            "training uses N of a row's with --loss infonce --hard-negatives N"
        )
    if wanted.negatives is False:
        negatives = []
    lists = [caption, *negatives] if wanted.lists else negatives
    read = list(dict.fromkeys([name, caption, *negatives]))
    columns = read_columns(path, read, separator, lists)
    if wanted.negatives is None:
        negatives = [n for n in negatives if _holds_texts(columns.by_name[n].type, lists=True)]
    for column in [name, caption, *negatives]:
        what = first if column == name else "text"
        _check_type(columns.by_name[column].type, what, path, column, column in lists)
    return Table(path, first, name, caption, negatives, notes, columns)


def no_rows(paths: Sequence[Path], damage: Sequence[str]) -> UsageError:
    """The error for tables without a usable row."""
    return UsageError("; ".join([f"no rows in {', '.join(map(str, paths[:3]))}", *damage]))


class TablePairs(FilePairs):
    """Pairs in the rows of tables: of an image and a caption, or of two texts.

    The image column holds paths: absolute, or relative to the table's folder or, if there is no
    such file, to the working directory. In Parquet and Arrow it may also hold the image files'
    bytes, plain or in Hugging Face's struct {bytes, path}. The columns are kept in memory, so image
    bytes should fit there; Arrow files are memory-mapped instead.

    A CSV row with too many or too few fields and a line that is not a JSON object are left out and
    counted in `damage`. A row whose image is missing or cannot be decoded, or whose caption or
    query is empty, keeps its index and raises BadSample.

    Args:
        paths: .csv, .tsv, .parquet, .jsonl, .jsonl.gz and .arrow files.
        image_column: default: the first of IMAGE_COLUMNS that the table has.
        query_column: column of first texts, for pairs of texts. Default: if a table has no image
            column, the first of QUERY_COLUMNS.
        caption_column: default: the first of CAPTION_COLUMNS or, with queries, POSITIVE_COLUMNS.
        separator: of .csv and .tsv; default: a comma, in .tsv a tab, or the header's.
        negatives: whether pairs have negatives, texts from further columns; empty ones are left
            out. A value may be a list, except in CSV. None: if there are such columns.
        negative_column: names of these columns, joined by commas; default: all of negative,
            negatives, negative_1, negative_2 and so on.

    Attributes:
        first: the kind of a pair's first element, "image" or "text".
        damage: a line for each part of the files that cannot be read. notes: other remarks for the
            user.

    Raises:
        UsageError: a file cannot be read; a column is missing (the message names it and the
            existing ones) or holds another kind of values; none of a table's images exists; one
            table has images and another queries.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        image_column: str | None = None,
        query_column: str | None = None,
        caption_column: str | None = None,
        separator: str | None = None,
        negatives: bool | None = False,
        negative_column: str | None = None,
    ) -> None:
        if image_column is not None and query_column is not None:
            raise UsageError(
                f"image column {image_column!r} and query column {query_column!r}: expected one"
            )
        wanted = Wanted(
            *(image_column, query_column, caption_column, separator),
            negatives=negatives,
            negative=negative_column,
        )
        tables = [open_table(Path(path), wanted) for path in paths]
        self.first: First = tables[0].first
        for table in tables:
            if table.first != self.first:
                raise UsageError(
                    f"{tables[0].path} has {self.first}s with texts, but "
                    f"{table.path} {table.first}s"
                )
        self.damage = [line for table in tables for line in table.columns.damage]
        self.notes = [line for table in tables for line in table.notes]
        self._tables = tables
        self._files = [ImageFiles.beside(table.path) for table in tables]
        # The end of each table's rows, in the numbering over all tables.
        self._ends = np.cumsum([len(table) for table in tables])
        if len(self) == 0:
            raise no_rows([table.path for table in tables], self.damage)
        if self.first == "image":
            for table, files in zip(tables, self._files, strict=True):
                self.notes += table.look_at_images(files)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def undecoded(self, index: int) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} samples")
        number = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (int(self._ends[number - 1]) if number else 0)
        table = self._tables[number]
        key = table.key(row)
        caption = clean_caption(table.caption_of(row), key)
        first = table.first_of(row)
        negatives = table.negatives_of(row)
        if self.first == "text":
            return Pair(clean_caption(first, key, "query"), caption, key, None, negatives)
        image: Any = EncodedImage(self._files[number].read(first, key), key)
        return Pair(image, caption, key, None, negatives)


def _choose(present: list[str], wanted: Wanted, path: Path) -> tuple[First, str, str, list[str]]:
    """The kind of a table's first elements, and the columns of these, captions and negatives."""
    there = f"its columns are {', '.join(map(repr, present))}"

    def choose(what: str, asked: str | None, usual: Sequence[str]) -> str:
        names = usual if asked is None else (asked,)
        for name in names:
            if name in present:
                return name
        raise WrongColumns(
            f"{path} has no {what} column {_or(names)}; {there} ({_OPTIONS[what]} names it)"
        )

    first: First = "image"
    queries = [name for name in QUERY_COLUMNS if name in present]
    has_images = wanted.image is not None or not set(IMAGE_COLUMNS).isdisjoint(present)
    if wanted.query is not None or (queries and not has_images):
        first = "text"
        name = choose("query", wanted.query, queries)
    elif not has_images:
        raise WrongColumns(
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
        raise WrongColumns(
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


def _check_type(kind: pa.DataType, what: First, path: Path, name: str, lists: bool) -> None:
    images = (pa.types.is_struct, pa.types.is_binary, pa.types.is_large_binary)
    if _holds_texts(kind, lists) or (what == "image" and any(holds(kind) for holds in images)):
        return
    texts = "texts or lists of texts" if lists else "texts"
    expected = "images (paths, bytes, or {bytes, path})" if what == "image" else texts
    raise UsageError(f"{path}: column {name!r} holds {kind}; expected {expected}")
