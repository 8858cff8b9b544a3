"""Small data sets on disk, in the layouts that evaluation reads."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from megabatch.evaluation.embed import Encoder
from megabatch.evaluation.samples import Sample, Samples
from megabatch.models import create
from tests.data.samples import write_tar

NAMES = ("digit_zero", "digit_one", "digit_two", "digit_three")


@dataclass
class ImageList(Samples):
    images: Sequence[Any]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.images[index], index, str(index))


def image_features(encoder: Encoder, images: Sequence[Any]) -> Tensor:
    return encoder.embed(ImageList(images), "images").features


def untrained_run(folder: Path, train_data: str = "glyphs") -> Path:
    """A run's folder with the weights of a new model."""
    folder.mkdir()
    (folder / "config.toml").write_text(f'model = "glyph-small"\ntrain_data = "{train_data}"\n')
    torch.manual_seed(0)
    save_file(create("glyph-small").module.state_dict(), folder / "model.safetensors")
    return folder


def picture(kind: int, seed: int) -> Image.Image:
    """A noisy picture with a bar at the position of its kind."""
    pixels = np.random.default_rng(seed).integers(0, 90, (32, 32), dtype=np.uint8)
    pixels[:, 8 * kind : 8 * kind + 5] += 150
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def image_folder(folder: Path, per_class: int, seed: int = 0) -> Path:
    """`folder/digit_zero/0.png` ..."""
    for kind, name in enumerate(NAMES):
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            picture(kind, seed + 1000 * kind + i).save(folder / name / f"{i}.png")
    return folder


def shard(path: Path, samples: list[dict[str, bytes]]) -> Path:
    """A tar file with the members of each sample by extension."""
    members = [(f"{i:04}.{kind}", data) for i, s in enumerate(samples) for kind, data in s.items()]
    return write_tar(path, members)


def class_shards(folder: Path, per_class: int, seed: int = 0) -> Path:
    """CLIP benchmark's layout, with names and templates, in two shards of the test split."""
    samples = [
        {"png": png(picture(kind, seed + 1000 * kind + i)), "cls": str(kind).encode()}
        for kind in range(len(NAMES))
        for i in range(per_class)
    ]
    half = len(samples) // 2
    shard(folder / "test" / "0.tar", samples[:half])
    shard(folder / "test" / "1.tar", samples[half:])
    (folder / "classnames.txt").write_text("".join(f"{n.split('_')[1]}\n" for n in NAMES))
    (folder / "zeroshot_classification_templates.txt").write_text("digit {c}\na {c}.\n")
    return folder


def captions(n: int) -> list[list[str]]:
    """From one to three captions for each of n images; some occur twice."""
    words = ("zero", "one", "two", "three")
    return [[f"{words[i % 4]} of {i // 3}, {j}" for j in range(1 + i % 3)] for i in range(n)]


def write_pictures(folder: Path, n: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        picture(i % 4, i).save(folder / f"{i}.png")
    return [f"{i}.png" for i in range(n)]


def caption_rows(folder: Path, n: int) -> list[tuple[str, str]]:
    """Names of pictures in the folder, each with a caption; an image's rows apart from each other.

    There is a row for each of `captions(n)`.
    """
    names, texts = write_pictures(folder, n), captions(n)
    return [(names[i], texts[i][j]) for j in range(3) for i in range(n) if j < len(texts[i])]


def caption_table(folder: Path, n: int) -> Path:
    """These rows as CSV."""
    lines = [f'{name},"{text}"\n' for name, text in caption_rows(folder, n)]
    path = folder / "pairs.csv"
    path.write_text("filepath,title\n" + "".join(lines))
    return path
