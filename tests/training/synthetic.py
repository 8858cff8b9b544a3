"""Pairs made on the spot for glyph-small: nothing to download, no library beside Pillow."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from megabatch.data import Batch
from megabatch.models import create
from megabatch.models.towers import lock
from megabatch.training import TrainConfig
from megabatch.training.trainer import Trainer

CONFIG = TrainConfig(
    model="glyph-small",
    global_batch_size=64,
    micro_batch_size=16,
    warmup=2,
    steps=8,
    plan="off",
    precision="fp32",
    torchcompile=False,  # by default whole runs on a GPU are compiled, which takes a while
)
LOSSES = 6  # steps of a short run


def pictures(classes: np.ndarray, seed: int) -> np.ndarray:
    """Grey pictures (n, 32, 32) uint8: a class's own pattern with noise over it."""
    patterns = np.random.default_rng(0).integers(0, 256, (512, 8, 8))
    coarse = patterns[classes].repeat(4, axis=1).repeat(4, axis=2)
    noise = np.random.default_rng(seed).normal(0, 40, coarse.shape)
    return (coarse + noise).clip(0, 255).astype(np.uint8)


def batch_of(seed: int, size: int = CONFIG.global_batch_size) -> Batch:
    """Pairs of different classes (up to 512 of them), on the host, as the loader gives them."""
    classes = np.random.default_rng(seed).permutation(max(512, size))[:size] % 512
    images = torch.from_numpy(pictures(classes, seed)).unsqueeze(1)
    words = torch.randint(1, 16_384, (512, 64), generator=torch.Generator().manual_seed(0))
    return Batch(images, words[torch.from_numpy(classes)], torch.arange(size))


def trainer_of(
    device: str, tell: Callable[[str], None] = lambda line: None, **changes: Any
) -> Trainer:
    """A trainer of glyph-small, the same weights each time."""
    config = replace(CONFIG, device=device, **changes)
    torch.manual_seed(config.seed)
    module = create(config.model).module
    if config.lock_image:
        lock(module, "image")
    given = config, module, torch.device(device), config.steps or LOSSES
    return Trainer(*given, tell=tell)


def losses_of(trainer: Trainer, steps: range = range(LOSSES)) -> list[float]:
    """The losses of a few steps, each of its own batch."""
    return [trainer.train_step(batch_of(step))["loss"] for step in steps]


def write_shard(path: Path, pairs: int) -> Path:
    """A .tar shard of small PNG pictures, each with its class's words."""
    classes = np.arange(pairs)
    with tarfile.open(path, "w") as tar:
        for i, picture in enumerate(pictures(classes, 0)):
            file = io.BytesIO()
            Image.fromarray(picture).save(file, "png")
            caption = " ".join(f"w{(i * k) % 97}" for k in range(1, 6)) + f" number {i}"
            for name, data in ((f"{i:05}.png", file.getvalue()), (f"{i:05}.txt", caption.encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path
