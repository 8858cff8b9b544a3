"""Opening the sources of pairs that a user names: the glyphs, shards, tables, grey images."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import Any

from webdataset.shardlists import expand_urls

from megabatch.config.file import COMMAND, is_url
from megabatch.data.cache import local_copies
from megabatch.data.glyphs import load_glyphs
from megabatch.data.grey import GreyPairs, is_grey_folder
from megabatch.data.mixture import SEPARATOR, MixedPairs, parse_factors
from megabatch.data.pairs import PairDataset, check_usable
from megabatch.data.shards import ShardPairs
from megabatch.errors import UsageError
from megabatch.imports import named_extras

ALL_TABLES = (".csv", ".tsv", ".parquet", ".jsonl", ".jsonl.gz", ".arrow")


@named_extras()
def open_pairs(
    spec: str,
    *,
    image_column: str | None = None,
    query_column: str | None = None,
    caption_column: str | None = None,
    separator: str | None = None,
    negatives: bool = False,
    negative_column: str | None = None,
    upsampling_factors: str | None = None,
) -> PairDataset:
    """Open a data set of pairs: of images with captions, or of texts with texts.

    Args:
        spec: one or several sources joined by `::`. A source is "glyphs"; or a path of .tar shards
            or of .csv, .tsv, .parquet, .jsonl, .jsonl.gz or .arrow tables: one file, a pattern with
            braces (`{00000..00099}.tar`) or `*`, or a folder of such files; or a folder of grey
            images, see `GreyPairs`. Also a URL that fsspec opens (s3://, gs://, https://) with
            braces or `*`, or `pipe:` and a command that prints a shard; such files are copied into
            the cache folder first.
        image_column: column of image paths or bytes; default: the first of filepath, image,
            image_path, file_name.
        query_column: column of first texts, instead of images; default, in tables without an image
            column: the first of query, anchor, question, sentence1.
        caption_column: column of captions; default: the first of title, caption, text, and with
            queries before those positive, answer, sentence2. All sources have these names.
        separator: field separator of text tables; default: a tab if the header has one, or a comma.
        negatives: whether pairs have negatives, texts from further columns of tables.
        negative_column: names of these columns, joined by commas; default: all of negative,
            negatives, negative_1, negative_2 and so on.
        upsampling_factors: how often an epoch visits each sample of a source, one factor per
            source, joined by `::`; see `MixedPairs`. Default: once.

    Raises:
        UsageError: nothing matches, files of a source are of different kinds, a column is missing,
            no sample of a source can be used, factors have a wrong number or size; MissingLibrary,
            if a library is not installed.
    """
    specs = split_spec(spec)
    factors = None  # parsed before anything that takes long
    if upsampling_factors is not None:
        factors = parse_factors(upsampling_factors, len(specs))
    columns = {
        "image": image_column,
        "query": query_column,
        "caption": caption_column,
        "separator": separator,
        "negatives": negatives,
        "negative": negative_column,
    }
    sources = [_open_one(one, columns) for one in specs]
    for name, source in zip(specs, sources, strict=True):
        check_usable(source, name)
    if len(sources) == 1 and factors is None:
        return sources[0]
    return MixedPairs(sources, specs, factors)


def split_spec(spec: str) -> list[str]:
    """Split a specification into its sources; an existing path is one source, whatever its name.

    Raises:
        UsageError: a source is empty.
    """
    specs = [spec] if Path(spec).exists() else spec.split(SEPARATOR)
    if not all(specs):
        raise UsageError(f"{spec!r}: expected sources joined by {SEPARATOR!r}, but one is empty")
    return specs


def _open_one(spec: str, columns: dict[str, Any]) -> PairDataset:
    is_array = spec == "glyphs" or is_grey_folder(spec)
    paths = [] if is_array else find_files(spec)
    if paths and paths[0].name.endswith(ALL_TABLES):
        from megabatch.data.tables import Wanted, open_tables  # only tables need pyarrow

        return open_tables(paths, Wanted(**columns))
    if columns["negatives"]:
        raise UsageError(
            f"--hard-negatives: {spec} has none; expected tables, with columns of them"
        )
    if paths:
        return ShardPairs(paths)
    return load_glyphs().split("train") if spec == "glyphs" else GreyPairs(spec)


def find_files(spec: str) -> list[Path]:
    """Return the files that a path, pattern, folder or URL names, all shards or all tables.

    Raises:
        UsageError: names the part that matches nothing, or a file of no known kind.
    """
    if Path(spec).exists():
        paths = _matches(spec, spec)
    elif spec.startswith(COMMAND) or is_url(spec):
        paths = local_copies(spec)
    else:
        paths = [path for pattern in expand_urls(spec) for path in _matches(pattern, spec)]
    tables = [path for path in paths if path.name.endswith(ALL_TABLES)]
    # Compressed shards too: their reader has a message for them.
    shards = [path for path in paths if ".tar" in path.suffixes[-2:] or path.suffix == ".tgz"]
    if unknown := set(paths) - {*tables, *shards}:
        raise UsageError(
            f"{min(unknown)} is neither a .tar shard nor a {', '.join(ALL_TABLES)} table (from "
            f"{spec!r})"
        )
    if shards and tables:
        raise UsageError(f"{spec!r} mixes shards ({shards[0]}) and tables ({tables[0]})")
    return paths


def _matches(pattern: str, spec: str) -> list[Path]:
    path = Path(pattern)
    if path.is_dir():
        # Without what Hugging Face's datasets has cached beside its data.
        files = sorted(p for p in path.iterdir() if not p.match("cache-*.arrow"))
        # Shards first: img2dataset leaves a table of metadata, without images, next to each.
        for kinds in ((".tar",), ALL_TABLES):
            if found := [p for p in files if p.is_file() and p.name.endswith(kinds)]:
                saved = re.fullmatch(r"data-\d+-of-(\d+)\.arrow", found[0].name)  # by datasets
                if saved and len(found) != int(saved[1]):
                    raise UsageError(f"{path} has {len(found)} of the {int(saved[1])} files saved")
                return found
        raise UsageError(
            f"no .tar shards and no {', '.join(ALL_TABLES)} tables in the folder {path}"
        )
    found = [path] if path.exists() else [Path(p) for p in sorted(glob.glob(pattern))]
    if not found:
        within = "" if pattern == spec else f" (from {spec!r})"
        raise UsageError(f"nothing matches {pattern}{within}")
    return found
