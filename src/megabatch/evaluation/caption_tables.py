"""Images with captions listed in tables: CSV, TSV, Parquet, JSON lines, Arrow."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megabatch.data.arrow_files import MappedColumn, MappedTable
from megabatch.data.json_lines import JsonLines, json_names
from megabatch.data.pairs import BadSample, decode_image
from megabatch.data.tables import CAPTION_COLUMNS, IMAGE_COLUMNS
from megabatch.errors import UsageError
from megabatch.evaluation.samples import Captions, Sample, clean_captions


@dataclass(frozen=True)
class Listed:
    """An image with all captions that a list has for it.

    image: a path, a file's bytes, or where in an Arrow file either stands.
    """

    image: Any
    captions: list[Any]
    key: str


@dataclass(frozen=True)
class ListedImages:
    """Images named by a list; `damage`: what of the list could not be used."""

    images: Sequence[Listed]
    damage: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample[Captions]:
        listed = self.images[index]
        captions = clean_captions(listed.captions, listed.key)
        data = _image_bytes(listed.image, listed.key)
        return Sample(decode_image(data, listed.key), captions, listed.key)


@dataclass(frozen=True, eq=False)
class _Mapped:
    """An image in a mapped Arrow file: read when it is asked for."""

    column: MappedColumn
    row: int
    folder: Path

    def read(self) -> Any:
        """A path or the bytes."""
        return _resolved(self.column[self.row].as_py(), self.folder)


def open_tables(
    paths: list[Path],
    image_folder: Path | None,
    image: str | None,
    caption: str | None,
    separator: str | None,
) -> ListedImages:
    """Images of tables with a row for each caption, or with a list of captions in each row.

    Args:
        paths: .csv, .tsv, .parquet, .jsonl, .jsonl.gz and .arrow files.
        image_folder: where the images are that they name; default: each table's folder.
        image, caption: columns; default: the first of IMAGE_COLUMNS, of CAPTION_COLUMNS.
        separator: of .csv and .tsv; default: a comma, in .tsv a tab.

    Raises:
        UsageError: a file cannot be read, a column is missing, there is no row.
    """
    images, damage = [], []
    for path in paths:
        rows, left_out = _read_table(path, image, caption, separator)
        images += _joined(rows, path, image_folder or path.parent)
        damage += left_out
    if not images:
        raise UsageError("; ".join([f"no rows in {', '.join(map(str, paths[:3]))}", *damage]))
    return ListedImages(images, damage)


def _joined(rows: Iterable[tuple[Any, Any]], path: Path, folder: Path) -> list[Listed]:
    """Images in order of first use, each with the captions of all its rows."""
    found: dict[Any, Listed] = {}
    for row, (picture, value) in enumerate(rows, 1):
        if isinstance(picture, MappedColumn):
            picture = _Mapped(picture, row - 1, folder)
        else:
            picture = _resolved(picture, folder)
        # Without a picture a row is an image of its own, to be counted as one that is missing.
        place = picture if picture and isinstance(picture, (str, bytes)) else row
        listed = found.setdefault(place, Listed(picture, [], f"{path.name}:row {row}"))
        listed.captions.extend(value if isinstance(value, list) else [value])
    return list(found.values())


def _resolved(picture: Any, folder: Path) -> Any:
    if isinstance(picture, dict):  # Hugging Face's struct: the bytes, or else the path
        picture = picture.get("bytes") or picture.get("path")
    return str(folder / picture) if isinstance(picture, str) and picture else picture


def _read_table(
    path: Path, image: str | None, caption: str | None, separator: str | None
) -> tuple[Iterable[tuple[Any, Any]], list[str]]:
    """Image and caption or captions of each row; and what rows were left out, in words."""
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _read_json(path, image, caption)
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path, image, caption), []
        if path.suffix == ".arrow":
            return _read_arrow(path, image, caption), []
        return _read_csv(path, image, caption, separator)
    except (OSError, pyarrow.ArrowException, csv.Error, TypeError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {' '.join(str(error).split())}") from error


def _read_parquet(path: Path, image: str | None, caption: str | None) -> Iterable[tuple[Any, Any]]:
    image, caption = _choose(image, caption, pyarrow.parquet.read_schema(path).names, path)
    table = pyarrow.parquet.read_table(path, columns=[image, caption])
    return zip(table.column(image).to_pylist(), table.column(caption).to_pylist(), strict=True)


def _read_arrow(path: Path, image: str | None, caption: str | None) -> Iterable[tuple[Any, Any]]:
    table = MappedTable(path)
    image, caption = _choose(image, caption, table.data.column_names, path)
    pictures, captions = MappedColumn(table, image), table.data.column(caption).to_pylist()
    paths = (pyarrow.types.is_string, pyarrow.types.is_large_string)
    if any(holds(pictures.type) for holds in paths):
        return zip(table.data.column(image).to_pylist(), captions, strict=True)
    return ((pictures, caption) for caption in captions)


def _read_json(
    path: Path, image: str | None, caption: str | None
) -> tuple[Iterable[tuple[Any, Any]], list[str]]:
    image, caption = _choose(image, caption, json_names(path), path)
    lines = JsonLines(path)
    rows = [(row.get(image), _number_as_text(row.get(caption))) for row in lines]
    return rows, lines.damage()


def _number_as_text(value: Any) -> Any:
    """As tables to train on have it."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _read_csv(
    path: Path, image: str | None, caption: str | None, separator: str | None
) -> tuple[list[tuple[str, str]], list[str]]:
    delimiter = separator or ("\t" if path.suffix == ".tsv" else ",")
    found, left_out = [], 0
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = csv.reader(file, delimiter=delimiter)
        names = next(rows, [])
        places = [names.index(name) for name in _choose(image, caption, names, path)]
        for row in filter(None, rows):
            if len(row) != len(names) or "\ufffd" in row[places[1]]:  # was no UTF-8
                left_out += 1
                continue
            found.append((row[places[0]], row[places[1]]))
    damage = f"{path}: {left_out} rows left out: a wrong number of fields, or not UTF-8"
    return found, [damage] if left_out else []


def _choose(
    image: str | None, caption: str | None, present: list[str], path: Path
) -> tuple[str, str]:
    """The image's and the captions' column."""
    chosen = []
    wanted = (("image", image, IMAGE_COLUMNS), ("caption", caption, CAPTION_COLUMNS))
    for what, name, usual in wanted:
        candidates = usual if name is None else (name,)
        found = [candidate for candidate in candidates if candidate in present]
        if not found:
            raise UsageError(
                f"{path} has no {what} column {' or '.join(map(repr, candidates))};"
                f" its columns are {', '.join(map(repr, present))}"
            )
        chosen.append(found[0])
    return chosen[0], chosen[1]


def _image_bytes(value: Any, key: str) -> bytes:
    if isinstance(value, _Mapped):
        value = value.read()
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise BadSample("no image", key)
    try:
        return Path(value).read_bytes()
    except (OSError, ValueError) as error:
        raise BadSample("missing image file", key) from error
