"""Recall@1 on the glyphs' held-out faces, naming each image after the nearest training image.

    python benchmarks/pixel_neighbours.py

Distances are Euclidean, between pixels. "baseline" in the record `results/quickstart-cpu.json` is
75.1%: there several nearest images count as in random order, here scikit-learn takes one of them.
"""

from __future__ import annotations

import argparse

from sklearn.neighbors import KNeighborsClassifier

from megabatch.data import load_glyphs

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    glyphs = load_glyphs()
    train, faces = glyphs.split("train"), glyphs.split("faces")
    train_pixels, pixels = (part.images.reshape(len(part), -1) / 255 for part in (train, faces))
    nearest = KNeighborsClassifier(1).fit(train_pixels, train.name_ids)
    print(f"{nearest.score(pixels, faces.name_ids):.2%} of {len(faces):,} images")
