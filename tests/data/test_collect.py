"""Batches put together from chunks, ahead of their use, in memory that is used again."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.data.collect import Collected, Memory, ahead, fill, group, pin
from megabatch.data.fetch import Chunk, Fetcher, Request

from .samples import Numbers, to_pixels, to_tokens

N = 40


def chunks(sizes: list[int], bad: set[int], late: bool = False) -> list[Chunk]:
    """Samples 0, 1, ... in chunks of these sizes, without the bad ones."""
    fetcher = Fetcher(Numbers(N, sorted(bad)), to_pixels, to_tokens, seed=0)
    found, start = [], 0
    for size in sizes:
        chunk = fetcher[Request(0, start, np.arange(start, start + size))]
        if late and chunk.images is not None:
            chunk.images = [int(image[0, 0, 0]) for image in chunk.images]
        found.append(chunk)
        start += size
    return found


def numbers(batch: Collected, late: bool = False) -> list[int]:
    """The samples in a batch, whose parts agree on them."""
    rows = batch.rows
    found = rows.indices.tolist()
    assert len(rows) == len(rows.ids) == len(found)
    assert rows.positions.tolist() == found
    if not found:
        assert rows.images is None
        return []
    assert rows.images is not None
    assert rows.texts is not None
    pixels = list(rows.images) if late else rows.images[:, 0, 0, 0].tolist()
    assert pixels == rows.texts[:, 0].tolist() == found
    return found


sizes_of_chunks = st.lists(st.integers(1, 8), min_size=1, max_size=8).filter(lambda s: sum(s) <= N)
bad_samples = st.sets(st.integers(0, N - 1), max_size=20)


@given(sizes=sizes_of_chunks, bad=bad_samples, size=st.integers(1, 12), late=st.booleans())
@settings(max_examples=100, deadline=None)
def test_batches_of_good_samples(sizes, bad, size, late):
    batches = list(fill(chunks(sizes, bad, late), size, Memory()))
    found = [numbers(batch, late) for batch in batches]
    assert [len(rows) for rows in found[:-1]] == [size] * (len(found) - 1)
    assert len(found[-1]) < size
    assert list(itertools.chain(*found)) == [i for i in range(sum(sizes)) if i not in bad]
    assert [place for batch in batches for place, *_ in batch.bad] == sorted(
        i for i in bad if i < sum(sizes)
    )


@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=4), bad=bad_samples)
@settings(max_examples=50, deadline=None)
def test_batches_without_their_bad_samples(cuts, bad):
    size = sum(cuts)
    batches = list(group(chunks(cuts * 2, bad), size, Memory()))
    for number, batch in enumerate(batches):
        everything = range(number * size, (number + 1) * size)
        assert numbers(batch) == [i for i in everything if i not in bad]
        assert [place for place, *_ in batch.bad] == [i for i in everything if i in bad]
    assert len(batches) == 2


def test_a_chunk_that_is_a_batch_is_not_copied() -> None:
    (chunk,) = chunks([4], set())
    first, rest = fill([chunk], 4, Memory())
    assert first.rows.images is not None
    assert chunk.images is not None
    assert first.rows.images.data_ptr() == chunk.images.data_ptr()
    assert len(rest.rows) == 0


def test_the_next_batch_is_made_while_one_is_used() -> None:
    made = [threading.Event() for _ in range(3)]

    def batches() -> Iterator[Collected]:
        for event, chunk in zip(made, chunks([1, 1, 1], set()), strict=True):
            event.set()
            yield Collected(chunk, [])

    coming = ahead(batches(), threading.Event())
    for number in range(3):
        assert numbers(next(coming)) == [number]
        if number < 2:
            assert made[number + 1].wait(60)
    with pytest.raises(StopIteration):
        next(coming)


def test_an_error_comes_in_its_place_and_keeps_nothing_alive() -> None:
    class Processes:
        pass

    def batches() -> Iterator[Collected]:
        nonlocal held
        processes = Processes()
        held = weakref.ref(processes)
        yield Collected(chunks([1], set())[0], [])
        raise OSError("unreadable")

    held: weakref.ref[Processes]

    gc.collect()
    gc.disable()
    try:
        coming = ahead(batches(), threading.Event())
        assert numbers(next(coming)) == [0]
        with pytest.raises(OSError, match="unreadable"):
            next(coming)
        del coming
        assert held() is None  # freed without the garbage collector
    finally:
        gc.enable()


def test_closing_tells_the_maker_to_stop() -> None:
    stop = threading.Event()

    def batches() -> Iterator[Collected]:
        yield Collected(chunks([1], set())[0], [])
        assert stop.wait(60)

    coming = ahead(batches(), stop)
    next(coming)
    coming.close()
    assert stop.is_set()
    assert "megabatch-batches_0" not in [thread.name for thread in threading.enumerate()]


def test_memory_is_used_again_when_no_tensor_refers_to_it() -> None:
    memory = Memory()
    shape = (4, 3, 5)
    first = memory.empty(shape, torch.float32)
    place = first.data_ptr()
    row = first[2:]
    del first
    gc.collect()
    other = memory.empty(shape, torch.float32).fill_(1)  # the row still refers to the first
    assert not place <= other.data_ptr() < place + 240
    row.fill_(7)
    assert (other == 1).all()
    del row
    gc.collect()
    again = memory.empty((60,), torch.int32)
    assert again.data_ptr() == place
    assert again.dtype == torch.int32
    assert memory.empty((2, 3), torch.bfloat16).shape == (2, 3)


def test_memory_of_images_has_their_order() -> None:
    images = torch.arange(24, dtype=torch.uint8).view(2, 2, 3, 2).permute(0, 3, 1, 2)
    own = Memory().like(images, 5)
    assert own.shape == (5, 2, 2, 3)
    assert own.is_contiguous(memory_format=torch.channels_last)
    assert Memory().like(images.contiguous(), 5).is_contiguous()
    assert Memory().like(torch.zeros(2, 7), 5).shape == (5, 7)


@pytest.mark.gpu
def test_pinned_memory_is_pinned_and_used_again() -> None:
    memory = Memory(pinned=True)
    first = memory.empty((4, 3, 5), torch.uint8)
    place = first.data_ptr()
    assert first.is_pinned()
    assert first[2:].is_pinned()
    first.copy_(torch.arange(60, dtype=torch.uint8).view(4, 3, 5))
    assert first.to("cuda", non_blocking=True).sum().item() == 59 * 30
    del first
    gc.collect()
    again = memory.empty((60,), torch.uint8)
    assert again.data_ptr() == place
    assert again.is_pinned()


@pytest.mark.gpu
def test_memory_that_cannot_be_pinned_stays_as_it_is() -> None:
    array = np.zeros(1 << 20, np.uint8)
    pin(array)
    pin(array)  # refused: it is pinned
    assert torch.ones(3, device="cuda").sum().item() == 3
    assert torch.from_numpy(array).is_pinned()
