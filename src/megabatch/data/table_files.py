"""Reading columns of table files: CSV, TSV, Parquet, Arrow, JSON lines."""

from __future__ import annotations

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
_PIECE = 100_000  # rows of JSON held as Python objects before they are converted to an array


class Columns(NamedTuple):
    """Some columns of a file.

    left_out: int64, sorted, the file's rows (from 0) that the columns lack; damage: the same in
    words.
    """

    by_name: dict[str, pa.ChunkedArray]
    left_out: np.ndarray
    damage: list[str]


def column_names(path: Path, separator: str) -> list[str]:
    """Return the names of a table's columns; `separator`: of fields in .csv and .tsv.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        if path.suffix == ".parquet":
            return list(pa.parquet.read_schema(path).names)
        if path.suffix == ".arrow":
            return list(_mapped(path).column_names)
        return _header(path, separator) if path.suffix in TEXT_TABLES else _json_names(path)
    except (OSError, EOFError, pa.ArrowException, csv.Error, UnicodeEncodeError) as error:
        raise _unreadable(path, error) from error


def read_columns(
    path: Path, names: Sequence[str], separator: str = ",", lists: Sequence[str] = ()
) -> Columns:
    """Read columns; `lists`: those of JSON lines that may hold lists of texts, and then always do.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        if path.suffix == ".arrow":
            return _whole(_mapped(path).select(names))
        if path.suffix == ".parquet":
            return _whole(pa.parquet.read_table(path, columns=list(names)))
        if path.suffix in TEXT_TABLES:
            return _read_csv(path, list(names), separator)
        return _read_json(path, names, lists)
    except (OSError, pa.ArrowException, UnicodeEncodeError) as error:
        raise _unreadable(path, error) from error


def _whole(table: pa.Table) -> Columns:
    by_name = dict(zip(table.column_names, table.columns, strict=True))
    return Columns(by_name, np.zeros(0, dtype=np.int64), [])


def _mapped(path: Path) -> pa.Table:
    """A memory-mapped Arrow file, in the stream or the file format.

    A data set may be larger than memory, and processes share it.
    """
    source = pa.memory_map(str(path))
    is_file_format = source.read(6) == b"ARROW1"
    source.seek(0)
    reader = pa.ipc.open_file(source) if is_file_format else pa.ipc.open_stream(source)
    return reader.read_all()


def _unreadable(path: Path, error: Exception) -> UsageError:
    if path.is_file() and path.stat().st_size == 0:
        return UsageError(f"cannot read {path}: the file is empty (0 bytes)")
    return UsageError(f"cannot read {path}: {one_line(error)}")


# Text tables.


def _header(path: Path, separator: str) -> list[str]:
    """The first non-blank line of a text table, which pyarrow's reader takes as the header."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
        names = next(filter(None, csv.reader(lines, delimiter=separator)), None)
    if names is None:
        raise UsageError(f"cannot read {path}: the file is empty ({path.stat().st_size} bytes)")
    if any(letter == "\ufffd" or letter < "\t" for letter in "".join(names)):
        raise UsageError(f"cannot read {path}: expected a text table in UTF-8")
    return names


def _read_csv(path: Path, names: list[str], separator: str) -> Columns:
    malformed: list[Any] = []

    def skip(row: Any) -> str:
        malformed.append(row)
        return "skip"

    table = pa.csv.read_csv(
        path,
        # Threads would not know the rows' numbers, and are slower if fields may hold newlines.
        read_options=pa.csv.ReadOptions(use_threads=False, block_size=_BLOCK),
        parse_options=pa.csv.ParseOptions(
            delimiter=separator, newlines_in_values=True, invalid_row_handler=skip
        ),
        convert_options=pa.csv.ConvertOptions(
            column_types={name: pa.string() for name in names},
            include_columns=names,
            check_utf8=False,  # a bad byte costs its row, not the file: see TablePairs
        ),
    )
    damage = []
    if malformed:
        first = malformed[0]
        damage.append(
            f"{path}: {plural(len(malformed), 'row')} left out, the first (row {first.number - 1}) "
            f"has {plural(first.actual_columns, 'field')} instead of {first.expected_columns}: "
            f"{first.text[:40]!r}"
        )
    if lost := _swallowed(path, table, separator):
        row = table.num_rows + len(malformed)
        damage.append(
            f"{path}: row {row} and {plural(lost, 'line')} after it are left out: a "
            "quote is never closed"
        )
        table = table.slice(0, table.num_rows - 1)
    left_out = np.array([row.number - 2 for row in malformed], dtype=np.int64)
    return Columns(_whole(table).by_name, left_out, damage)


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
    names: dict[str, None] = {}
    why = "no line in it"
    for number, row in itertools.islice(_json_objects(path), _LINES_FOR_NAMES):
        if isinstance(row, str):
            why = f"line {number}: {row}"
        else:
            names.update(dict.fromkeys(row))
    if not names:
        raise UsageError(f"cannot read {path}: expected a JSON object in each line; {why}")
    return list(names)


def _read_json(path: Path, names: Sequence[str], lists: Sequence[str]) -> Columns:
    """Read columns of texts.

    A name that a line lacks is null there. A line is left out if it is not an object or holds
    anything but a text or a number under a name; so is everything after damage to the compression.
    """
    kinds = {name: pa.list_(pa.string()) if name in lists else pa.string() for name in names}
    pieces: dict[str, list[pa.Array]] = {name: [] for name in names}
    kept: list[int] = []
    bad: list[str] = []
    objects = _json_objects(path)
    while lines := list(itertools.islice(objects, _PIECE)):
        rows = []
        for number, row in lines:
            try:
                rows.append({name: _texts(row, name, name in lists) for name in names})
                kept.append(number)
            except ValueError as error:
                bad.append(f"line {number}: {error}")
        for name, kind in kinds.items():
            pieces[name].append(pa.array([row[name] for row in rows], kind))
    by_name = {name: pa.chunked_array(pieces[name], kind) for name, kind in kinds.items()}
    left_out = np.setdiff1d(np.arange(1, kept[-1] if kept else 0), kept) - 1
    damage = [f"{path}: {plural(len(bad), 'line')} left out, the first is {bad[0]}"] if bad else []
    if bad[1:] and "breaks off" in bad[-1]:
        damage[0] += f", the last is {bad[-1]}"
    return Columns(by_name, left_out, damage)


def _json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Each line's number, from 1, and its object, or what is wrong with it."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                yield number, row if isinstance(row, dict) else "no JSON object"
    except (OSError, EOFError, zlib.error) as error:
        if number == 0:
            raise
        yield number + 1, f"breaks off: {one_line(error)}"


def _texts(row: dict[str, Any] | str, name: str, is_list: bool) -> Any:
    """A text of a row, a number in its notation, as in CSV; or a list of texts; null is None.

    Raises:
        ValueError: it is something else, or the row is none.
    """
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
