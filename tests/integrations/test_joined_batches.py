"""The batches of a step as one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megabatch.integrations.joined_batches import JoinedBatches


class NumberedBatches:
    """A loader whose tensors are known to be alive, with an event for each batch that it makes."""

    num_batches, num_samples = 5, 10

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.made = [threading.Event() for _ in range(self.num_batches)]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(self.num_batches):
            images = torch.full((2, 3), float(i))
            self.alive.add(images)
            self.made[i].set()
            yield images, torch.tensor([2 * i, 2 * i + 1])


@pytest.mark.concurrency
def test_joined_batches_are_freed_before_the_next_are_loaded() -> None:
    own = NumberedBatches()
    loader = JoinedBatches(own, 2, ahead=True)
    assert (loader.num_batches, loader.num_samples) == (2, 10)
    steps = iter(loader)
    images, texts = next(steps)
    assert images.to(torch.device("cpu"), dtype=torch.bfloat16, non_blocking=True) is images
    assert len(images) == len(texts) == 4
    assert images[2:4].dtype == torch.bfloat16
    assert torch.equal(texts[1:2], torch.tensor([1]))
    assert not own.made[2].is_set()
    assert torch.equal(images[2:4].float(), torch.ones(2, 3))  # for the last time
    assert own.made[2].wait(60)
    with pytest.raises(RuntimeError, match="rows 2 to 4: encoded twice already"):
        images[2:4]
    assert not own.made[3].is_set()
    assert len(own.alive) == 2
    images, texts = next(steps)
    assert torch.equal(images[0:2], torch.full((2, 3), 2.0))
    assert len(own.alive) == 2
    assert list(steps) == []  # the fifth batch is dropped


def test_batches_of_a_loader_without_processes_are_loaded_when_they_are_due() -> None:
    own = NumberedBatches()
    steps = iter(JoinedBatches(own, 2, ahead=False))
    images, _ = next(steps)
    assert torch.equal(images[0:2], images[0:2])
    assert not own.made[2].is_set()
    assert torch.equal(next(steps)[0][2:4], torch.full((2, 3), 3.0))
    assert list(steps) == []


@pytest.mark.concurrency
def test_joined_batches_end_in_the_middle() -> None:
    steps = iter(JoinedBatches(NumberedBatches(), 2, ahead=True))
    next(steps)
    steps.close()
    assert "megabatch-joined-batches_0" not in [thread.name for thread in threading.enumerate()]
