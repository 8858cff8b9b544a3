"""Small files of the form that batch_study.py and same_accuracy.py read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from machinery.icons import sample, shard_writer
from machinery.text_pairs import SPLITS, Texts


def write_icons(folder: Path, train: int = 200, test: int = 20, size: int = 32) -> Path:
    """Icons of random pixels, as `draw_icons.py` writes them."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for split, count in (("train", train), ("test", test)):
        writer = shard_writer(folder / split)
        for i in range(count):
            caption = f"{split} {i % (count // 2)}"  # each one twice
            pixels = generator.integers(256, size=size**2, dtype=np.uint8).tobytes()
            writer.write(sample(f"{split}_{i}", pixels, size, caption))
        writer.close()
    return folder


def write_texts(file: Path, count: int = 60) -> Path:
    """So many pairs of each split as draw_texts.py writes them; each document has two queries."""
    generator = np.random.default_rng(0)
    n = count * len(SPLITS)
    queries = generator.integers(1, 100, (n, 16)).astype(np.uint16)
    documents = generator.integers(1, 100, (n // 2, 48)).astype(np.uint16)
    splits = np.arange(len(SPLITS)).repeat(count).astype(np.uint8)
    rows = np.arange(n, dtype=np.int32)
    nothing = np.zeros(n, np.uint8)
    texts = Texts(queries, documents, rows, rows // 2, nothing, splits, nothing[:0])
    np.savez_compressed(file, **texts._asdict())
    return file
