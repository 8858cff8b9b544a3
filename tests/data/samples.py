"""Small data sets to test with."""

from __future__ import annotations

import csv
import io
import json
import random
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from PIL import Image

from megabatch.data.images import decoded
from megabatch.data.pairs import BadSample, Pair


class Numbers:
    """Sample i is a grey picture with caption "i"; some samples are bad."""

    def __init__(self, n: int, bad: Sequence[int] = ()) -> None:
        self.n = n
        self.bad = frozenset(bad)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Pair:
        if index in self.bad:
            raise BadSample("odd" if index % 2 else "even", str(index))
        return Pair(Image.new("L", (2, 2), index % 256), str(index), str(index))


def to_pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image))[None]


def to_pixels_and_noise(image: Image.Image) -> torch.Tensor:
    """A random augmentation that draws from all three generators."""
    noise = torch.rand(1, 2, 2) + random.random() + np.random.rand()
    return to_pixels(image).double() + noise


def to_tokens(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[int(caption), len(caption)] for caption in captions])


def png(value: int = 0, size: tuple[int, int] = (4, 3)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (value, 0, 0)).save(file, format="PNG")
    return file.getvalue()


def jpeg(size: tuple[int, int], seed: int = 0, *, mode: str = "RGB", **options: object) -> bytes:
    """A file of random pixels, which have all frequencies; size: (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def sample(key: str, value: int, caption: str) -> list[tuple[str, bytes]]:
    """One sample as img2dataset writes it."""
    facts = {"caption": caption, "key": key}
    return [
        (f"{key}.json", json.dumps(facts).encode()),
        (f"{key}.png", png(value)),
        (f"{key}.txt", caption.encode()),
    ]


def write_table(path: Path, columns: dict[str, list[Any]]) -> Path:
    """A table in the format that the file's name ends in."""
    table = [*zip(*columns.values(), strict=True)]
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.table(columns), path, row_group_size=2)
    elif path.suffix == ".arrow":
        schema = pa.table(columns).schema
        with pa.ipc.new_stream(path, schema) as stream:
            stream.write_table(pa.table(columns), max_chunksize=2)
    elif path.suffix == ".jsonl":
        rows = (json.dumps(dict(zip(columns, row, strict=True))) for row in table)
        path.write_text("\n".join(rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writerows([[*columns], *table])
    return path


def captions(pairs: Any) -> list[str]:
    """The caption of each pair that can be used, with its image; or the reason why it is bad."""
    found = []
    for index in range(len(pairs)):
        try:
            pair = pairs[index]
            decoded(pair.image)
            found.append(pair.caption)
        except BadSample as bad:
            found.append(f"({bad.reason})")
    return found
