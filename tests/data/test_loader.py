from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.data.loader import Batch, PairLoader
from megabatch.errors import UsageError

from .samples import Numbers, to_pixels, to_pixels_and_noise, to_tokens


def loader(n: int = 100, bad: Sequence[int] = (), **options: Any) -> PairLoader:
    settings = {"batch_size": 8, "transform": to_pixels, "tokenizer": to_tokens, "seed": 1}
    return PairLoader(Numbers(n, bad), **{**settings, **options})


def indices(batches: list[Batch]) -> list[list[int]]:
    return [batch.indices.tolist() for batch in batches]


def assert_equal(left: list[Batch], right: list[Batch]) -> None:
    assert indices(left) == indices(right)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.texts, b.texts)


def test_a_batch_belongs_together():
    for batch in loader(transform=to_pixels):
        assert len(batch) == 8
        assert batch.images.shape == (8, 1, 2, 2)
        assert batch.images[:, 0, 0, 0].tolist() == batch.indices.tolist()
        assert batch.texts[:, 0].tolist() == batch.indices.tolist()
        assert batch.texts.dtype == batch.indices.dtype == torch.int64


@given(
    n=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    bad=st.sets(st.integers(0, 59), max_size=30),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
@settings(max_examples=40)
def test_each_sample_at_most_once_an_epoch(n, batch_size, bad, drop_last, shuffle):
    bad = {i for i in bad if i < n}
    if batch_size > n:
        return
    data = loader(n, tuple(bad), batch_size=batch_size, drop_last=drop_last, shuffle=shuffle)
    try:
        batches = list(data)
    except UsageError:
        batches = []
        assert sum(data.skipped.values()) == len(bad) >= n - n % batch_size
    assert data.epoch == 1
    seen = [i for batch in batches for i in batch.indices.tolist()]
    assert len(seen) == len(set(seen))
    whole = loader(n, batch_size=batch_size, drop_last=drop_last, shuffle=shuffle)
    expected = indices(list(whole))
    assert len(expected) == data.batches_per_epoch
    without_bad = [[i for i in batch if i not in bad] for batch in expected]
    assert indices(batches) == [batch for batch in without_bad if batch]


@given(
    n=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    bad=st.sets(st.integers(0, 59), max_size=5),
    shuffle=st.booleans(),
    world_size=st.integers(2, 4),
    workers=st.just(0),
    stop=st.integers(0, 5),
)
@settings(max_examples=40)
def test_ranks_share_the_batches_of_one(n, batch_size, bad, shuffle, world_size, workers, stop):
    if not world_size <= batch_size <= n:
        return
    options = {"batch_size": batch_size, "shuffle": shuffle, "workers": workers}
    whole = indices(list(loader(n, **options)))  # with no bad ones among them

    def rows(rank: int) -> list[list[int]]:
        data = loader(n, tuple(bad), rank=rank, world_size=world_size, **options)
        found = []
        for batch in data:
            found += [batch.indices.tolist()]
            if len(found) == stop and data.epoch == 0:  # another number of ranks goes on
                again = loader(n, tuple(bad), rank=rank, world_size=world_size, **options)
                again.load_state_dict(json.loads(json.dumps(data.state_dict())))
                return found + indices(list(again))
        assert data.epoch == 1
        return found

    shares = [batch_size * (r + 1) // world_size - batch_size * r // world_size for r in range(4)]
    if len(bad) >= min(shares[:world_size]):
        return  # a rank might be left with nothing, which is an error
    parts = [rows(rank) for rank in range(world_size)]
    assert all(len(part) == len(whole) for part in parts)
    for k, batch in enumerate(whole):
        assert [i for part in parts for i in part[k]] == [i for i in batch if i not in bad]
        assert max(len(part[k]) for part in parts) <= -(-batch_size // world_size)


def test_another_number_of_ranks_goes_on():
    whole = indices(list(loader(100)))
    data = loader(100, rank=1, world_size=3)
    iterator = iter(data)
    first = [next(iterator).indices.tolist() for _ in range(4)]
    assert first == [batch[2:5] for batch in whole[:4]]
    state = data.state_dict()
    for size in (1, 2):
        rest = []
        for rank in range(size):
            again = loader(100, rank=rank, world_size=size)
            again.load_state_dict(state)
            rest.append(indices(list(again)))
        joined = [[i for part in parts for i in part] for parts in zip(*rest, strict=True)]
        assert joined == whole[4:]


def test_workers_change_nothing_for_a_rank():
    for rank in range(2):
        options = {"batch_size": 70, "n": 200, "bad": (3, 5), "rank": rank, "world_size": 2}
        assert_equal(list(loader(**options)), list(loader(workers=1, **options)))


@given(
    batch_size=st.integers(1, 12),
    bad=st.sets(st.integers(0, 49), max_size=20),
    stop=st.integers(0, 60),
    resumed_batch_size=st.integers(1, 12),
)
@settings(max_examples=25)
def test_resume_continues_the_very_stream(batch_size, bad, stop, resumed_batch_size):
    def stream(data: PairLoader) -> list[int]:
        return [i for batch in data for i in batch.indices.tolist()]

    whole = stream(loader(50, tuple(bad), batch_size=1))
    data = loader(50, tuple(bad), batch_size=batch_size, drop_last=False)
    before: list[int] = []
    iterator = iter(data)
    for _ in range(stop):
        batch = next(iterator, None)
        if batch is None or data.epoch == 1:
            return
        before += batch.indices.tolist()
    state = json.loads(json.dumps(data.state_dict()))
    resumed = loader(50, tuple(bad), batch_size=resumed_batch_size, drop_last=False)
    resumed.load_state_dict(state)
    assert before + stream(resumed) == whole
    assert sum(resumed.skipped.values()) == len(bad)


def epochs(data: PairLoader, count: int) -> list[Batch]:
    return [batch for _ in range(count) for batch in data]


def use_up(data: PairLoader, count: int) -> None:
    for _ in range(count):
        for _ in data:
            pass


@pytest.mark.parametrize("workers", [0, 2])
def test_the_stream_is_a_function_of_the_seed(workers: int):
    options = {"bad": (3, 4, 50), "transform": to_pixels_and_noise}
    expected = epochs(loader(**options), 3)
    data = loader(**options, workers=workers)
    actual = epochs(data, 3)
    assert_equal(actual, expected)
    assert data.epoch == 3
    per_epoch = len(expected) // 3
    first, second = indices(expected)[:per_epoch], indices(expected)[per_epoch : 2 * per_epoch]
    assert first != second
    assert indices(epochs(loader(**options, seed=2), 1)) != first


@pytest.mark.parametrize(("workers", "stop"), [(0, 1), (0, 5), (0, 12), (2, 5)])
def test_resume_in_mid_epoch_is_exact(workers: int, stop: int):
    options = {"bad": (3, 40, 41), "transform": to_pixels_and_noise, "workers": workers}
    reference = loader(**options)
    expected = epochs(reference, 3)
    data = loader(**options)
    iterator = iter(data)
    before = [next(iterator) for _ in range(stop)]
    state = json.loads(json.dumps(data.state_dict()))
    del iterator

    resumed = loader(**options)
    resumed.load_state_dict(state)
    after = epochs(resumed, 3 - state["epoch"])
    assert_equal(before + after, expected)
    assert resumed.state_dict() == reference.state_dict()


def test_state_before_the_batch_is_handed_out():
    """A state saved during a batch's step resumes with the next batch."""
    data = loader(16)
    for number, _ in enumerate(data):
        state = data.state_dict()
        assert (state["epoch"], state["position"]) == [(0, 8), (1, 0)][number]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_breaks_off_goes_on_where_it_was(workers: int):
    expected = epochs(loader(), 2)
    data = loader(workers=workers)
    first = [next(iter(data)) for _ in range(3)]
    assert_equal(first + list(data) + list(data), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_counted_when_they_are_passed(workers: int):
    data = loader(100, bad=range(40, 60), shuffle=False, workers=workers)
    counts = []
    for _ in data:
        counts.append(sum(data.skipped.values()))
    assert counts == [0, 0, 0, 0, 0, 20, 20, 20, 20, 20]
    assert data.skipped == {"odd": 10, "even": 10}
    assert data.skipped_first == {"odd": "41", "even": "40"}
    assert sorted(data.report()) == [
        "skipped 10 x even (first: 40)",
        "skipped 10 x odd (first: 41)",
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_counted_once_over_epochs_and_resumes(workers: int):
    data = loader(bad=(3, 40, 41), workers=workers)
    use_up(data, 2)
    assert data.skipped == {"odd": 2, "even": 1}
    resumed = loader(bad=(3, 40, 41))
    resumed.load_state_dict(json.loads(json.dumps(data.state_dict())))
    use_up(resumed, 2)
    assert resumed.skipped == data.skipped


def test_a_batch_lacks_its_bad_samples():
    data = loader(20, bad=[1, 2, 9, *range(12, 16)], batch_size=4, shuffle=False)
    assert indices(list(data)) == [[0, 3], [4, 5, 6, 7], [8, 10, 11], [16, 17, 18, 19]]


def test_the_last_batch():
    sizes = [len(batch) for batch in loader(20, drop_last=False)]
    assert sizes == [8, 8, 4]
    assert loader(20, drop_last=False).batches_per_epoch == 3
    assert loader(20).batches_per_epoch == len(list(loader(20))) == 2


def test_a_rank_without_any_usable_row_of_a_batch():
    data = loader(20, bad=range(4), shuffle=False, rank=0, world_size=2)
    with pytest.raises(UsageError, match="whole part of a batch, 4 samples, is unusable"):
        list(data)


class Hanging(Numbers):
    """Sample 20 never comes."""

    def __getitem__(self, index):
        if index == 20:
            time.sleep(60)
        return super().__getitem__(index)


@pytest.mark.usefixtures("short_wait")
def test_a_reader_that_hangs():
    options = {"transform": to_pixels, "tokenizer": to_tokens, "seed": 1, "shuffle": False}
    data = PairLoader(Hanging(40, ()), batch_size=40, workers=1, timeout=1, **options)
    with pytest.raises(UsageError, match="no sample for 1 s: a reader hangs"):
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
    again = loader(**options)
    again.load_state_dict(data.state_dict())
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


def test_nothing_usable():
    data = loader(20, bad=range(20))
    with pytest.raises(UsageError, match="whole epoch of 20 pairs has no usable one: skipped"):
        next(iter(data))


def test_damage_is_reported():
    data = loader()
    data.dataset.damage = ["a.tar: breaks off"]
    assert data.report() == ["damaged: a.tar: breaks off"]


def test_a_batch_larger_than_the_data():
    with pytest.raises(UsageError, match="batch size 101 is larger than the data set: 100 pairs"):
        loader(100, batch_size=101)
    with pytest.raises(UsageError, match="batch size 3 is smaller than the number of ranks, 4"):
        loader(100, batch_size=3, world_size=4)
    with pytest.raises(ValueError, match="drop_last: False with 2 ranks"):
        loader(100, world_size=2, drop_last=False)
    assert len(list(loader(100, batch_size=100))) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("workers", -1), ("seed", -1), ("seed", 2**32), ("rank", 1)],
)
def test_numbers_out_of_range(name: str, value: int):
    with pytest.raises(ValueError, match=f"{name}: {value}; expected at least"):
        loader(**{name: value})


@pytest.mark.parametrize("change", [{"seed": 2}, {"n": 99}, {"shuffle": False}])
def test_a_state_of_another_order_is_refused(change: dict[str, Any]):
    state = loader().state_dict()
    with pytest.raises(UsageError, match=r"cannot be resumed where they were left: .* was .* is"):
        loader(**change).load_state_dict(state)
