"""Batches put together from chunks, in memory that is used again."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from megabatch.data.collect import Memory, collected, pin
from megabatch.data.fetch import Chunk, Fetcher, Request
from megabatch.data.images import decoded

from .samples import Numbers, to_pixels, to_tokens


def chunks(sizes: list[int], bad: tuple[int, ...] = (), late: bool = False) -> list[Chunk]:
    """Samples 0, 1, ... in chunks of these sizes, without the bad ones."""
    fetcher = Fetcher(Numbers(sum(sizes), bad), to_pixels, to_tokens, seed=0, late=late)
    starts = np.cumsum([0, *sizes[:-1]])
    return [
        fetcher(Request(0, np.arange(start, start + size)))
        for start, size in zip(starts, sizes, strict=True)
    ]


@pytest.mark.parametrize("late", [False, True])
def test_batches_without_their_bad_samples(late: bool) -> None:
    """Also without a whole chunk, and without all samples of a batch."""
    bad = (0, 1, 3, 6, 7, 8, 9, 10, 11)
    first, none = collected(chunks([2, 3, 1, 4, 2], bad, late), 6, Memory())
    assert first.indices.tolist() == first.texts[:, 0].tolist() == [2, 4, 5]
    assert [index for index, *_ in first.bad] == [0, 1, 3]
    pixels = [decoded(one.image) for one in first.images] if late else first.images
    assert [int(np.asarray(image).flat[0]) for image in pixels] == [2, 4, 5]
    assert none.images is none.texts is None
    assert [index for index, *_ in none.bad] == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("sizes", [[2, 3, 1], [6]])
def test_batches_of_several_tensors(sizes: list[int]) -> None:
    memory, places = Memory(), []
    for start in (0, 10):
        given = chunks(sizes, bad=(2,))
        for chunk in given:
            assert isinstance(chunk.images, torch.Tensor)
            pixels = chunk.images.flatten(1)[:, :2] + start
            chunk.images = {"patches": pixels, "valid": pixels[:, :1] > 3}
        (batch,) = collected(given, 6, memory)
        assert isinstance(batch.images, dict)
        assert batch.images["patches"][:, 1].tolist() == [start + i for i in (0, 1, 3, 4, 5)]
        assert batch.images["valid"].dtype == torch.bool
        assert len(batch.images["valid"]) == 5
        places.append([tensor.data_ptr() for tensor in batch.images.values()])
        del batch, chunk, given
        gc.collect()
    assert len(sizes) == 1 or places[0] == places[1]  # the memory of each is used again


def test_a_chunk_that_is_a_batch_is_not_copied() -> None:
    (chunk,) = chunks([4])
    (batch,) = collected([chunk], 4, Memory())
    assert batch.images is not None
    assert chunk.images is not None
    assert batch.images.data_ptr() == chunk.images.data_ptr()


def used_again(memory: Memory) -> torch.Tensor:
    """Checks that memory is used again when no tensor refers to it; returns a tensor of it."""
    images = torch.zeros(1, 3, 5)
    first = memory.like(images, 4)
    place = first.data_ptr()
    row = first[2:]
    del first
    gc.collect()
    other = memory.like(images, 4).fill_(1)  # the row still refers to the first
    assert not place <= other.data_ptr() < place + 240
    row.fill_(7)
    assert (other == 1).all()
    del row
    gc.collect()
    again = memory.like(images.int(), 4)
    assert again.data_ptr() == place
    assert again.dtype == torch.int32
    assert memory.like(images.bfloat16(), 2).shape == (2, 3, 5)
    return again


def test_memory_is_used_again_and_has_the_images_order() -> None:
    used_again(Memory())
    images = torch.arange(24, dtype=torch.uint8).view(2, 2, 3, 2).permute(0, 3, 1, 2)
    own = Memory().like(images, 5)
    assert own.shape == (5, 2, 2, 3)
    assert own.is_contiguous(memory_format=torch.channels_last)
    assert Memory().like(images.contiguous(), 5).is_contiguous()
    assert Memory().like(torch.zeros(2, 7), 5).shape == (5, 7)


@pytest.mark.gpu
def test_pinned_memory_is_pinned_and_used_again() -> None:
    own = used_again(Memory(pinned=True))
    assert own.is_pinned()
    assert own[2:].is_pinned()
    own.copy_(torch.arange(60).view(4, 3, 5))
    assert own.to("cuda", non_blocking=True).sum().item() == 59 * 30


@pytest.mark.gpu
def test_memory_that_cannot_be_pinned_stays_as_it_is() -> None:
    array = np.zeros(1 << 20, np.uint8)
    pin(array)
    pin(array)  # refused: it is pinned
    assert torch.ones(3, device="cuda").sum().item() == 3
    assert torch.from_numpy(array).is_pinned()
