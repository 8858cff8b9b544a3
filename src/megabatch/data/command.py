"""`megabatch data`: write the built-in glyphs as shards, inspect a data set."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from megabatch.config.settings import Batches
from megabatch.errors import plural
from megabatch.options import CONFIG, parse

# Libraries are imported by the functions that use them: --help does not need them.

Split = Literal["train", "faces", "characters", "all"]


@dataclass(config=CONFIG)
class Glyphs:
    """Write the glyph set as WebDataset shards (png + txt)."""

    output: Path
    """Folder to create; it appears when all shards are written."""
    split: Split = "train"
    """Part of the set: train, the held-out faces, the held-out characters, or all."""
    samples_per_shard: PositiveInt = 10_000
    """Pairs in each shard but the last."""


@dataclass(config=CONFIG)
class Inspect:
    """Read samples of a data set: report their number, examples, problems, repeated captions."""

    data: str
    """"glyphs", shards, tables, a pattern, a folder, or several joined by '::', as for training."""
    limit: NonNegativeInt = 1_000
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
    query_prefix: str | None = None
    """The prefix of each first text."""
    caption_prefix: str | None = None
    """The prefix of each caption or second text, and of each negative."""
    train_data_upsampling_factors: str | None = None
    """How often an epoch uses each sample of a source; then the sources' shares are printed."""
    train_data_temperature: PositiveFloat | None = None
    """Temperature of the sources' shares, as megabatch train has it."""
    train_data_batches: Batches = "mixed"
    """Whether each batch has one source; the shares are then those of batches."""


def glyphs(argv: list[str]) -> int:
    """Write the glyph set as shards; returns the exit code."""
    options = parse(Glyphs, argv, prog="megabatch data glyphs")
    from megabatch.data.glyphs import load_glyphs, write_glyphs

    pairs = load_glyphs().split(options.split)
    shards = write_glyphs(pairs, options.output, samples_per_shard=options.samples_per_shard)
    print(f"{plural(len(pairs), 'pair')} in {plural(len(shards), 'shard')}: {options.output}")
    return 0


def inspect(argv: list[str]) -> int:
    """Read samples of a data set and print a summary; exit code 1 if none is usable."""
    options = parse(Inspect, argv, prog="megabatch data inspect", positional="data")
    import numpy as np

    from megabatch.data.images import decoded
    from megabatch.data.pairs import BadSample, caption_id
    from megabatch.data.sources import open_configured

    dataset: Any = open_configured(options.data, options, negatives=bool(options.csv_negative_key))
    size = len(dataset)
    chosen = np.linspace(0, size - 1, min(options.limit or size, size)).astype(int).tolist()
    examples: list[str] = []
    bad: dict[str, list[str]] = {}  # their keys by reason
    captions = Counter[int]()
    for place, index in enumerate(chosen):
        try:
            pair = dataset[index]
            first = decoded(pair.image)
        except BadSample as sample:
            bad.setdefault(sample.reason, []).append(sample.key)
            continue
        captions[caption_id(pair.caption) if pair.id is None else pair.id] += 1
        if len(examples) * len(chosen) <= 5 * place:  # five, spread evenly
            shown = first if isinstance(first, str) else f"{first.width} x {first.height}"
            texts = " | ".join([pair.caption, *pair.negatives])
            examples.append(f"{pair.key}: {shown}: {texts}")
    unusable = sum(map(len, bad.values()))
    print(f"{plural(size, 'sample')}, {len(chosen):,} of them read, {unusable:,} unusable")
    for line in getattr(dataset, "shares", []):
        print(line)
    for line in getattr(dataset, "damage", []):
        print(f"damaged: {line}")
    for reason, keys in sorted(bad.items(), key=lambda item: -len(item[1])):
        print(f"skipped {len(keys):,} x {reason} (first: {keys[0]})")
    repeated = sum(n for n in captions.values() if n > 1)
    if repeated:
        print(
            f"{repeated:,} of {captions.total():,} captions read occur more than once: false "
            "negatives without --duplicates positives or ignored"
        )
    print(*examples, sep="\n")
    return 0 if examples else 1
