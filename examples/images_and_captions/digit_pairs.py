"""Write images with captions: two handwritten digits side by side, "a three left of a seven".

Each folder gets PNG files, and `pairs.csv` with a row for each. The digits are scikit-learn's;
those of the test images are in no training image.
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
HELD_OUT = 300  # digits
SIZE = (32, 16)  # pixels of an image, width and height


def write(folder: Path, digits: list[int], count: int) -> None:
    """Write `count` images of random pairs of these digits, and the table of their captions."""
    data = load_digits()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "pairs.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["filepath", "title"])
        for i in range(count):
            pair = random.choices(digits, k=2)
            pixels = np.hstack([data.images[one] for one in pair]) * (255 / 16)
            image = Image.fromarray(pixels.astype(np.uint8)).resize(SIZE, Image.Resampling.BICUBIC)
            image.save(folder / f"{i}.png")
            left, right = (WORDS[data.target[one]] for one in pair)
            table.writerow([f"{i}.png", f"a {left} left of a {right}"])


def main() -> None:
    """Write images for training and for the test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/digit-pairs"))
    parser.add_argument("--count", type=int, default=6000)
    options = parser.parse_args()

    random.seed(0)
    digits = random.sample(range(len(load_digits().target)), k=1797)
    write(options.output / "train", digits[HELD_OUT:], options.count)
    write(options.output / "test", digits[:HELD_OUT], options.count // 10)


if __name__ == "__main__":
    main()
