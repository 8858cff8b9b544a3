"""Columns out of table files of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from megabatch.data.arrow_files import MappedColumn, MappedTable
from megabatch.data.json_lines import json_names, read_json
from megabatch.errors import UsageError

_SEPARATORS = {".csv": ",", ".tsv": "\t"}


class Column(Protocol):
    """Values by row, as pyarrow's arrays give them: `column[row].as_py()`."""

    @property
    def type(self) -> pa.DataType:
        """What the values are."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


def column_names(path: Path, separator: str | None) -> list[str]:
    """The names of a table's columns.

    Raises:
        UsageError: it cannot be read.
    """
    if _is_json(path):
        return json_names(path)
    try:
        if path.suffix == ".parquet":
            return list(pa.parquet.read_schema(path).names)
        if path.suffix == ".arrow":
            return list(MappedTable(path).data.column_names)
        options = _parse_options(path, separator, invalid_row_handler=lambda row: "skip")
        with pa.csv.open_csv(path, parse_options=options) as reader:
            return list(reader.schema.names)
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def read_columns(
    path: Path, names: Sequence[str], separator: str | None
) -> tuple[dict[str, Column], list[str]]:
    """Read columns; also say what rows were left out.

    Raises:
        UsageError: the file cannot be read.
    """
    if _is_json(path):
        return read_json(path, names)
    damage: list[str] = []
    try:
        if path.suffix == ".arrow":
            table = MappedTable(path)
            return {name: MappedColumn(table, name) for name in names}, damage
        if path.suffix == ".parquet":
            columns = pa.parquet.read_table(path, columns=list(names))
        else:
            columns, damage = _read_csv(path, list(names), separator)
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    return {name: _one_array(columns.column(name)) for name in names}, damage


def _is_json(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def _read_csv(path: Path, names: list[str], separator: str | None) -> tuple[pa.Table, list[str]]:
    malformed: list[Any] = []

    def skip(row: Any) -> str:
        malformed.append(row)
        return "skip"

    table = pa.csv.read_csv(
        path,
        parse_options=_parse_options(path, separator, invalid_row_handler=skip),
        convert_options=pa.csv.ConvertOptions(
            column_types={name: pa.large_string() for name in names},
            include_columns=names,
            check_utf8=False,  # one bad byte costs its row, not the file: see TablePairs
        ),
    )
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
