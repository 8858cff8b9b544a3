"""Reading columns of JSON lines: an object per line, plain or compressed by gzip.

Lines are parsed one by one, so that a bad line costs no other. pyarrow's reader is three times
faster, but it stops at the first bad line, and a line `null` crashes the process (version 26).
"""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megabatch.errors import UsageError, plural

_LINES_FOR_NAMES = 1_000
_PIECE = 100_000  # rows held as Python objects before they are converted to an array


def json_names(path: Path) -> list[str]:
    """Return the names in the first thousand lines, in order of appearance.

    Raises:
        UsageError: the file cannot be read, or none of these lines is an object.
    """
    lines = JsonLines(path)
    names = dict.fromkeys(name for row in itertools.islice(lines, _LINES_FOR_NAMES) for name in row)
    if not names and (why := lines.damage() or ["no line in it"]):
        raise UsageError(f"cannot read {path}: expected a JSON object in each line; {why[0]}")
    return list(names)


def read_json(
    path: Path, names: Sequence[str], lists: Sequence[str] = ()
) -> tuple[dict[str, pa.Array], np.ndarray, list[str]]:
    """Read some columns of texts, and list the lines that were left out.

    A name that a line lacks is null there. A line is left out if it is not an object or holds
    anything but a text or a number under a name; so is everything after damage to the compression.

    Args:
        path: the file.
        names: of the columns.
        lists: those that may also hold lists of texts; all of their values become lists.

    Returns:
        The columns; the lines (from 0, int64) that they lack; a description of these.

    Raises:
        UsageError: the file cannot be read.
    """
    lines = JsonLines(path, names, lists)
    kinds = {
        name: pa.large_list(pa.large_string()) if name in lists else pa.large_string()
        for name in names
    }
    pieces: dict[str, list[pa.Array]] = {name: [pa.array([], kinds[name])] for name in names}
    rows = iter(lines)
    while piece := list(itertools.islice(rows, _PIECE)):
        for name in names:
            pieces[name].append(pa.array([row.get(name) for row in piece], kinds[name]))
    columns = {name: pa.concat_arrays(pieces[name]) for name in names}
    return columns, np.array(lines.without, dtype=np.int64), lines.damage()


class JsonLines:
    """The usable objects of a file; `without`: the other lines that were read so far, from 0."""

    def __init__(self, path: Path, names: Sequence[str] = (), lists: Sequence[str] = ()) -> None:
        self.path = path
        self.names = names
        self.lists = lists
        self.without: list[int] = []
        self._left_out = 0
        self._first = ""
        self._breaks_off = ""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        number = 0
        try:
            with gzip.open(self.path) if self.path.suffix == ".gz" else open(self.path, "rb") as f:
                for number, line in enumerate(f, 1):
                    if not line.strip():
                        self.without.append(number - 1)
                        continue
                    try:
                        row = _object(line)
                        texts = {
                            name: (_texts if name in self.lists else _text)(row.get(name), name)
                            for name in self.names
                        }
                        yield {**row, **texts}
                    except ValueError as error:
                        self.without.append(number - 1)
                        self._left_out += 1
                        self._first = self._first or f"line {number}: {error}"
        except (OSError, EOFError, zlib.error) as error:
            if number == 0:
                raise UsageError(f"cannot read {self.path}: {error}") from error
            self._breaks_off = f"{self.path}: breaks off after line {number}: {error}"

    def damage(self) -> list[str]:
        """A description of the lines that were not usable so far."""
        if not self._left_out:
            return [self._breaks_off] if self._breaks_off else []
        left_out = (
            f"{self.path}: {plural(self._left_out, 'line')} left out, the first is {self._first}"
        )
        return [left_out, *([self._breaks_off] if self._breaks_off else [])]


def _object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("no JSON") from error
    if not isinstance(row, dict):
        raise ValueError(f"{_kind(row)}, not an object")
    return row


def _texts(value: Any, name: str) -> list[str | None] | None:
    """Convert a list's values to texts, or a single value to a list of one text."""
    if not isinstance(value, list):
        return None if value is None else [_text(value, name)]
    return [_text(one, name) for one in value]


def _text(value: Any, name: str) -> str | None:
    """Convert a value to a text; numbers become their notation, as in CSV."""
    if value is None or (isinstance(value, str) and value.isascii()):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{name!r} holds {_kind(value)}, not a text")
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise ValueError(f"{name!r} is not Unicode text") from error
    return text


def _kind(value: Any) -> str:
    words = {dict: "an object", list: "a list", bool: "true or false", str: "a text"}
    return words.get(type(value), "null" if value is None else "a number")
