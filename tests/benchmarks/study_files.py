"""Small files of the form that batch_study.py and same_accuracy.py read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from machinery.icons import sample, shard_writer


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


def write_wordnet(folder: Path, count: int = 200) -> Path:
    """Data files of WordNet with so many nouns, a tenth of them in noun.body, and few others."""
    folder.mkdir()
    licence = "  1 This software and database is being provided to you, the LICENSEE, by\n"
    nouns = [
        f"{i:08} {8 if i % 10 == 0 else 3:02} n 02 thing_{i} 0 object{i} 1 001 @ 00000000 n 0000"
        f' | number {i} of the things; counted; "there are {i} of thing_{i}"  \n'
        for i in range(count)
    ]
    verbs = ["00000001 38 v 01 move 0 000 01 + 01 00 | change place  \n"]
    adjectives = ["00000001 00 s 02 awake(p) 0 up(a) 0 000 | not asleep  \n"]
    texts = {"noun": nouns, "verb": verbs, "adj": adjectives, "adv": []}
    for part, lines in texts.items():
        (folder / f"data.{part}").write_text(licence + "".join(lines))
    return folder
