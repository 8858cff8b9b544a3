"""The data of batch_study.py as one small file, for a machine that cannot download anything.

    python benchmarks/draw_icons.py iconify-json-2.2.535.tgz --output icons --size 32
    python benchmarks/study_package.py icons /usr/share/wordnet study.tar.xz
    tar xf study.tar.xz    # there: icons/ and wordnet/

Icons have 16 levels of grey, equal numbers in place of captions' hashes, and keys as they are.
WordNet's synsets have no relations to others.
"""

from __future__ import annotations

import argparse
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from machinery.grey import GreyWriter
from megabatch.data.grey import IMAGES, PAIRS, GreyPairs

_CHUNK = 4096  # icons at a time


def write(icons: Path, wordnet: Path, output: Path, preset: int) -> None:
    """Write the package; `preset`: of xz, from 0 (fast) to 9 (small)."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for split in ("train", "test"):
            _reduce_icons(icons / split, folder / split)
        with tarfile.open(output, "w:xz", preset=preset) as tar:
            for split in ("train", "test"):
                for name in (IMAGES, PAIRS):
                    tar.add(folder / split / name, f"icons/{split}/{name}")
            for part in ("noun", "verb", "adj", "adv"):
                reduced = folder / part
                lines = _synsets(wordnet / f"data.{part}")
                reduced.write_text("".join(lines), encoding="utf-8")
                tar.add(reduced, f"wordnet/data.{part}")


def _reduce_icons(source: Path, output: Path) -> None:
    pairs = GreyPairs(source)
    keys = [line.partition("\t")[0] for line in (source / PAIRS).read_text("utf-8").splitlines()]
    numbers: dict[str, int] = {}
    writer = GreyWriter(output, pairs.images.shape[-1])
    for start in range(0, len(pairs), _CHUNK):
        rows = range(start, min(start + _CHUNK, len(pairs)))
        levels = pairs.arrays(rows) // 16 * np.uint8(17)
        for row, image, caption in zip(rows, levels, pairs.texts(rows), strict=True):
            number = numbers.setdefault(caption, len(numbers))
            writer.write(image.tobytes(), key=keys[row], number=number, caption=caption)
    writer.close()


def _synsets(path: Path) -> Iterator[str]:
    """A data file's lines up to the words, and the glosses; the licence stays."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(" "):
                yield line
                continue
            fields, _, gloss = line.partition(" | ")
            words = fields.split(" ")
            yield f"{' '.join(words[: 4 + 2 * int(words[3], 16)])} | {gloss.strip()}\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("icons", type=Path)
    parser.add_argument("wordnet", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--preset", type=int, default=6)
    options = parser.parse_args()
    began = time.perf_counter()
    write(options.icons, options.wordnet, options.output, options.preset)
    size = options.output.stat().st_size / 2**20
    print(f"{options.output}: {size:.1f} MiB, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
