"""Pairs listed in tables: CSV, TSV, Parquet, JSON lines, Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from megabatch.data.pairs import BadSample, Pair, clean_caption, decode_image
from megabatch.data.table_files import Column, column_names, read_columns
from megabatch.errors import UsageError

# The first one there is used; those of texts with texts as sentence-transformers' data sets have
# them.
IMAGE_COLUMNS = ("filepath", "image", "image_path", "file_name")
CAPTION_COLUMNS = ("title", "caption", "text")
QUERY_COLUMNS = ("query", "anchor", "question", "sentence1")
POSITIVE_COLUMNS = ("positive", "answer", "sentence2", *CAPTION_COLUMNS)

First = Literal["image", "text"]


class _Table(NamedTuple):
    path: Path
    firsts: Column  # images or queries
    captions: Column


class TablePairs:
    """Pairs in the rows of tables: of an image and a caption, or of two texts.

    The image column holds paths (absolute, or relative to the table's folder); in Parquet and Arrow
    it may also hold the image files' bytes, plain or as Hugging Face's struct {bytes, path}. The
    two columns are kept in memory, so image bytes should fit there, but for Arrow files, which are
    mapped.

    A CSV row with too many or too few fields and a line that is no JSON object are left out and
    counted in `damage`. An image that is missing or cannot be decoded and an empty caption or query
    keep their index and raise BadSample.

    Args:
        paths: .csv, .tsv, .parquet, .jsonl, .jsonl.gz and .arrow files.
        image_column: default: the first of IMAGE_COLUMNS that there is.
        query_column: column of first texts: makes it pairs of texts. They are meant without it too,
            where a table has no image column but one of QUERY_COLUMNS.
        caption_column: default: the first of CAPTION_COLUMNS or, with queries, POSITIVE_COLUMNS.
        separator: of .csv and .tsv; default: a comma, in .tsv a tab.

    Attributes:
        first: what a pair has first, "image" or "text".

    Raises:
        UsageError: a file cannot be read; a column is missing (names it and those there are) or
            holds something else; images in one table and queries in another.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        image_column: str | None = None,
        query_column: str | None = None,
        caption_column: str | None = None,
        separator: str | None = None,
    ) -> None:
        if image_column is not None and query_column is not None:
            raise UsageError(
                f"image column {image_column!r} and query column {query_column!r}: expected one"
            )
        self.damage: list[str] = []
        self._tables: list[_Table] = []
        self.first: First = "image"
        for path in map(Path, paths):
            present = column_names(path, separator)
            first, name = _choose_first(image_column, query_column, present, path)
            usual = CAPTION_COLUMNS if first == "image" else POSITIVE_COLUMNS
            caption = _choose(caption_column, usual, present, path, "caption")
            if self._tables and first != self.first:
                raise UsageError(
                    f"{self._tables[0].path} has {self.first}s with texts, but {path} {first}s"
                )
            self.first = first
            columns, damage = read_columns(path, list(dict.fromkeys([name, caption])), separator)
            _check_type(columns[name].type, first, path, name)
            _check_type(columns[caption].type, "text", path, caption)
            self.damage += damage
            self._tables.append(_Table(path, columns[name], columns[caption]))
        # Where each table's rows end in the numbering over all of them.
        self._ends = np.cumsum([len(table.captions) for table in self._tables])
        if len(self) == 0:
            raise UsageError(
                "; ".join([f"no rows in {', '.join(map(str, paths[:3]))}", *self.damage])
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} samples")
        number = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (int(self._ends[number - 1]) if number else 0)
        table = self._tables[number]
        key = f"{table.path.name}:row {row + 1}"
        caption = clean_caption(_value(table.captions, row, key), key)
        first = _value(table.firsts, row, key)
        if self.first == "text":
            return Pair(clean_caption(first, key, "query"), caption, key)
        return Pair(decode_image(_image_bytes(first, table.path.parent, key), key), caption, key)


def _choose_first(
    image: str | None, query: str | None, present: list[str], path: Path
) -> tuple[First, str]:
    """What a table has first, and in which column."""
    if query is not None:
        return "text", _choose(query, (), present, path, "query")
    queries = [name for name in QUERY_COLUMNS if name in present]
    if image is None and queries and not set(IMAGE_COLUMNS) & set(present):
        return "text", queries[0]
    if image is None and not set(IMAGE_COLUMNS) & set(present):
        raise UsageError(
            f"{path} has no image column {_or(IMAGE_COLUMNS)} and no query column "
            f"{_or(QUERY_COLUMNS)}; its columns are {', '.join(map(repr, present))}"
        )
    return "image", _choose(image, IMAGE_COLUMNS, present, path, "image")


def _choose(
    wanted: str | None, usual: Sequence[str], present: list[str], path: Path, what: str
) -> str:
    candidates = [wanted] if wanted is not None else usual
    for name in candidates:
        if name in present:
            return name
    raise UsageError(
        f"{path} has no {what} column {_or(candidates)};"
        f" its columns are {', '.join(map(repr, present))}"
    )


def _or(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names))


def _check_type(kind: pa.DataType, what: First, path: Path, name: str) -> None:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    images = (pa.types.is_struct, pa.types.is_binary, pa.types.is_large_binary)
    allowed = [pa.types.is_null, *texts, *(images if what == "image" else ())]
    if not any(holds(kind) for holds in allowed):
        expected = "images (paths, bytes, or {bytes, path})" if what == "image" else "texts"
        raise UsageError(f"{path}: column {name!r} holds {kind}; expected {expected}")


def _value(column: Column, row: int, key: str) -> Any:
    try:
        return column[row].as_py()
    except UnicodeDecodeError as error:
        raise BadSample("text is not UTF-8", key) from error


def _image_bytes(value: Any, folder: Path, key: str) -> bytes:
    if isinstance(value, dict):  # Hugging Face's struct: the bytes, or else the path
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise BadSample("no image", key)
    try:
        return (folder / value).read_bytes()
    except (OSError, ValueError) as error:
        raise BadSample("missing image file", key) from error
