from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from megabatch.data.fetch import Fetcher, Request, sample_seeds, stacked
from megabatch.data.glyphs import GlyphSet
from megabatch.data.pairs import BadSample, Pair
from megabatch.data.shards import ShardPairs

from .samples import Numbers, jpeg, to_pixels, to_pixels_and_noise, to_tokens, write_tar


def test_images_are_stacked_in_their_own_order_in_memory() -> None:
    images = [torch.randint(256, (5, 4, 3), dtype=torch.uint8) for _ in range(3)]
    last = stacked([image.permute(2, 0, 1) for image in images])
    assert last.is_contiguous(memory_format=torch.channels_last)
    first = stacked([image.permute(2, 0, 1).contiguous() for image in images])
    assert first.is_contiguous()
    assert torch.equal(first, last)


class Crop:
    """A random crop that also takes arrays."""

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return self.pixels(np.asarray(image))

    def pixels(self, pixels: np.ndarray) -> torch.Tensor:
        top, left = torch.randint(4, (2,)).tolist()
        return torch.tensor(pixels[top : top + 8, left : left + 8]).permute(2, 0, 1)


def test_arrays_of_files_give_what_their_images_give(tmp_path: Path) -> None:
    members = []
    for i in range(8):
        data = jpeg((12, 12), i)
        members.append((f"{i}.jpg", data[: len(data) // 2] if i == 3 else data))
        members.append((f"{i}.txt", str(i).encode()))
    pairs, request = (
        ShardPairs([write_tar(tmp_path / "a.tar", members)]),
        Request(0, np.arange(8)),
    )
    crop = Crop()
    arrays = Fetcher(pairs, crop, to_tokens, seed=5)(request)
    images = Fetcher(pairs, crop.__call__, to_tokens, seed=5)(request)
    assert isinstance(arrays.images, torch.Tensor)
    assert isinstance(images.images, torch.Tensor)
    assert torch.equal(arrays.images, images.images)
    assert arrays.bad == images.bad
    assert [reason for *_, reason, _ in arrays.bad] == ["undecodable image"]


@given(
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 1000),
    indices=st.lists(st.integers(0, 2**40), min_size=2, max_size=50, unique=True),
)
def test_seeds_belong_to_the_sample(seed: int, epoch: int, indices: list[int]):
    seeds = sample_seeds(seed, epoch, np.array(indices))
    assert seeds.dtype == np.int64
    assert (seeds >= 0).all()
    assert len(set(seeds.tolist())) == len(indices)
    alone = [sample_seeds(seed, epoch, np.array([i]))[0] for i in indices]
    assert seeds.tolist() == alone
    assert set(seeds).isdisjoint(sample_seeds(seed, epoch + 1, np.array(indices)))
    assert set(seeds).isdisjoint(sample_seeds(seed + 1, epoch, np.array(indices)))


def test_the_trainers_random_state_is_left_alone():
    def state() -> tuple:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    before = state()
    Fetcher(Numbers(20), to_pixels_and_noise, to_tokens, seed=0)(Request(0, np.arange(20)))
    assert state() == before


def lengths(captions: list[str]) -> torch.Tensor:
    return to_tokens([str(len(c)) for c in captions])


class Twice:
    """A transform with a batched form that records its use."""

    def __call__(self, image) -> torch.Tensor:
        return to_pixels(image) * 2

    def batch(self, images: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        assert images.dtype == torch.uint8
        assert seeds.shape == (len(images),)
        self.seeds = seeds
        return images * 2


def test_the_batched_path_gives_what_the_other_gives(glyphs: GlyphSet):
    part = glyphs.split("faces")
    request = Request(2, np.array([9, 5000, 77]))
    transform = Twice()
    fast = Fetcher(part, transform, lengths, seed=3)(request)
    assert transform.seeds.tolist() == sample_seeds(3, 2, request.draws).tolist()
    slow = Fetcher(part, Twice().__call__, lengths, seed=3)(request)
    assert fast.images is not None
    assert slow.images is not None
    assert torch.equal(fast.images, slow.images)
    np.testing.assert_array_equal(fast.texts, slow.texts)
    assert fast.indices.tolist() == slow.indices.tolist() == [9, 5000, 77]


class Questions:
    """Pairs of texts; sample 3 is bad."""

    first = "text"

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Pair:
        if index == 3:
            raise BadSample("empty query", "3")
        return Pair(f"question {index % 2}", f"answer {index}", str(index))


class Lengths:
    """A transform of several first texts, and of no single one."""

    def texts(self, texts: list[str]) -> torch.Tensor:
        return torch.tensor([[len(text), int(text[-1])] for text in texts])


def test_first_texts_are_made_together():
    request = Request(0, np.arange(6))
    chunk = Fetcher(Questions(), Lengths(), lengths, seed=0)(request)
    alone = lambda text: Lengths().texts([text])[0]  # noqa: E731
    slow = Fetcher(Questions(), alone, lengths, seed=0)(request)
    assert chunk.images.tolist() == slow.images.tolist() == [[10, i % 2] for i in (0, 1, 2, 4, 5)]
    assert chunk.bad == [(3, "empty query", "3")]
