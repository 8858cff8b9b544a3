"""Reading columns of table files: CSV, TSV, Parquet, Arrow, JSON lines.

A row that cannot be read keeps its place, as a bad sample does.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from megabatch.errors import UsageError, one_line, plural

TEXT_TABLES = (".csv", ".tsv")

_BLOCK = 1 << 24  # bytes of a text table that are parsed at once, and of the longest row
_LINES_FOR_NAMES = 1_000  # of JSON
_PIECE = 100_000  # rows of JSON held as Python objects before they are converted to arrays


class Columns(NamedTuple):
    """Some columns of a file; bad: what is wrong with rows of nulls, by number from 0."""

    table: pa.Table
    bad: dict[int, str]


def column_names(path: Path, separator: str) -> list[str]:
    """Return the names of a table's columns; `separator`: of fields in .csv and .tsv.

    Raises:
        UsageError: the file cannot be read.
    """
    with _reading(path):
        if path.suffix == ".parquet":
            return list(pa.parquet.read_schema(path).names)
        if path.suffix == ".arrow":
            return list(_mapped(path).column_names)
        return _header(path, separator) if path.suffix in TEXT_TABLES else _json_names(path)


def read_columns(
    path: Path, names: Sequence[str], separator: str = ",", lists: Sequence[str] = ()
) -> Columns:
    """Read columns; `lists`: those of JSON lines that may hold lists of texts, and then always do.

    Raises:
        UsageError: the file cannot be read.
    """
    with _reading(path):
        if path.suffix == ".arrow":
            return Columns(_mapped(path).select(names), {})
        if path.suffix == ".parquet":
            return Columns(pa.parquet.read_table(path, columns=list(names)), {})
        if path.suffix in TEXT_TABLES:
            return _read_csv(path, list(names), separator)
        return _read_json(path, names, lists)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Errors that name the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error, csv.Error, pa.ArrowException, ValueError) as error:
        empty = path.is_file() and path.stat().st_size == 0
        why = "the file is empty" if empty else one_line(error)
        raise UsageError(f"cannot read {path}: {why}") from error


def _mapped(path: Path) -> pa.Table:
    """A memory-mapped Arrow file, in the stream or the file format; it may exceed the memory."""
    source = pa.memory_map(str(path))
    is_file_format = source.read(6) == b"ARROW1"
    source.seek(0)
    reader = pa.ipc.open_file(source) if is_file_format else pa.ipc.open_stream(source)
    return reader.read_all()


def _header(path: Path, separator: str) -> list[str]:
    """The first non-blank line of a text table, which pyarrow's reader takes as the header."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
        names = next(filter(None, csv.reader(lines, delimiter=separator)), None)
    if names is None:
        raise ValueError("the file is empty")
    if any(letter == "\ufffd" or letter < "\t" for letter in "".join(names)):
        raise ValueError("expected a text table in UTF-8")
    return names


def _read_csv(path: Path, names: list[str], separator: str) -> Columns:
    bad: dict[int, str] = {}

    def skip(row: Any) -> str:
        fields = plural(row.actual_columns, "field")
        bad[row.number - 2] = f"{fields} instead of {row.expected_columns}"
        return "skip"

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
    if lost := _swallowed(path, table, separator):
        bad[table.num_rows + len(bad) - 1] = f"an open quote, {plural(lost, 'line')} are lost"
        table = table.slice(0, table.num_rows - 1)
    if bad:
        is_bad = np.isin(np.arange(table.num_rows + len(bad)), [*bad])
        table = table.take(pa.array(np.cumsum(~is_bad) - 1, mask=is_bad))
    return Columns(table, bad)


def _swallowed(path: Path, table: pa.Table, separator: str) -> int:
    """The number of lines that an unclosed quote has drawn into the last row's last field."""
    last = _header(path, separator)[-1]
    if last not in table.column_names or not table.num_rows:
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        closed = file.read().rstrip(b"\r\n").endswith(b'"')
    text = table.column(last)[-1].as_buffer().to_pybytes()
    return 0 if closed else text.rstrip(b"\r\n").count(b"\n")


# JSON lines. They are parsed one by one, so that a bad line costs no other. pyarrow's reader is
# three times faster, but stops at the first bad line, and a line `null` crashes it (version 26).


def _json_names(path: Path) -> list[str]:
    """The names in the first thousand lines, in order of appearance."""
    rows = list(itertools.islice(_json_objects(path), _LINES_FOR_NAMES))
    names = dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row)
    if not names:
        raise ValueError(f"expected a JSON object in each line; {rows[0] if rows else 'no line'}")
    return list(names)


def _read_json(path: Path, names: Sequence[str], lists: Sequence[str]) -> Columns:
    """Read columns of texts; a name that a line lacks is null there."""
    kinds = [(name, pa.list_(pa.string()) if name in lists else pa.string()) for name in names]
    pieces: list[pa.RecordBatch] = []
    bad: dict[int, str] = {}
    objects = enumerate(_json_objects(path))
    while lines := list(itertools.islice(objects, _PIECE)):
        rows: list[dict[str, Any]] = []
        for number, row in lines:
            try:
                rows.append({name: _texts(row, name, name in lists) for name in names})
            except ValueError as error:
                bad[number] = str(error)
                rows.append({})
        pieces.append(pa.RecordBatch.from_pylist(rows, pa.schema(kinds)))
    return Columns(pa.Table.from_batches(pieces, pa.schema(kinds)), bad)


def _json_objects(path: Path) -> Iterator[dict[str, Any] | str]:
    """The object of each line that is not blank, or what is wrong with it."""
    row: Any = None
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in filter(bytes.strip, file):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = ""
                yield row if isinstance(row, dict) else "no JSON object"
    except (OSError, EOFError, zlib.error) as error:
        if row is None:  # no line has come
            raise
        yield f"the file breaks off: {one_line(error)}"


def _texts(row: dict[str, Any] | str, name: str, is_list: bool) -> Any:
    """A row's text, a number in its notation, or list of texts; ValueError if it has none such."""
    if isinstance(row, str):
        raise ValueError(row)
    value = row.get(name)
    if is_list and value is not None:
        values = value if isinstance(value, list) else [value]
        return [_texts({name: one}, name, False) for one in values]
    if value is None or (isinstance(value, str) and value.isascii()):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{name!r} holds {type(value).__name__}, not a text")
    try:
        return str(value).encode().decode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise ValueError(f"{name!r} is not Unicode text") from error
