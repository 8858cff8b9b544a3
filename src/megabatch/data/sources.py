"""Opening the sources of pairs that a user names: the glyphs, shards, tables."""

from __future__ import annotations

import glob
import math
import re
from pathlib import Path
from typing import Any

from webdataset.shardlists import expand_urls

from megabatch.config.file import COMMAND
from megabatch.config.settings import Batches
from megabatch.data.cache import is_url, local_copies
from megabatch.data.glyphs import load_glyphs
from megabatch.data.order import FACTORS, MixedPairs
from megabatch.data.pairs import PairDataset, PrefixedPairs, check_usable
from megabatch.data.shards import ShardPairs
from megabatch.data.tables import Wanted, open_tables
from megabatch.errors import UsageError, plural
from megabatch.imports import named_extras

SEPARATOR = "::"
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
    query_prefix: str | None = None,
    caption_prefix: str | None = None,
    upsampling_factors: str | None = None,
    temperature: float | None = None,
    batches: Batches = "mixed",
) -> PairDataset:
    """Open a data set of pairs: of images with captions, or of texts with texts.

    Args:
        spec: one or several sources joined by `::`. A source is "glyphs"; or a path of .tar shards
            or of .csv, .tsv, .parquet, .jsonl, .jsonl.gz or .arrow tables: one file, a pattern with
            braces (`{00000..00099}.tar`) or `*`, or a folder of such files. Also a URL that fsspec
            opens (s3://, gs://, https://) with braces or `*`, or `pipe:` and a command that prints
            a shard, see `local_copies`.
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
        query_prefix: what each first text begins with, one prefix for all sources or one per
            source, joined by `::`; `\\n` is a newline. Not for images.
        caption_prefix: likewise, of captions and negatives; ids are those of captions without it.
        upsampling_factors: how often an epoch visits each sample of a source, one factor per
            source, joined by `::`. Default: once.
        temperature, batches: how sources are mixed, like the factors: see `MixedPairs`.

    Raises:
        UsageError: nothing matches, files of a source are of different kinds, a column is missing,
            no sample of a source can be used, factors or prefixes have a wrong number or size;
            sources cannot be mixed like this; MissingLibrary, if a library is not installed.
    """
    specs = split_spec(spec)
    queries = prefixes_of("--query-prefix", query_prefix, len(specs))
    captions = prefixes_of("--caption-prefix", caption_prefix, len(specs))
    factors = parse_factors(upsampling_factors, len(specs))
    wanted = Wanted(
        *(image_column, query_column, caption_column, separator),
        negatives=negatives,
        negative=negative_column,
    )
    sources = [_open_one(one, wanted) for one in specs]
    for i, (source, name) in enumerate(zip(sources, specs, strict=True)):
        check_usable(source, name)
        if queries[i] and getattr(source, "first", "image") == "image":
            raise UsageError(f"--query-prefix {queries[i]!r}: {name} has images; expected texts")
        if queries[i] or captions[i]:
            sources[i] = PrefixedPairs(source, queries[i], captions[i])
    if len(sources) == 1 and (factors, temperature, batches) == (None, None, "mixed"):
        return sources[0]
    return MixedPairs(sources, specs, factors, temperature, batches)


def open_configured(spec: str, settings: Any, *, negatives: bool) -> PairDataset:
    """`open_pairs` with the settings of a training run or of `megabatch data inspect`."""
    return open_pairs(
        spec,
        image_column=settings.csv_img_key,
        query_column=settings.csv_query_key,
        caption_column=settings.csv_caption_key,
        separator=settings.csv_separator,
        negatives=negatives,
        negative_column=settings.csv_negative_key,
        query_prefix=settings.query_prefix,
        caption_prefix=settings.caption_prefix,
        upsampling_factors=settings.train_data_upsampling_factors,
        temperature=settings.train_data_temperature,
        batches=settings.train_data_batches,
    )


def split_spec(spec: str) -> list[str]:
    """Split a specification into its sources; an existing path is one source, whatever its name.

    Raises:
        UsageError: a source is empty.
    """
    specs = [spec] if Path(spec).exists() else spec.split(SEPARATOR)
    if not all(specs):
        raise UsageError(f"{spec!r}: expected sources joined by {SEPARATOR!r}, but one is empty")
    return specs


def parse_factors(text: str | None, sources: int) -> list[float] | None:
    """Factors in OpenCLIP's notation, "1::2"; a UsageError if not numbers above 0, one a source."""
    if text is None:
        return None
    try:
        factors = [float(part) for part in text.split(SEPARATOR)]
    except ValueError:
        factors = []
    if len(factors) != sources or not all(0 < factor < math.inf for factor in factors):
        numbers = f"{plural(sources, 'number')} above 0, one for each source"
        raise UsageError(f"{FACTORS}: {text!r}; expected {numbers}, joined by '::', as in '1::2'")
    return factors


def split_prefixes(text: str | None) -> list[str]:
    """The prefixes in a text, "query: ::question: ", in which `\\n` is a newline."""
    return (text or "").replace("\\n", "\n").split(SEPARATOR)


def prefixes_of(option: str, text: str | None, sources: int) -> list[str]:
    """The prefix of each source: one for all, or one each, or else it raises a UsageError."""
    prefixes = split_prefixes(text)
    if len(prefixes) not in (1, sources):
        expected = f"one prefix, or {sources} joined by {SEPARATOR!r}, one for each source"
        raise UsageError(f"{option}: {text!r}; expected {expected}, got {len(prefixes)}")
    return prefixes * (sources // len(prefixes))


def _open_one(spec: str, wanted: Wanted) -> PairDataset:
    paths = [] if spec == "glyphs" else find_files(spec)
    if paths and paths[0].name.endswith(ALL_TABLES):
        return open_tables(paths, wanted)
    if wanted.negatives:
        raise UsageError(f"--hard-negatives: {spec} has none; expected tables with columns of them")
    return ShardPairs(paths) if paths else load_glyphs().split("train")


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
    is_shard = [path.suffix == ".tar" for path in paths]
    is_table = [path.name.endswith(ALL_TABLES) for path in paths]
    if not (all(is_shard) or all(is_table)):
        raise UsageError(
            f"{spec!r}: {', '.join(map(str, paths[:3]))}; expected .tar shards alone, or tables "
            f"({', '.join(ALL_TABLES)}) alone"
        )
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
