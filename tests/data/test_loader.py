from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.data.glyphs import GlyphSet
from megabatch.data.loader import Batch, PairLoader
from megabatch.errors import UsageError

from .samples import Numbers, to_pixels, to_pixels_and_noise, to_tokens


def loader(n: int = 100, bad: Sequence[int] = (), **options: Any) -> PairLoader:
    settings = {"batch_size": 8, "transform": to_pixels, "tokenizer": to_tokens, "seed": 1}
    return PairLoader(Numbers(n, bad), **{**settings, **options})


class AsTheyAre:
    """Leaves bytes unchanged, so that they are only copied."""

    def __call__(self, image) -> torch.Tensor:
        return to_pixels(image)

    def batch(self, images: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        return images


class Rows(Numbers):
    """Arrays of one number each."""

    def arrays(self, indices: Any) -> np.ndarray:
        return np.asarray(indices, np.uint8)[:, None, None, None].repeat(2, 2).repeat(2, 3)

    def texts(self, indices: Any) -> list[str]:
        return [self[int(i)].caption for i in indices]


def copied(**options: Any) -> PairLoader:
    settings = {"batch_size": 8, "transform": AsTheyAre(), "tokenizer": to_tokens, "seed": 1}
    return PairLoader(Rows(100), **{**settings, **options})


def saved(data: PairLoader) -> dict[str, Any]:
    return json.loads(json.dumps(data.state_dict()))


def resumed(state: dict[str, Any], *arguments: Any, **options: Any) -> PairLoader:
    data = loader(*arguments, **options)
    data.load_state_dict(state)
    return data


def indices(batches: list[Batch]) -> list[list[int]]:
    return [batch.indices.tolist() for batch in batches]


def assert_equal(left: list[Batch], right: list[Batch]) -> None:
    assert indices(left) == indices(right)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.texts, b.texts)


def epochs(data: PairLoader, count: int) -> list[Batch]:
    return [batch for _ in range(count) for batch in data]


def use_up(data: PairLoader, count: int) -> None:
    for _ in range(count):
        for _ in data:
            pass


@given(
    n=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    bad=st.sets(st.integers(0, 59), max_size=20),
)
@settings(max_examples=40)
def test_each_sample_at_most_once_an_epoch_and_batches_lack_the_bad_ones(n, batch_size, bad):
    if batch_size > n:
        return
    whole = loader(n, batch_size=batch_size)
    expected = indices(list(whole))
    assert whole.epoch == 1
    assert len(expected) == whole.batches_per_epoch == n // batch_size
    seen = [i for batch in expected for i in batch]
    assert len(seen) == len(set(seen))
    data = loader(n, tuple(bad), batch_size=batch_size)
    for batch in expected:
        good = [i for i in batch if i not in bad]
        if not good:
            with pytest.raises(UsageError, match="no sample of a batch can be used"):
                list(data)
            return
    batches = list(data)
    assert indices(batches) == [[i for i in batch if i not in bad] for batch in expected]
    for batch in batches:
        assert batch.images.shape == (len(batch), 1, 2, 2)
        assert batch.images[:, 0, 0, 0].tolist() == batch.indices.tolist()
        assert batch.texts[:, 0].tolist() == batch.indices.tolist()
        assert batch.texts.dtype == batch.indices.dtype == batch.ids.dtype == torch.int64
    assert sum(data.skipped.values()) == len(bad.intersection(seen))


@given(
    n=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    bad=st.sets(st.integers(0, 59), max_size=5),
    world_size=st.integers(2, 4),
    stop=st.integers(0, 5),
)
@settings(max_examples=40)
def test_ranks_share_the_batches_of_one(n, batch_size, bad, world_size, stop):
    if not world_size <= batch_size <= n or len(bad) >= batch_size // world_size:
        return  # a rank might be left with nothing, which is an error
    whole = indices(list(loader(n, batch_size=batch_size)))  # with no bad ones among them
    share = {"batch_size": batch_size, "world_size": world_size}

    def rows(rank: int) -> list[list[int]]:
        data = loader(n, tuple(bad), rank=rank, **share)
        found = []
        for batch in data:
            found += [batch.indices.tolist()]
            if len(found) == stop and data.epoch == 0:  # in another process
                again = resumed(saved(data), n, tuple(bad), rank=rank, **share)
                return found + indices(list(again))
        assert data.epoch == 1
        return found

    parts = [rows(rank) for rank in range(world_size)]
    for k, batch in enumerate(whole):
        assert [i for part in parts for i in part[k]] == [i for i in batch if i not in bad]
        assert max(len(part[k]) for part in parts) <= -(-batch_size // world_size)


def test_other_ranks_and_another_batch_size_go_on():
    whole = [i for batch in loader(50, batch_size=1) for i in batch.indices.tolist()]
    data = loader(50, batch_size=7, rank=1, world_size=3)
    for k in range(3):
        assert next(iter(data)).indices.tolist() == whole[7 * k + 2 : 7 * k + 4]
    for size in (2, 4, 29):
        share = {"batch_size": size, "world_size": 2}
        ranks = [indices(list(resumed(saved(data), 50, rank=r, **share))) for r in range(2)]
        after = [i for parts in zip(*ranks, strict=True) for part in parts for i in part]
        assert after == whole[21 : 21 + 29 // size * size]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_stream_is_a_function_of_the_seed(workers: int):
    options = {"n": 200, "batch_size": 70, "bad": (3, 4, 50), "transform": to_pixels_and_noise}
    expected = epochs(loader(**options), 3)
    data = loader(**options, workers=workers)
    assert data.processes == workers
    assert_equal(epochs(data, 3), expected)
    assert data.epoch == 3
    assert indices(expected[:2]) != indices(expected[2:4])
    assert indices(epochs(loader(**options, seed=2), 1)) != indices(expected[:2])
    if workers == 1:
        for rank in range(2):
            share = {**options, "rank": rank, "world_size": 2}
            assert_equal(list(loader(**share)), list(loader(workers=1, **share)))


def augmented(**options: Any) -> PairLoader:
    return loader(bad=(3, 40, 41), transform=to_pixels_and_noise, **options)


@pytest.mark.parametrize("made", [augmented, copied])
@pytest.mark.parametrize(("workers", "stop"), [(0, 1), (0, 12), (2, 5)])
def test_a_loop_that_breaks_off_goes_on_exactly(made: Any, workers: int, stop: int):
    reference = made()
    expected = epochs(reference, 3)
    data = made(workers=workers)
    iterator = iter(data)
    before = [next(iterator) for _ in range(stop)]
    state = saved(data)
    del iterator
    gc.collect()
    assert not any(t.name.startswith("megabatch-data") for t in threading.enumerate())
    again = made(workers=workers)
    again.load_state_dict(state)
    for one in (data, again):
        assert_equal(before + epochs(one, 3 - state["epoch"]), expected)
        assert one.state_dict() == reference.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_counted_once_over_epochs_and_resumes(workers: int):
    data, missing = loader(bad=(3, 40, 41), workers=workers), 0
    for batch in data:
        missing += 8 - len(batch)
        assert sum(data.skipped.values()) == missing
    use_up(data, 2)
    assert data.skipped == {"odd": 2, "even": 1}
    again = resumed(saved(data), bad=(3, 40, 41))
    use_up(again, 2)
    assert again.skipped == data.skipped
    again.dataset.damage = ["a.tar: breaks off"]
    damage, odd, even = again.report()
    assert damage == "damaged: a.tar: breaks off"
    assert odd.startswith("skipped 2 x odd (first: ")
    assert even == "skipped 1 x even (first: 40)"


def test_a_rank_without_any_usable_row_of_a_batch():
    row = next(iter(loader(20))).indices.tolist()
    for world_size in (1, 2):
        data = loader(20, bad=row[: 8 // world_size], rank=0, world_size=world_size)
        told = f"no sample of a batch can be used, of {8 // world_size} on this rank: {row[0]}: "
        with pytest.raises(UsageError, match=told):
            next(iter(data))


class Hanging(Numbers):
    """Sample 20 never comes."""

    def __getitem__(self, index):
        if index == 20:
            time.sleep(60)
        return super().__getitem__(index)


@pytest.mark.usefixtures("short_wait")
def test_a_reader_that_hangs():
    options = {"transform": to_pixels, "tokenizer": to_tokens, "seed": 1}
    data = PairLoader(Hanging(40, ()), batch_size=40, workers=1, timeout=1, **options)
    with pytest.raises(UsageError, match="no sample for 1 s: one hangs"):
        list(data)


def test_workers_end_at_once(monkeypatch):
    """DataLoader's wait for hanging workers is made so long that using it would be noticed."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 60)
    data = loader(workers=2)
    list(data)
    start = time.monotonic()
    del data
    gc.collect()
    assert time.monotonic() - start < 30


def test_an_interrupt_does_not_spoil_the_workers():
    options = {"n": 800, "workers": 2, "transform": to_pixels_and_noise}
    data, caught = loader(**options), threading.Event()

    def interrupt() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        while not caught.wait(5):  # Python ignores exceptions in destructors and around a fork
            os.kill(os.getpid(), signal.SIGINT)

    list(data)  # the processes persist: none is forked from now on
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        use_up(data, 1000)
    caught.set()
    thread.join()
    again = resumed(data.state_dict(), **options)
    assert_equal(list(data), list(again))


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_more_than_two_batches_are_in_memory(ranks: int):
    data = loader(600, batch_size=64 * ranks, workers=1, world_size=ranks)
    places, coming = set(), iter(data)
    while (batch := next(coming, None)) is not None:
        places.add(batch.images.data_ptr())
        time.sleep(0.02)  # the next one is put together
        del batch
    assert len(places) <= 2


def test_what_is_only_copied_needs_no_process():
    expected = epochs(copied(), 3)
    data = copied(workers=64)
    assert data.processes == 0
    assert_equal(epochs(data, 3), expected)
    assert len(expected) == 3 * data.batches_per_epoch
    parts = [epochs(copied(workers=1, rank=rank, world_size=3), 3) for rank in range(3)]
    for whole, *own in zip(expected, *parts, strict=True):
        assert torch.equal(torch.cat([part.images for part in own]), whole.images)
        assert torch.equal(torch.cat([part.texts for part in own]), whole.texts)


def test_glyphs_come_fast_enough(glyphs: GlyphSet):
    """At least 30,000 pairs/s, in one of three tries: beside others, work takes more time."""

    def tokens(captions: list[str]) -> torch.Tensor:
        return torch.zeros(len(captions), 64, dtype=torch.int64)

    def rate() -> float:
        options = {"transform": AsTheyAre(), "tokenizer": tokens, "seed": 0}
        data = PairLoader(glyphs.split("train"), batch_size=4096, **options)
        start = time.process_time()
        return sum(map(len, data)) / (time.process_time() - start)

    assert any(rate() > 30_000 for _ in range(3))


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 0}, {"batch_size": 101}, {"batch_size": 3, "world_size": 4}, {"rank": 1}],
)
def test_numbers_out_of_range(options: dict[str, int]):
    with pytest.raises(UsageError, match="pairs: expected rank < world_size <= batch_size <= pai"):
        loader(**options)


@pytest.mark.parametrize("change", [{"seed": 2}, {"n": 99}])
def test_a_state_of_another_order_is_refused(change: dict[str, Any]):
    state = loader().state_dict()
    with pytest.raises(UsageError, match=r"cannot be resumed where they were left: .* was .* is"):
        resumed(state, **change)
