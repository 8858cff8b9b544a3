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
from megabatch.data.pairs import BadSample, Pair, clean_caption, decode_image
from megabatch.data.table_files import (
    SEPARATORS,
    TEXT_TABLES,
    Column,
    Columns,
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

    first: the kind of values in the column `firsts`; notes: for the user, on how it was read;
    negatives: columns of texts or of lists of texts.
    """

    columns: Columns
    first: First
    firsts: Column
    captions: Column
    notes: list[str]
    negatives: Sequence[Column] = ()

    def __len__(self) -> int:
        return len(self.captions)

    def first_of(self, row: int) -> Any:
        """The image or first text; BadSample if it cannot be read."""
        return self._value(self.firsts, row)

    def caption_of(self, row: int) -> Any:
        """The caption, or the list of them; BadSample if it cannot be read."""
        return self._value(self.captions, row)

    def negatives_of(self, row: int) -> tuple[str, ...]:
        """The row's negatives without empty ones; BadSample if they cannot be read."""
        found: list[Any] = []
        for column in self.negatives:
            value = self._value(column, row)
            found += value if isinstance(value, list) else [value]
        return tuple(text.strip() for text in found if text and text.strip())

    def _value(self, column: Column, row: int) -> Any:
        try:
            return column[row].as_py()
        except UnicodeDecodeError as error:
            raise BadSample("text is not UTF-8", self.columns.key(row)) from error


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
    separator = given or ("\t" if path.suffix == ".tsv" else ",")
    notes: list[str] = []
    try:
        first, name, caption = _choose_columns(column_names(path, separator), wanted, path)
    except _MissingColumn:
        if path.suffix not in TEXT_TABLES or given is not None:
            raise
        for separator in SEPARATORS:
            try:
                chosen = _choose_columns(column_names(path, separator), wanted, path)
            except UsageError:
                continue
            first, name, caption = chosen
            notes.append(f"{path} is read with {SEPARATORS[separator]} between its fields")
            break
        else:
            raise
    negatives = _choose_negatives(column_names(path, separator), wanted, path)
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
    firsts, captions = columns.by_name[name], columns.by_name[caption]
    _check_type(firsts.type, first, path, name)
    _check_type(captions.type, "text", path, caption, wanted.lists)
    if wanted.negatives is None:
        negatives = [one for one in negatives if _holds_texts(columns.by_name[one].type, True)]
    for one in negatives:
        _check_type(columns.by_name[one].type, "text", path, one, lists=True)
    of_negatives = [columns.by_name[one] for one in negatives]
    return Table(columns, first, firsts, captions, notes, of_negatives)


def no_rows(paths: Sequence[Path], damage: Sequence[str]) -> UsageError:
    """The error for tables without a usable row."""
    return UsageError("; ".join([f"no rows in {', '.join(map(str, paths[:3]))}", *damage]))


class TablePairs:
    """Pairs in the rows of tables: of an image and a caption, or of two texts.

    The image column holds paths: absolute, or relative to the table's folder or, if there is no
    such file, to the working directory. In Parquet and Arrow it may also hold the image files'
    bytes, plain or in Hugging Face's struct {bytes, path}. The two columns are kept in memory, so
    image bytes should fit there; Arrow files are memory-mapped instead.

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
                    f"{tables[0].columns.path} has {self.first}s with texts, but "
                    f"{table.columns.path} {table.first}s"
                )
        self.damage = [line for table in tables for line in table.columns.damage]
        self.notes = [line for table in tables for line in table.notes]
        self._tables = tables
        self._files = [ImageFiles.beside(table.columns.path) for table in tables]
        # The end of each table's rows, in the numbering over all tables.
        self._ends = np.cumsum([len(table) for table in tables])
        if len(self) == 0:
            raise no_rows([table.columns.path for table in tables], self.damage)
        if self.first == "image":
            for table, files in zip(tables, self._files, strict=True):
                self.notes += look_at_images(table, files)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} samples")
        number = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (int(self._ends[number - 1]) if number else 0)
        table = self._tables[number]
        key = table.columns.key(row)
        caption = clean_caption(table.caption_of(row), key)
        first = table.first_of(row)
        negatives = table.negatives_of(row)
        if self.first == "text":
            return Pair(clean_caption(first, key, "query"), caption, key, None, negatives)
        image = decode_image(self._files[number].read(first, key), key)
        return Pair(image, caption, key, None, negatives)


def look_at_images(table: Table, files: ImageFiles) -> list[str]:
    """`ImageFiles.look` for a table's images, if they are files."""

    def name_of(row: int) -> Any:
        try:
            return table.first_of(row)
        except BadSample:
            return None

    if not is_text(table.firsts.type):
        return []
    return files.look(len(table), name_of, table.columns.key, table.columns.path)


class _MissingColumn(UsageError):
    """A table lacks a wanted column."""


def _choose_columns(present: list[str], wanted: Wanted, path: Path) -> tuple[First, str, str]:
    """The kind of a table's first elements, their column, and the captions' column."""
    first, name = _choose_first(wanted, present, path)
    usual = CAPTION_COLUMNS if first == "image" else POSITIVE_COLUMNS
    return first, name, _choose(wanted.caption, usual, present, path, "caption")


def _choose_first(wanted: Wanted, present: list[str], path: Path) -> tuple[First, str]:
    if wanted.query is not None:
        return "text", _choose(wanted.query, (), present, path, "query")
    images = set(IMAGE_COLUMNS) & set(present)
    queries = [name for name in QUERY_COLUMNS if name in present]
    if wanted.image is None and queries and not images:
        return "text", queries[0]
    if wanted.image is None and not images:
        raise _MissingColumn(
            f"{path} has no image column {_or(IMAGE_COLUMNS)} and no query column "
            f"{_or(QUERY_COLUMNS)}; {_present(present)} (--csv-img-key or --csv-query-key names it)"
        )
    return "image", _choose(wanted.image, IMAGE_COLUMNS, present, path, "image")


def _choose_negatives(present: list[str], wanted: Wanted, path: Path) -> list[str]:
    """The columns of negatives; there may be none unless they are wanted."""
    if wanted.negative is None:
        found = [name for name in present if _NEGATIVE_COLUMN.fullmatch(name)]
        missing = ["negative"] if wanted.negatives and not found else []
    else:
        found = [name.strip() for name in wanted.negative.split(",")]
        missing = [name for name in found if name not in present]
    if missing:
        raise _MissingColumn(
            f"{path} has no column of negatives {_or(missing)}; {_present(present)} "
            "(--csv-negative-key names it)"
        )
    return found


def _choose(
    wanted: str | None, usual: Sequence[str], present: list[str], path: Path, what: str
) -> str:
    candidates = [wanted] if wanted is not None else usual
    for name in candidates:
        if name in present:
            return name
    option = {"image": "--csv-img-key", "query": "--csv-query-key"}.get(what, "--csv-caption-key")
    raise _MissingColumn(
        f"{path} has no {what} column {_or(candidates)}; {_present(present)} ({option} names it)"
    )


def _present(names: list[str]) -> str:
    return f"its columns are {', '.join(map(repr, names))}"


def _or(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names))


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds texts."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _holds_texts(kind: pa.DataType, lists: bool) -> bool:
    if lists and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        kind = kind.value_type
    return is_text(kind) or pa.types.is_null(kind)


def _check_type(kind: pa.DataType, what: First, path: Path, name: str, lists: bool = False) -> None:
    images = (pa.types.is_struct, pa.types.is_binary, pa.types.is_large_binary)
    if _holds_texts(kind, lists) or (what == "image" and any(holds(kind) for holds in images)):
        return
    texts = "texts or lists of texts" if lists else "texts"
    expected = "images (paths, bytes, or {bytes, path})" if what == "image" else texts
    raise UsageError(f"{path}: column {name!r} holds {kind}; expected {expected}")
