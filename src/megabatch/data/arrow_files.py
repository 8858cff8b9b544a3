"""Arrow files, mapped into memory: a set may be larger than it, and processes share it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa


class MappedColumn:
    """A column of a mapped file; pickled it is the path alone."""

    def __init__(self, table: MappedTable, name: str) -> None:
        self._made_of = table, name
        self._values: pa.ChunkedArray = table.data.column(name)

    @property
    def type(self) -> pa.DataType:
        """What the values are."""
        return self._values.type

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> Any:
        return self._values[row]

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedColumn, self._made_of


class MappedTable:
    """An Arrow file, a stream or one with an index at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        source = pa.memory_map(str(path))
        indexed = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pa.ipc.open_file(source) if indexed else pa.ipc.open_stream(source)
        self.data: pa.Table = reader.read_all()

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedTable, (self.path,)
