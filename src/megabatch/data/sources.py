"""From what the user names to pairs."""

from __future__ import annotations

import glob
from pathlib import Path

from webdataset.shardlists import expand_urls

from megabatch.data.glyphs import SPLITS, load_glyphs
from megabatch.data.grey import GreyPairs, is_grey_folder
from megabatch.data.pairs import PairDataset
from megabatch.data.svg import SVG_SIZE
from megabatch.errors import UsageError

TABLES = (".csv", ".tsv", ".parquet")


def open_pairs(
    spec: str,
    *,
    split: str | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    separator: str | None = None,
    svg_size: int = SVG_SIZE,
) -> PairDataset:
    """Open a data set of image-caption pairs.

    Args:
        spec: "glyphs"; or a path of .tar shards or .csv, .tsv, .parquet tables: one file, a
            pattern with braces (`{00000..00099}.tar`) or `*`, several joined by `::`, or a folder
            of such files.
        split: part of the glyph set: train (default), faces, characters, all.
        image_column: column of image paths or bytes; default: the first of filepath, image,
            image_path, file_name.
        caption_column: column of captions; default: the first of title, caption, text.
        separator: field separator of text tables; default: a comma, in .tsv files a tab.
        svg_size: pixels of the longer side that .svg images in shards are drawn with.

    Raises:
        UsageError: nothing matches, files are of different kinds, a column is missing.
    """
    if spec == "glyphs":
        if split is not None and split not in SPLITS:
            raise UsageError(f"glyphs have no split {split!r}; expected one of {', '.join(SPLITS)}")
        return load_glyphs().split(split or "train")
    if split is not None:
        raise UsageError(f"split {split!r}: only the glyphs have splits, not {spec}")
    if is_grey_folder(spec):
        return GreyPairs(spec)
    paths = find_files(spec)
    if paths[0].suffix in TABLES:
        from megabatch.data.tables import TablePairs  # pyarrow, for those who have tables

        return TablePairs(
            paths, image_column=image_column, caption_column=caption_column, separator=separator
        )
    from megabatch.data.shards import ShardPairs

    return ShardPairs(paths, svg_size=svg_size)


def find_files(spec: str) -> list[Path]:
    """Return the files that a path, pattern or folder names, all shards or all tables.

    Raises:
        UsageError: names the part that matches nothing, or a file of no known kind.
    """
    paths: list[Path] = []
    for pattern in [spec] if Path(spec).exists() else expand_urls(spec):
        paths += _matches(pattern, spec)
    tables = [path for path in paths if path.suffix in TABLES]
    # Compressed ones too: the reader says what is wrong with them.
    shards = [path for path in paths if ".tar" in path.suffixes[-2:] or path.suffix == ".tgz"]
    shards = [path for path in shards if path not in tables]
    if unknown := set(paths) - set(shards) - set(tables):
        raise UsageError(
            f"{min(unknown)} is no .tar shard and no {', '.join(TABLES)} table (from {spec!r})"
        )
    if shards and tables:
        raise UsageError(f"{spec!r} mixes shards ({shards[0]}) and tables ({tables[0]})")
    return paths


def _matches(pattern: str, spec: str) -> list[Path]:
    path = Path(pattern)
    if path.is_dir():
        return _in_folder(path)
    found = [path] if path.exists() else [Path(p) for p in sorted(glob.glob(pattern))]
    if not found:
        within = "" if pattern == spec else f" (from {spec!r})"
        raise UsageError(f"nothing matches {pattern}{within}")
    return found


def _in_folder(folder: Path) -> list[Path]:
    # Shards first: img2dataset leaves a table of metadata, with no image in it, beside each.
    for kinds in ((".tar",), TABLES):
        if found := sorted(p for p in folder.iterdir() if p.suffix in kinds and p.is_file()):
            return found
    raise UsageError(f"no .tar shards and no {', '.join(TABLES)} tables in the folder {folder}")
