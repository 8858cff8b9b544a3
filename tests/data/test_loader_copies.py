"""Batches of images that are only copied, by a thread and no process."""

from __future__ import annotations

import gc
import json
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from megabatch.data.glyphs import GlyphSet
from megabatch.data.loader import PairLoader

from .samples import Numbers, to_pixels, to_tokens
from .test_loader import assert_equal, epochs, loader


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
    return PairLoader(Rows(100, ()), **{**settings, **options})


def copying() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "megabatch-data_0"]


@pytest.mark.parametrize("drop_last", [True, False])
def test_what_is_only_copied_needs_no_process(drop_last: bool):
    expected = epochs(copied(drop_last=drop_last), 3)
    data = copied(drop_last=drop_last, workers=64)
    assert data.processes == 0
    assert_equal(epochs(data, 3), expected)
    assert len(expected) == 3 * data.batches_per_epoch
    assert loader(workers=2).processes == 2


def test_a_loop_over_copies_that_breaks_off():
    expected = epochs(copied(), 2)
    data = copied(workers=1)
    iterator = iter(data)
    first = [next(iterator) for _ in range(3)]
    assert len(copying()) == 1
    state = json.loads(json.dumps(data.state_dict()))
    del iterator
    gc.collect()
    assert copying() == []
    assert_equal(first + list(data) + list(data), expected)
    again = copied(workers=3)
    again.load_state_dict(state)
    assert_equal(first + epochs(again, 2), expected)


def test_ranks_share_what_is_copied():
    expected = list(copied())
    parts = [list(copied(workers=1, rank=rank, world_size=3)) for rank in range(3)]
    for whole, *own in zip(expected, *parts, strict=True):
        assert torch.equal(torch.cat([part.images for part in own]), whole.images)
        assert torch.equal(torch.cat([part.texts for part in own]), whole.texts)


def test_glyphs_come_fast_enough(glyphs: GlyphSet):
    """At least 30,000 pairs/s, also in the first epoch, which tokenises every name.

    In one of three tries: beside others on its core, work takes more of a processor's time too.
    """

    def tokens(captions: list[str]) -> torch.Tensor:
        return torch.from_numpy(np.array([[len(c)] * 64 for c in captions]))

    options = {"transform": AsTheyAre(), "tokenizer": tokens, "seed": 0}

    def rate() -> float:
        data = PairLoader(glyphs.split("train"), batch_size=4096, **options)
        start = time.process_time()
        pairs = sum(len(batch) for batch in data)
        assert pairs == 8 * 4096
        return pairs / (time.process_time() - start)

    assert any(rate() > 30_000 for _ in range(3))
