from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from machinery.grey import GreyWriter
from machinery.icon_towers import GreyTransform
from megabatch.data import PairLoader
from megabatch.data.grey import GreyPairs
from megabatch.data.sources import open_pairs
from megabatch.errors import UsageError


def write(folder: Path, count: int = 5, size: int = 4) -> Path:
    writer = GreyWriter(folder, size)
    for i in range(count):
        pixels = bytes([i] * size**2)
        writer.write(pixels, key=f"k{i}", number=2**40 + i // 2, caption=f" é\t{i // 2}\n")
    writer.close()
    return folder


def test_pairs_come_back(tmp_path: Path):
    pairs = open_pairs(str(write(tmp_path / "grey", count=12)))
    assert isinstance(pairs, GreyPairs)
    assert len(pairs) == 12
    assert (pairs[11].caption, pairs[11].key, pairs[11].image.mode) == ("é 5", "k11", "L")
    assert pairs[11].id == 2**40 + 5
    images, captions = pairs.arrays([3, 10]), pairs.texts([3, 10])
    assert images.shape == (2, 1, 4, 4)
    assert images.dtype == np.uint8
    assert images[:, 0, 0, 0].tolist() == [3, 10]
    assert captions == ["é 1", "é 5"]
    assert pairs.ids([3, 10]).tolist() == [2**40 + 1, 2**40 + 5]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_have_the_pairs_ids(tmp_path: Path, workers: int):
    loader = PairLoader(
        open_pairs(str(write(tmp_path / "grey", count=12))),
        batch_size=6,
        transform=GreyTransform(4),
        tokenizer=lambda texts: torch.zeros(len(texts), 1, dtype=torch.int64),
        seed=0,
        workers=workers,
    )
    for batch in loader:
        assert batch.images.dtype == torch.uint8
        assert torch.equal(batch.images[:, 0, 0, 0].long(), batch.indices)
        assert torch.equal(batch.ids, 2**40 + batch.indices // 2)


def test_damaged_folders_are_refused(tmp_path: Path):
    folder = write(tmp_path / "grey")
    lines = (folder / "pairs.txt").read_text().splitlines()
    (folder / "pairs.txt").write_text("\n".join(lines[:-1]))
    with pytest.raises(UsageError, match=r"shape \(5, 1, 4, 4\); expected uint8 of shape \(4, 1"):
        open_pairs(str(folder))
    (folder / "pairs.txt").write_text("\n".join(["no tabs", *lines[1:]]))
    with pytest.raises(UsageError, match="cannot read"):
        open_pairs(str(folder))
    (folder / "pairs.txt").write_text("\n".join(lines))
    pixels = (folder / "images.npy").read_bytes()
    (folder / "images.npy").write_bytes(pixels[:-1])
    with pytest.raises(UsageError, match="cannot read"):
        open_pairs(str(folder))
