from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megabatch.data.glyphs import GlyphSet
from megabatch.data.late import DecodingStopped, LateImages, mean_bytes
from megabatch.data.loader import Batch, PairLoader
from megabatch.data.shards import ShardPairs

from .samples import Numbers, to_pixels, to_pixels_and_noise, to_tokens, write_tar

N = 40


def bmp(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (2, 2), value).save(file, "png")
    return file.getvalue()


def shard(folder: Path, damaged: dict[int, bytes] | None = None) -> ShardPairs:
    """Sample i is a grey picture in a file, with caption "i"."""
    members = []
    for i in range(N):
        members.append((f"{i:03}.png", (damaged or {}).get(i, bmp(i))))
        members.append((f"{i:03}.txt", str(i).encode()))
    return ShardPairs([write_tar(folder / "shard.tar", members)])


def loader(dataset: Any, **options: Any) -> PairLoader:
    settings = {
        "batch_size": 8,
        "transform": to_pixels_and_noise,
        "tokenizer": to_tokens,
        "seed": 1,
        "workers": 1,
    }
    return PairLoader(dataset, **{**settings, **options})


def parts(batch: Batch, size: int) -> torch.Tensor:
    rows = range(0, len(batch), size)
    return torch.cat([batch.images[i : min(i + size, len(batch))] for i in rows])


def to_pixels_of_one_size(image: Image.Image) -> torch.Tensor:
    """Like a model's transform, for images of any kind."""
    return torch.from_numpy(np.array(image.convert("L").resize((2, 2))))[None]


@pytest.mark.parametrize("workers", [1, 2])
def test_both_passes_give_what_early_decoding_gives(tmp_path: Path, workers: int) -> None:
    dataset = shard(tmp_path)
    early, late = loader(dataset), loader(dataset, workers=workers, late=3)
    before = torch.get_rng_state()
    for _ in range(2):  # epochs, each with an augmentation of its own
        for number, (one, two) in enumerate(zip(early, late, strict=True)):
            assert isinstance(two.images, LateImages)
            assert torch.equal(one.indices, two.indices)
            assert torch.equal(one.texts, two.texts)
            assert torch.equal(one.ids, two.ids)
            if number == 1:  # left in the middle, which leaves nothing for the next batch
                assert torch.equal(two.images[0:3], one.images[0:3])
                continue
            assert torch.equal(parts(two, 3), one.images)
            assert torch.equal(parts(two, 3), one.images)
            assert not two.images.bad
    share = next(iter(loader(dataset, late=2, rank=1, world_size=2)))
    assert torch.equal(parts(share, 2), next(iter(loader(dataset))).images[4:])
    assert torch.equal(torch.get_rng_state(), before)
    assert late.state_dict() == early.state_dict()


def test_rows_out_of_turn(tmp_path: Path) -> None:
    dataset = shard(tmp_path)
    expected = next(iter(loader(dataset))).images
    images = next(iter(loader(dataset, late=3))).images
    assert len(images) == 8
    for rows in (slice(6, 8), slice(2, 5), slice(5, 8), slice(0, 1), slice(0, 1), slice(0, 8)):
        assert torch.equal(images[rows], expected[rows])
    with ThreadPoolExecutor(1) as another:
        assert torch.equal(another.submit(images.__getitem__, slice(0, 8)).result(), expected)
    assert images[0:0].shape == (0, 1, 2, 2)
    assert images[0:0].dtype == expected.dtype


def test_a_damaged_image_is_found_late_and_counted(tmp_path: Path) -> None:
    file = bmp(9)
    damaged = {i: file[:43] + b"???" + file[46:] for i in (9, 30)}  # in the compressed pixels
    damaged[5] = b"no image"
    late, found = loader(shard(tmp_path, damaged), transform=to_pixels_of_one_size, late=4), set()
    for batch in late:
        pixels = parts(batch, 4)
        assert torch.equal(parts(batch, 4), pixels)
        late.count_damaged(batch)
        for row, index in enumerate(batch.indices.tolist()):
            assert pixels[row, 0, 0, 0] == (0 if index in damaged else index)
            assert (row in batch.images.bad) == (index in damaged)
            found.add(index)
    assert found >= damaged.keys()
    assert late.skipped == {"undecodable image": 3}
    assert late.skipped_first["undecodable image"] in [f"shard.tar:{i:03}" for i in damaged]
    early = loader(Numbers(16), transform=to_pixels)
    early.count_damaged(next(iter(early)))
    assert not early.skipped


def test_pictures_without_files_wait_as_they_are(glyphs: GlyphSet) -> None:
    from megabatch.models.glyph import GlyphTransform

    few = glyphs.take(np.arange(16))
    for data, options in (
        (Numbers(16, [3]), {}),
        (few, {"transform": GlyphTransform(), "tokenizer": lengths}),
    ):
        for one, two in zip(loader(data, **options), loader(data, **options, late=4), strict=True):
            assert torch.equal(parts(two, 4), one.images)


def lengths(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption)] for caption in captions])


def fails(image: Image.Image) -> torch.Tensor:
    raise OSError(5, "Input/output error")


def hangs(image: Image.Image) -> torch.Tensor:
    time.sleep(100)
    raise AssertionError


@pytest.mark.usefixtures("short_wait")
def test_what_goes_wrong_in_a_worker_is_told(tmp_path: Path) -> None:
    dataset = shard(tmp_path)
    images = next(iter(loader(dataset, transform=fails, late=4))).images
    with pytest.raises(DecodingStopped, match=r"decoding: .*Input/output error"):
        images[0:4]
    images = next(iter(loader(dataset, transform=hangs, late=4, timeout=1))).images
    with pytest.raises(DecodingStopped, match=r"decoding: .* no sample for 1 s: one hangs"):
        images[0:4]


def test_a_worker_that_is_killed_is_told(tmp_path: Path) -> None:
    late = loader(shard(tmp_path), late=4)
    images = next(iter(late)).images
    assert len(images[0:4])
    for process in late._decoder._processes.loader._iterator._workers:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    with pytest.raises(DecodingStopped, match="decoding: "):
        [images[rows] for rows in [slice(0, 8)] * 9]


def test_mean_bytes(tmp_path: Path) -> None:
    sizes: Sequence[int] = [len(bmp(i)) for i in range(N)]
    assert mean_bytes(shard(tmp_path)) == pytest.approx(np.mean(sizes))
    assert mean_bytes(Numbers(5, [0])) == 4


def test_without_workers_it_is_refused() -> None:
    with pytest.raises(ValueError, match="workers: 0; expected at least 1"):
        loader(Numbers(16), workers=0, late=4)
