"""Reading columns of table files: CSV, TSV, Parquet, Arrow, JSON lines."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from megabatch.data.json_lines import json_names, read_json
from megabatch.errors import UsageError, one_line, plural

TEXT_TABLES = (".csv", ".tsv")
#: Field separators of text tables, the most usual first.
SEPARATORS = {",": "a comma", "\t": "a tab", ";": "a semicolon", "|": "a bar"}

_BLOCK = 1 << 24  # bytes of a text table that are parsed at once, and of the longest row
_OTHER_FORMATS = {
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"PK\x03\x04": "a zip file, as Excel's are",
    b"\x1f\x8b": "compressed by gzip",
    b"\xff\xfe": "in UTF-16",
    b"\xfe\xff": "in UTF-16",
}


class Column(Protocol):
    """Values by row, with the interface of pyarrow's arrays: `column[row].as_py()`."""

    @property
    def type(self) -> pa.DataType:
        """The values' type."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


@dataclass(frozen=True)
class Columns:
    """Some columns of a file.

    left_out: int64, sorted, the file's rows (from 0) that the columns lack; damage: the same in
    words.
    """

    path: Path
    by_name: dict[str, Column]
    left_out: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    damage: list[str] = field(default_factory=list)

    def key(self, row: int) -> str:
        """A row's name in messages: its number in the file, from 1, not counting the header."""
        before = np.searchsorted(self.left_out - np.arange(len(self.left_out)), row, side="right")
        return f"{self.path.name}:row {row + int(before) + 1}"


def column_names(path: Path, separator: str) -> list[str]:
    """Return the names of a table's columns; `separator`: of fields in .csv and .tsv.

    Raises:
        UsageError: the file cannot be read.
    """
    if _is_json(path):
        return json_names(path)
    try:
        if path.suffix == ".parquet":
            return list(pa.parquet.read_schema(path).names)
        if path.suffix == ".arrow":
            return list(MappedTable(path).data.column_names)
        return _header(path, separator)
    except (OSError, pa.ArrowException, csv.Error, UnicodeEncodeError) as error:
        raise _unreadable(path, error) from error


def read_columns(
    path: Path, names: Sequence[str], separator: str, lists: Sequence[str] = ()
) -> Columns:
    """Read columns; `lists`: those of JSON lines that may hold lists of texts, and then always do.

    Raises:
        UsageError: the file cannot be read.
    """
    if _is_json(path):
        values, left_out, damage = read_json(path, names, lists)
        return Columns(path, dict(values), left_out, damage)
    try:
        if path.suffix == ".arrow":
            mapped = MappedTable(path)
            return Columns(path, {name: MappedColumn(mapped, name) for name in names})
        if path.suffix == ".parquet":
            table = pa.parquet.read_table(path, columns=list(names))
            return Columns(path, {name: _one_array(table.column(name)) for name in names})
        return _read_csv(path, list(names), separator)
    except (OSError, pa.ArrowException, UnicodeEncodeError) as error:
        raise _unreadable(path, error) from error


def _is_json(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def _unreadable(path: Path, error: Exception) -> UsageError:
    if path.is_file() and path.stat().st_size == 0:
        return UsageError(f"cannot read {path}: the file is empty (0 bytes)")
    return UsageError(f"cannot read {path}: {one_line(error)}")


def _header(path: Path, separator: str) -> list[str]:
    """The first non-blank line of a text table, which pyarrow's reader takes as the header."""
    with path.open("rb") as file:
        beginning = file.read(8)
    for magic, kind in _OTHER_FORMATS.items():
        if beginning.startswith(magic):
            raise UsageError(f"cannot read {path}: it is {kind}; expected a text table in UTF-8")
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
        names = next(filter(None, csv.reader(lines, delimiter=separator)), None)
    if names is None:
        raise UsageError(f"cannot read {path}: the file is empty ({path.stat().st_size} bytes)")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1 and name]:
        raise UsageError(f"{path} has more than one column {twice[0]!r}")
    return names


def _read_csv(path: Path, names: list[str], separator: str) -> Columns:
    malformed: list[Any] = []

    def skip(row: Any) -> str:
        malformed.append(row)
        return "skip"

    try:
        table = pa.csv.read_csv(
            path,
            # Threads would not know the rows' numbers, and are slower if fields may hold newlines.
            read_options=pa.csv.ReadOptions(use_threads=False, block_size=_BLOCK),
            parse_options=pa.csv.ParseOptions(
                delimiter=separator, newlines_in_values=True, invalid_row_handler=skip
            ),
            convert_options=pa.csv.ConvertOptions(
                column_types={name: pa.large_string() for name in names},
                include_columns=names,
                check_utf8=False,  # a bad byte costs its row, not the file: see TablePairs
            ),
        )
    except pa.ArrowInvalid as error:
        if "straddling" not in str(error):
            raise
        raise UsageError(
            f"cannot read {path}: a row is longer than {_BLOCK >> 20} MiB, as happens if a quote "
            "is never closed"
        ) from error
    damage = []
    if malformed:
        first = malformed[0]
        damage.append(
            f"{path}: {plural(len(malformed), 'row')} left out, the first (row {first.number - 1}) "
            f"has {plural(first.actual_columns, 'field')} instead of {first.expected_columns}: "
            f"{_start(first)}"
        )
    if lost := _swallowed(path, table, separator):
        damage.append(
            f"{path}: a quote opens in row {table.num_rows + len(malformed)} and is never closed: "
            f"that row and the {plural(lost, 'line')} after it are left out"
        )
        table = table.slice(0, table.num_rows - 1)
    left_out = np.array([row.number - 2 for row in malformed], dtype=np.int64)
    columns = {name: _one_array(table.column(name)) for name in names}
    return Columns(path, columns, left_out, damage)


def _swallowed(path: Path, table: pa.Table, separator: str) -> int:
    """The number of lines that an unclosed quote has drawn into the last row's last field."""
    last = _header(path, separator)[-1]
    if last not in table.column_names or not table.num_rows:
        return 0
    lines = table.column(last)[-1].as_buffer().to_pybytes().rstrip(b"\r\n").count(b"\n")
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        closed = file.read().rstrip(b"\r\n").endswith(b'"')
    return 0 if closed else lines


def _start(row: Any) -> str:
    """The beginning of a malformed row, which shows best where a quote has swallowed lines."""
    lines = row.text.count("\n")
    text = repr(row.text[:40] + ("..." if len(row.text) > 40 else ""))
    return f"{text}, over {lines + 1} lines" if lines else text


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    """Combine a column's chunks for constant-time access to rows, also beyond 2 GiB."""
    column = column.cast(_wide(column.type))  # the others have 32-bit offsets
    joined = column.combine_chunks()
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined


def _wide(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_wide(field.type)) for field in kind])
    return {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)


class MappedColumn:
    """A column of a memory-mapped file; only the path and the name are pickled."""

    def __init__(self, table: MappedTable, name: str) -> None:
        self._arguments = table, name
        self._values: pa.ChunkedArray = table.data.column(name)

    @property
    def type(self) -> pa.DataType:
        """The values' type."""
        return self._values.type

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> Any:
        return self._values[row]

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedColumn, self._arguments


class MappedTable:
    """A memory-mapped Arrow file, in the stream or the file format.

    A data set may be larger than memory, and processes share it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        source = pa.memory_map(str(path))
        is_file_format = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pa.ipc.open_file(source) if is_file_format else pa.ipc.open_stream(source)
        self.data: pa.Table = reader.read_all()

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedTable, (self.path,)
