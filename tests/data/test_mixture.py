from __future__ import annotations

import json
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from megabatch.data.loader import Batch, PairLoader
from megabatch.data.mixture import MixedPairs, mix, parse_factors
from megabatch.data.order import Part, pairs_per_epoch
from megabatch.data.pairs import ArrayDataset, BadSample, Pair
from megabatch.errors import UsageError

from .samples import Numbers, to_pixels, to_pixels_and_noise, to_tokens


class Texts(Numbers):
    first = "text"


def mixed(factors: list[float] | None = None, bad: tuple[int, ...] = ()) -> MixedPairs:
    """30 samples, 10 and 20, of captions 0 .. 29, 0 .. 9 and 0 .. 19."""
    return MixedPairs([Numbers(30), Numbers(10, bad), Numbers(20)], ["a", "b", "c"], factors)


def loader(pairs: MixedPairs, **options: Any) -> PairLoader:
    settings = {"batch_size": 7, "transform": to_pixels_and_noise, "tokenizer": to_tokens}
    return PairLoader(pairs, **{**settings, "seed": 5, **options})


def test_numbering_is_that_of_the_sources_one_after_another():
    pairs = mixed()
    assert [int(pair.caption) for pair in pairs] == [*range(30), *range(10), *range(20)]
    with pytest.raises(IndexError):
        pairs[60]
    assert len(pickle.loads(pickle.dumps(pairs))) == 60


def test_without_factors_it_is_one_data_set():
    for factors in (None, [1.0, 1, 1]):
        pairs = mixed(factors)
        assert pairs.parts == [Part(60, 60)]
        assert pairs.shares == []
        state = loader(pairs).state_dict()
        loader(Numbers(60)).load_state_dict(state)  # type: ignore[arg-type]
        batches = list(loader(pairs, drop_last=False))
        seen = sorted(i for batch in batches for i in batch.indices.tolist())
        assert seen == list(range(60))


def test_factors_are_how_often_a_sample_comes():
    pairs = mixed([1, 2, 0.5])
    assert pairs_per_epoch(pairs) == 30 + 20 + 10
    assert pairs.shares[1:] == [
        "b: 10 pairs, of which an epoch draws 20",
        "c: 20 pairs, of which an epoch draws 10",
    ]
    data = loader(pairs, batch_size=6)
    assert data.batches_per_epoch == 10
    seen: Counter[int] = Counter()
    for _ in range(2):
        seen.update(i for batch in data for i in batch.indices.tolist())
    assert [seen[i] for i in range(60)] == [2] * 30 + [4] * 10 + [1] * 20


def test_ids_are_those_of_the_captions_in_all_sources():
    ids: dict[int, set[int]] = {}
    for batch in loader(mixed([1, 2, 1]), drop_last=False):
        assert batch.ids is not None
        for caption, number in zip(batch.texts[:, 0].tolist(), batch.ids.tolist(), strict=True):
            ids.setdefault(caption, set()).add(number)
    assert len(ids) == 30
    assert all(len(numbers) == 1 for numbers in ids.values())
    assert len(set.union(*ids.values())) == 30


def test_a_sample_that_comes_twice_is_augmented_in_two_ways():
    images: dict[int, list[float]] = {}
    for batch in loader(mixed([1, 2, 1]), drop_last=False):
        for index, image in zip(batch.indices.tolist(), batch.images, strict=True):
            images.setdefault(index, []).append(image.sum().item())
    assert [len(images[i]) for i in (29, 30, 39, 40)] == [1, 2, 2, 1]
    assert all(images[i][0] != images[i][1] for i in range(30, 40))


def three_epochs(data: PairLoader) -> list[Batch]:
    batches = []
    while data.epoch < 3:
        batches += list(data)
    return batches


@pytest.mark.parametrize("workers", [0, 1])
def test_resume_with_other_ranks_and_workers(workers: int):
    factors = [0.4, 2.5, 1]  # 12 + 25 + 20 samples: 8 batches of 7 an epoch
    whole = three_epochs(loader(mixed(factors)))
    assert len(whole) == 24
    for stop in (2, 8, 13):
        data = loader(mixed(factors))
        for _ in range(stop):
            next(iter(data))
        state = json.loads(json.dumps(data.state_dict()))
        parts = []
        for rank in range(2):
            again = loader(mixed(factors), workers=workers, rank=rank, world_size=2)
            again.load_state_dict(state)
            parts.append(three_epochs(again))
        for left, right, expected in zip(*parts, whole[stop:], strict=True):
            assert left.indices.tolist() + right.indices.tolist() == expected.indices.tolist()
            assert torch.equal(torch.cat([left.images, right.images]), expected.images)


def test_a_state_of_other_factors_is_refused():
    state = loader(mixed([1, 2, 1])).state_dict()
    with pytest.raises(UsageError, match=r"parts was \[\[30, 30\], .* is \[\[30, 20\]"):
        loader(mixed([2 / 3, 3, 1])).load_state_dict(state)
    with pytest.raises(UsageError, match=r"pairs was 70, is 60.*parts was .* is None"):
        loader(mixed()).load_state_dict(state)


def test_bad_samples_and_damage_of_the_sources():
    pairs = mixed(None, bad=(3,))
    with pytest.raises(BadSample):
        pairs[33]
    pairs.datasets[1].damage = ["b breaks off"]  # type: ignore[attr-defined]
    assert pairs.damage == ["b breaks off"]


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ([1, 2], "'1::2': expected 3 numbers, one for each source, got 2"),
        ([1, 0, 1], "'1::0::1'; expected numbers above 0"),
        ([1, -1, 1], "expected numbers above 0"),
        ([1, float("nan"), 1], "expected numbers above 0"),
        ([1, float("inf"), 1], "expected numbers above 0"),
        (
            [1, 0.04, 1],
            "--train-data-upsampling-factors: 0.04 of the 10 pairs of b is less than one pair",
        ),
    ],
)
def test_factors_that_cannot_be(factors: list[float], expected: str):
    with pytest.raises(UsageError, match=expected):
        mixed(factors)


def test_factors_as_openclip_writes_them():
    assert parse_factors("1::0.5::2") == [1, 0.5, 2]
    for text in ("", "1::", "1:2", "one"):
        with pytest.raises(
            UsageError, match=f"--train-data-upsampling-factors: '{text}'; expected numbers"
        ):
            parse_factors(text)


def test_images_and_texts_do_not_mix():
    with pytest.raises(UsageError, match="a has images with texts, but b texts"):
        MixedPairs([Numbers(3), Texts(3)], ["a", "b"])
    assert MixedPairs([Texts(3), Texts(3)], ["a", "b"]).first == "text"
    assert isinstance(MixedPairs([Texts(3)], ["a"], [2])[1], Pair)


class Arrays(Numbers):
    """Numbers, many at once."""

    def arrays(self, indices: Any) -> np.ndarray:
        return np.stack([np.array(self[int(index)].image)[None] for index in indices])

    def texts(self, indices: Any) -> list[str]:
        return [self[int(index)].caption for index in indices]


class Brighter:
    def __call__(self, image: Any) -> torch.Tensor:
        return self.batch(to_pixels(image)[None], torch.zeros(1))[0]

    def batch(self, images: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        return images + 1


def test_a_single_source_still_gives_many_at_once():
    pairs = mix([Arrays(10)], ["a"], [2.5])
    assert isinstance(pairs, ArrayDataset)
    assert pairs_per_epoch(pairs) == 25
    assert pairs.shares == ["a: 10 pairs, of which an epoch draws 25"]  # type: ignore[attr-defined]
    fast = list(loader(pairs, transform=Brighter()))
    slow = list(loader(MixedPairs([Numbers(10)], ["a"], [2.5]), transform=Brighter()))
    for one, other in zip(fast, slow, strict=True):
        for name in ("images", "texts", "indices", "ids"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
