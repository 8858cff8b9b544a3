"""Images with captions listed in tables: CSV, TSV, Parquet, JSON lines, Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megabatch.data.arrow_files import MappedColumn
from megabatch.data.image_files import ImageFiles
from megabatch.data.pairs import BadSample, decode_image
from megabatch.data.table_files import Column
from megabatch.data.tables import Table, Wanted, is_text, look_at_images, no_rows, open_table
from megabatch.errors import UsageError
from megabatch.evaluation.samples import Captions, Sample, clean_captions, is_short


@dataclass(frozen=True)
class Listed:
    """An image with all captions that a list has for it.

    image: a path, a file's bytes, or where in an Arrow file either stands; files: reads it.
    """

    image: Any
    captions: list[Any]
    key: str
    files: ImageFiles


@dataclass(frozen=True)
class ListedImages:
    """Images named by a list.

    damage: what of the list could not be used; notes: what else a user should know of it.
    """

    images: Sequence[Listed]
    damage: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample[Captions]:
        listed = self.images[index]
        captions = clean_captions(listed.captions, listed.key)
        image = listed.image.read() if isinstance(listed.image, _Mapped) else listed.image
        data = listed.files.read(image, listed.key)
        return Sample(decode_image(data, listed.key), captions, listed.key)


@dataclass(frozen=True, eq=False)
class _Mapped:
    """An image in a mapped Arrow file: read when it is asked for."""

    column: Column
    row: int

    def read(self) -> Any:
        """The bytes, or the struct with them."""
        return self.column[self.row].as_py()


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
        image_folder: where the images are that they name; default: each table's folder, else the
            working directory.
        image, caption, separator: as for `megabatch.data.TablePairs`.

    Raises:
        UsageError: as for `megabatch.data.TablePairs`.
    """
    wanted = Wanted(image, None, caption, separator, lists=True)
    images: list[Listed] = []
    damage: list[str] = []
    notes: list[str] = []
    for path in paths:
        table = open_table(path, wanted)
        if table.first == "text":
            raise UsageError(f"{path} has pairs of texts; expected images (--csv-img-key)")
        files = ImageFiles((image_folder,)) if image_folder else ImageFiles.beside(path)
        found, left_out = _joined(table, files)
        images += found
        damage += table.columns.damage + left_out
        notes += table.notes + (look_at_images(table, files) if len(table) else [])
    if not images:
        raise no_rows(paths, damage)
    return ListedImages(images, damage, notes)


def _joined(table: Table, files: ImageFiles) -> tuple[list[Listed], list[str]]:
    """Images in order of first use, each with the captions of all its rows; what is left out."""
    column = table.firsts
    in_file = isinstance(column, MappedColumn) and not is_text(column.type)
    found: dict[Any, Listed] = {}
    bad: list[BadSample] = []
    for row in range(len(table)):
        key = table.columns.key(row)
        try:
            picture = _Mapped(column, row) if in_file else _plain(table.first_of(row))
            value = table.caption_of(row)
        except BadSample as sample:
            bad.append(sample)
            continue
        # Without a picture a row is an image of its own, to be counted as one that is missing.
        place = row if not picture or in_file else picture
        place = str(Path(place)) if isinstance(place, str) else place
        listed = found.setdefault(place, Listed(picture, [], key, files))
        listed.captions.extend(value if isinstance(value, list) else [value])
    path, rest = table.columns.path, list(found.values())
    told = (
        [f"{path}: {len(bad)} rows left out, the first is {bad[0].key}: {bad[0].reason}"]
        if bad
        else []
    )
    empty = [listed for listed in rest if is_short(listed.captions)]
    if empty:
        told.append(
            f"{path}: of {len(empty)} images with several captions one or more are empty and left "
            f"out, the first is {empty[0].key}"
        )
    return rest, told


def _plain(picture: Any) -> Any:
    if isinstance(picture, dict):  # Hugging Face's struct: the bytes, or else the path
        return picture.get("bytes") or picture.get("path")
    return picture
