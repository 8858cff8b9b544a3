"""Opening the sources of pairs that a user names: the glyphs, shards, tables, saved folders."""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from webdataset.shardlists import expand_urls

from megabatch.data.glyphs import SPLITS, load_glyphs
from megabatch.data.grey import GreyPairs, is_grey_folder
from megabatch.data.mixture import SEPARATOR, check_factors, mix
from megabatch.data.pairs import PairDataset
from megabatch.errors import UsageError, one_line
from megabatch.imports import named_extras
from megabatch.references import COMMAND, is_url

TABLES = (".csv", ".tsv", ".parquet")
ALL_TABLES = (*TABLES, ".jsonl", ".jsonl.gz", ".arrow")

# Files of a folder that `save_to_disk` of Hugging Face's datasets writes, of one data set, and of
# several splits, each in a folder of its own. Read without that library, which would bring pandas
# and a dozen more packages along for two small JSON files next to Arrow streams.
_STATE, _SAVED_SPLITS = "state.json", "dataset_dict.json"


@named_extras()
def open_pairs(
    spec: str,
    *,
    split: str | None = None,
    image_column: str | None = None,
    query_column: str | None = None,
    caption_column: str | None = None,
    separator: str | None = None,
    negatives: bool | None = False,
    negative_column: str | None = None,
    upsampling_factors: Sequence[float] | None = None,
) -> PairDataset:
    """Open a data set of pairs: of images with captions, or of texts with texts.

    Args:
        spec: one or several sources joined by `::`. A source is "glyphs"; or a path of .tar shards
            or of .csv, .tsv, .parquet, .jsonl, .jsonl.gz or .arrow tables: one file, a pattern with
            braces (`{00000..00099}.tar`) or `*`, or a folder of such files; or a folder that
            `save_to_disk` of Hugging Face's datasets wrote (of several splits, train is read). Also
            a URL that fsspec opens (s3://, gs://, https://) with braces or `*`, or `pipe:` and a
            command that prints a shard; such files are copied into the cache folder first.
        split: part of the glyph set: train (default), faces, characters, all.
        image_column: column of image paths or bytes; default: the first of filepath, image,
            image_path, file_name.
        query_column: column of first texts, instead of images; default, in tables without an image
            column: the first of query, anchor, question, sentence1.
        caption_column: column of captions; default: the first of title, caption, text, and with
            queries before those positive, answer, sentence2. The three columns may also be several
            joined by `::`, one per source.
        separator: field separator of text tables; default: a comma, in .tsv files a tab.
        negatives: whether pairs have negatives, texts from further columns of tables; None: if a
            table has such columns.
        negative_column: names of these columns, joined by commas; default: all of negative,
            negatives, negative_1, negative_2 and so on. Several by `::`, as above.
        upsampling_factors: how often an epoch visits each sample of a source, one factor per
            source; see `MixedPairs`. Default: once.

    Raises:
        UsageError: nothing matches, files of a source are of different kinds, a column is missing,
            factors have a wrong number or size; MissingLibrary, if a library is not installed.
    """
    specs = split_spec(spec)
    if upsampling_factors is not None:  # before anything that takes long
        check_factors(upsampling_factors, len(specs))
    columns = {
        "image_column": one_each(image_column, "image_column", specs),
        "query_column": one_each(query_column, "query_column", specs),
        "caption_column": one_each(caption_column, "caption_column", specs),
        "negative_column": one_each(negative_column, "negative_column", specs),
    }
    shared = {"separator": separator, "negatives": negatives}
    sources = []
    for number, one in enumerate(specs):
        own = {option: names[number] for option, names in columns.items()}
        sources.append(_open_one(one, split, {**own, **shared}))
    if len(sources) == 1 and upsampling_factors is None:
        return sources[0]
    return mix(sources, specs, upsampling_factors)


def split_spec(spec: str) -> list[str]:
    """Split a specification into its sources; an existing path is one source, whatever its name.

    Raises:
        UsageError: a source is empty.
    """
    specs = [spec] if Path(spec).exists() else spec.split(SEPARATOR)
    if not all(specs):
        raise UsageError(f"{spec!r}: expected sources joined by {SEPARATOR!r}, but one is empty")
    return specs


#: The columns' options on the command line.
_OPTIONS = {
    "image_column": "--csv-img-key",
    "query_column": "--csv-query-key",
    "caption_column": "--csv-caption-key",
    "negative_column": "--csv-negative-key",
}


def one_each(names: str | None, column: str, specs: list[str]) -> list[str | None]:
    """Return a column's name for each source: the same for all, or several joined like sources.

    Raises:
        UsageError: the number of names is not that of the sources; `column` is for the message.
    """
    if names is None or SEPARATOR not in names or len(specs) == 1:
        return [names] * len(specs)
    each = names.split(SEPARATOR)
    if len(each) != len(specs):
        raise UsageError(
            f"{_OPTIONS[column]}: {names!r} names {len(each)}; expected one, or one for each of "
            f"{len(specs)} sources"
        )
    return [name or None for name in each]


def _open_one(spec: str, split: str | None, columns: dict[str, Any]) -> PairDataset:
    if spec == "glyphs":
        _refuse_negatives(spec, columns)
        if split is not None and split not in SPLITS:
            raise UsageError(f"glyphs have no split {split!r}; expected one of {', '.join(SPLITS)}")
        return load_glyphs().split(split or "train")
    if split is not None:
        raise UsageError(f"split {split!r}: only the glyphs have splits, not {spec}")
    if is_grey_folder(spec):
        _refuse_negatives(spec, columns)
        return GreyPairs(spec)
    paths = find_files(spec)
    if _is_table(paths[0]):
        from megabatch.data.tables import TablePairs  # only tables need pyarrow

        return TablePairs(paths, **columns)
    from megabatch.data.shards import ShardPairs

    _refuse_negatives(spec, columns)
    return ShardPairs(paths)


def _refuse_negatives(spec: str, columns: dict[str, Any]) -> None:
    if columns["negatives"]:
        raise UsageError(
            f"--hard-negatives: {spec} has none; expected tables, with columns of them"
        )


def find_files(spec: str) -> list[Path]:
    """Return the files that a path, pattern or folder names, all shards or all tables.

    Raises:
        UsageError: names the part that matches nothing, or a file of no known kind.
    """
    if _is_saved(Path(spec)):
        return _saved_files(Path(spec))
    if not Path(spec).exists() and (spec.startswith(COMMAND) or is_url(spec)):
        from megabatch.data.remote import local_copies

        return _of_one_kind(local_copies(spec), spec)
    paths: list[Path] = []
    for pattern in [spec] if Path(spec).exists() else expand_urls(spec):
        paths += _matches(pattern, spec)
    return _of_one_kind(paths, spec)


def _of_one_kind(paths: list[Path], spec: str) -> list[Path]:
    """The paths; a UsageError unless all are shards, or all tables."""
    tables = [path for path in paths if _is_table(path)]
    # Compressed ones too: the reader has a message for them.
    shards = [path for path in paths if ".tar" in path.suffixes[-2:] or path.suffix == ".tgz"]
    shards = [path for path in shards if path not in tables]
    if unknown := set(paths) - set(shards) - set(tables):
        raise UsageError(
            f"{min(unknown)} is neither a .tar shard nor a {', '.join(ALL_TABLES)} table (from "
            f"{spec!r})"
        )
    if shards and tables:
        raise UsageError(f"{spec!r} mixes shards ({shards[0]}) and tables ({tables[0]})")
    return paths


def _is_table(path: Path) -> bool:
    return path.name.endswith(ALL_TABLES)


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
    # Shards first: img2dataset leaves a table of metadata, without images, next to each.
    for kinds in ((".tar",), ALL_TABLES):
        if found := sorted(p for p in folder.iterdir() if p.name.endswith(kinds) and p.is_file()):
            return found
    raise UsageError(f"no .tar shards and no {', '.join(ALL_TABLES)} tables in the folder {folder}")


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of Hugging Face's datasets wrote this folder."""
    return (folder / _STATE).is_file() or (folder / _SAVED_SPLITS).is_file()


def _saved_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder that `save_to_disk` wrote; of several splits, those of train.

    Raises:
        UsageError: a file is missing or unreadable; there are splits, but no train.
    """
    if not (folder / _STATE).is_file():
        splits = _read_entry(folder / _SAVED_SPLITS, "splits")
        if "train" not in splits:
            others = ", ".join(map(repr, splits)) or "none"
            raise UsageError(
                f"{folder} has no split 'train', but {others}: give the folder of one of them"
            )
        return _saved_files(folder / "train")
    state = folder / _STATE
    try:
        files = [folder / entry["filename"] for entry in _read_entry(state, "_data_files")]
    except (KeyError, TypeError) as error:
        raise UsageError(f"{state} does not name its files as datasets does") from error
    if _read_entry(state, "_indices_data_files", None):
        raise UsageError(
            f"{folder} was saved by an old version of datasets, with its rows selected by a second "
            "file; load and save it once more with datasets 2 or newer"
        )
    if missing := [path for path in files if not path.is_file()]:
        raise UsageError(f"{missing[0]} is missing, which {state} names")
    if not files:
        raise UsageError(f"no rows in {folder}")
    return files


def _read_entry(path: Path, *key_and_default: Any) -> Any:
    """Read one entry of a JSON file that holds an object."""
    key, *default = key_and_default
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {one_line(error)}") from error
    if not isinstance(document, dict) or (not default and not isinstance(document.get(key), list)):
        raise UsageError(f"{path} is not what datasets writes: expected a list {key!r} in it")
    return document.get(key)
