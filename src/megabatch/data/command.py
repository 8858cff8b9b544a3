"""`megabatch data`: write the built-in glyphs as shards, inspect a data set."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from megabatch.errors import plural
from megabatch.hints import Interval, Positional
from megabatch.options import parse

if TYPE_CHECKING:
    from PIL import Image


# Libraries are imported by the functions that use them: --help does not need them.

Split = Literal["train", "faces", "characters", "all"]


@dataclass
class Glyphs:
    """Write the glyph set as WebDataset shards (png + txt + json)."""

    output: Path
    """Folder to create; it appears when all shards are written."""
    split: Split = "train"
    """Part of the set: train, the held-out faces, the held-out characters, or all."""
    samples_per_shard: Annotated[int, Interval(at_least=1)] = 10_000
    """Pairs in each shard but the last."""


@dataclass
class Inspect:
    """Read samples of a data set: report their number, some examples, and problems.

    Also the numbers of hard negatives, and captions that occur more than once.
    """

    data: Annotated[str, Positional("DATA")]
    """"glyphs", shards, tables, a pattern, a folder, or several joined by '::', as for training."""
    split: Split | None = None
    """Part of the glyph set."""
    limit: Annotated[int, Interval(at_least=0)] = 1_000
    """Read at most this many samples, spread evenly; 0: all."""
    csv_img_key: str | None = None
    """Column of image paths or bytes in a table; this and the options below as for training."""
    csv_query_key: str | None = None
    """Column of first texts in a table, for pairs of texts."""
    csv_caption_key: str | None = None
    """Column of captions or second texts in a table."""
    csv_negative_key: str | None = None
    """Columns of hard negatives in a table, joined by commas."""
    csv_separator: str | None = None
    """Field separator of a text table."""


def glyphs(argv: list[str]) -> int:
    """Write the glyph set as shards; returns the exit code."""
    options = parse(Glyphs, argv, prog="megabatch data glyphs")
    from megabatch.data.export import write_glyphs
    from megabatch.data.glyphs import load_glyphs

    pairs = load_glyphs().split(options.split)
    shards = write_glyphs(pairs, options.output, samples_per_shard=options.samples_per_shard)
    size = sum(path.stat().st_size for path in shards)
    written = f"{plural(len(pairs), 'pair')} in {plural(len(shards), 'shard')}"
    print(f"{written}, {size / 1e6:.1f} MB: {options.output}")
    return 0


def inspect(argv: list[str]) -> int:
    """Read samples of a data set and print a summary; exit code 1 if none is usable."""
    options = parse(Inspect, argv, prog="megabatch data inspect")
    import numpy as np
    from rich.progress import track

    from megabatch.data.pairs import BadSample, caption_id, decoded
    from megabatch.data.sources import open_pairs
    from megabatch.terminal import plain_console

    dataset = open_pairs(
        options.data,
        split=options.split,
        image_column=options.csv_img_key,
        query_column=options.csv_query_key,
        caption_column=options.csv_caption_key,
        separator=options.csv_separator,
        negatives=None if options.csv_negative_key is None else True,
        negative_column=options.csv_negative_key,
    )
    size = len(dataset)
    chosen = np.linspace(0, size - 1, min(options.limit or size, size)).astype(int).tolist()
    examples: list[str] = []
    bad: dict[str, list[str]] = {}  # their keys by reason
    negatives: list[int] = []
    captions = Counter[int]()
    console = plain_console(stderr=True)
    hidden = not console.is_terminal  # rich would end it with an empty line all the same
    for index in track(chosen, "reading", console=console, transient=True, disable=hidden):
        try:
            pair = dataset[index]
            first = decoded(pair.image)
        except BadSample as sample:
            bad.setdefault(sample.reason, []).append(sample.key)
            continue
        negatives.append(len(pair.negatives))
        captions[caption_id(pair.caption) if pair.id is None else pair.id] += 1
        if len(examples) < 5:
            examples.append(f"{pair.key}: {_described(first)}: {pair.caption}")
    unusable = sum(map(len, bad.values()))
    print(f"{plural(size, 'sample')}, {len(chosen):,} of them read, {unusable:,} unusable")
    for line in getattr(dataset, "notes", []):
        print(f"note: {line}")
    for line in getattr(dataset, "damage", []):
        print(f"damaged: {line}")
    for reason, keys in sorted(bad.items(), key=lambda item: -len(item[1])):
        print(f"skipped {len(keys):,} x {reason} (first: {keys[0]})")
    if any(negatives):
        print(f"hard negatives: {min(negatives):,} to {max(negatives):,} a sample")
    if captions:
        print(_repetition(captions, of_all=len(chosen) == size))
    for line in examples:
        print(line)
    return 0 if examples else 1


def _described(first: Image.Image | str) -> str:
    if isinstance(first, str):
        return first
    width, height = first.size
    return f"{width} x {height} {first.mode}"


def _repetition(captions: Counter[int], of_all: bool) -> str:
    repeated, read = sum(n for n in captions.values() if n > 1), captions.total()
    among = "" if of_all else " among those read (--limit 0: among all)"
    advice = ": false negatives without --duplicates positives or ignored" if repeated else ""
    return (
        f"{repeated:,} of {read:,} captions ({repeated / read:.1%}) occur more than once"
        f"{among}{advice}"
    )
