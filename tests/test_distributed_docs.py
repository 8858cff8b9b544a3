"""The loops of docs/distributed.md and docs/integrations/any-loop.md: one process learns as two."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.docs.pages import blocks
from tests.similarity.distributed.processes import World, on_processes

ANY_LOOP = "docs/integrations/any-loop.md"


def loss_of(code: str) -> Any:
    """The last loss of a loop, which finds its group formed."""
    names: dict[str, Any] = {}
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        exec(code, names)
    return names["loss"].detach()


def alone(code: str) -> Any:
    """The last loss of a loop that takes no notice of the other ranks."""
    return loss_of(code.replace("mb.ClipLoss()", 'mb.ClipLoss(group="local")'))


def test_the_loop_of_one_process_learns_the_same_with_and_without_a_cache() -> None:
    setup, loop, *_ = blocks(ANY_LOOP, "python")
    without = loop.replace("step(images, texts)", "clip(*model(images, texts))")
    assert without != loop
    cached = loss_of(setup + loop)
    assert cached < 3  # 9 at the start
    torch.testing.assert_close(cached, loss_of(setup + without))


@on_processes(2)
def test_the_loops_of_two_processes_learn_as_that_of_one(world: World) -> None:
    setup, one, *loops, report = blocks(ANY_LOOP, "python")
    expected = alone(setup + one).item()
    for wrapper in ("DistributedDataParallel", "fully_shard"):
        (loop,) = (code for code in loops if f"import {wrapper}" in code)
        assert loss_of(setup + loop + report).item() / 2 == pytest.approx(expected, abs=1e-4)
    code, *_ = blocks("docs/distributed.md", "python")
    with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
        expected = alone(code).item()
    assert expected < 4  # it learns: at the start 9
    with mock.patch.dict(os.environ, RANK=str(world.rank), WORLD_SIZE="2"):
        assert loss_of(code).item() / 2 == pytest.approx(expected, abs=1e-4)
