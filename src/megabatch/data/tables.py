"""Pairs listed in CSV, TSV or Parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from megabatch.data.pairs import BadSample, Pair, clean_caption, decode_image
from megabatch.errors import UsageError

IMAGE_COLUMNS = ("filepath", "image", "image_path", "file_name")  # the first one there is used
CAPTION_COLUMNS = ("title", "caption", "text")

_SEPARATORS = {".csv": ",", ".tsv": "\t"}


class TablePairs:
    """Pairs in the rows of tables.

    The image column holds paths (absolute, or relative to the table's folder); in Parquet it may
    also hold the image files' bytes, plain or as Hugging Face's struct {bytes, path}. The two
    columns are kept in memory, so image bytes should fit there; larger sets belong in shards.

    A CSV row with too many or too few fields is left out and counted in `damage`. An image that is
    missing or cannot be decoded and an empty caption keep their index and raise BadSample.

    Raises:
        UsageError: a file cannot be read; a column is missing (names it and those there are).
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        image_column: str | None = None,
        caption_column: str | None = None,
        separator: str | None = None,
    ) -> None:
        self.paths = [Path(path) for path in paths]
        self.damage: list[str] = []
        self._images: list[pa.Array] = []
        self._captions: list[pa.Array] = []
        for path in self.paths:
            present = _column_names(path, separator)
            image = _choose(image_column, IMAGE_COLUMNS, present, path, "image")
            caption = _choose(caption_column, CAPTION_COLUMNS, present, path, "caption")
            table, damage = _load(path, [image, caption], separator)
            self.damage += damage
            self._images.append(_one_array(table.column(image)))
            self._captions.append(_one_array(table.column(caption)))
        # Where each table's rows end in the numbering over all of them.
        self._ends = np.cumsum([len(column) for column in self._captions])
        if len(self) == 0:
            raise UsageError(f"no rows in {', '.join(map(str, self.paths[:3]))}")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} samples")
        table = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (int(self._ends[table - 1]) if table else 0)
        path = self.paths[table]
        key = f"{path.name}:row {row + 1}"
        caption = clean_caption(_value(self._captions[table], row, key), key)
        data = _image_bytes(_value(self._images[table], row, key), path.parent, key)
        return Pair(decode_image(data, key), caption, key)


def _choose(
    wanted: str | None, usual: Sequence[str], present: list[str], path: Path, what: str
) -> str:
    candidates = [wanted] if wanted is not None else usual
    for name in candidates:
        if name in present:
            return name
    raise UsageError(
        f"{path} has no {what} column {' or '.join(map(repr, candidates))};"
        f" its columns are {', '.join(map(repr, present))}"
    )


def _column_names(path: Path, separator: str | None) -> list[str]:
    try:
        if path.suffix == ".parquet":
            return list(pa.parquet.read_schema(path).names)
        options = _parse_options(path, separator, invalid_row_handler=lambda row: "skip")
        with pa.csv.open_csv(path, parse_options=options) as reader:
            return list(reader.schema.names)
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def _load(path: Path, columns: list[str], separator: str | None) -> tuple[pa.Table, list[str]]:
    """Read two columns; also say what rows were left out."""
    if path.suffix == ".parquet":
        try:
            return pa.parquet.read_table(path, columns=columns), []
        except (OSError, pa.ArrowException) as error:
            raise UsageError(f"cannot read {path}: {error}") from error

    malformed: list[Any] = []

    def skip(row: Any) -> str:
        malformed.append(row)
        return "skip"

    strings = {column: pa.large_string() for column in columns}
    try:
        table = pa.csv.read_csv(
            path,
            parse_options=_parse_options(path, separator, invalid_row_handler=skip),
            convert_options=pa.csv.ConvertOptions(
                column_types=strings,
                include_columns=columns,
                check_utf8=False,  # one bad byte costs its row, not the file: see _value
            ),
        )
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not malformed:
        return table, []
    first = malformed[0]
    return table, [
        f"{path}: {len(malformed)} rows left out, the first has {first.actual_columns} fields"
        f" instead of {first.expected_columns}"
    ]


def _parse_options(path: Path, separator: str | None, **more: Any) -> Any:
    delimiter = separator or _SEPARATORS.get(path.suffix, ",")
    return pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, **more)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    """Join a column's chunks, so that a row is found at once, whatever its bytes add up to."""
    column = column.cast(_wide(column.type))  # the narrow types end at 2 GiB
    joined = column.combine_chunks()
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined


def _wide(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_wide(field.type)) for field in kind])
    return {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)


def _value(column: pa.Array, row: int, key: str) -> Any:
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
