"""Tests on GPUs only: large shards, CUDA graphs, and ranks that die while NCCL waits."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import ClipLoss, SigLipLoss
from megabatch.errors import CommunicationError
from megabatch.similarity.distributed import schedule
from tests.process_state import changed
from tests.similarity.distributed.comparison import Sizes, compare, leaf
from tests.similarity.distributed.processes import World, join, on_gpus, start

#: seconds until the group gives up on a transfer
TIMEOUT = 100


def close(mine: Tensor, truth: Tensor) -> None:
    """Gradients of rows to half precision."""
    if mine.dim() == 2:
        error = (mine.float() - truth.float()).norm(dim=1)
        assert (error <= 0.01 * truth.float().norm(dim=1)).all()
    else:
        torch.testing.assert_close(mine, truth, rtol=1e-3, atol=1e-6)


@on_gpus(2, 3, 4)
def test_large_shards(world: World) -> None:
    """Gathered at once, with own columns first, and in rounds."""
    rows, d, n = schedule.LARGE, 64, world.size

    def clip(group: Any, *given: Tensor) -> list[Tensor]:
        return [ClipLoss(group=group)(*given[:3]) / (1 if group == "local" else n)]

    def sig_lip(group: Any, *given: Tensor) -> list[Tensor]:
        return [SigLipLoss(group=group)(*given) / (1 if group == "local" else n)]

    sizes = [rows] * n
    inputs: list[tuple[Tensor, Sizes]] = [
        *((F.normalize(torch.randn(rows * n, d), dim=1).bfloat16(), sizes) for _ in range(2)),
        *((torch.tensor(value), None) for value in (10.0, -5.0)),
    ]
    for bound in (None, n * rows * d * 2 - 1):
        with changed("gather", bound):
            compare(world, clip, inputs[:3], [None], close=close)
            compare(world, sig_lip, inputs, [None], close=close)


@on_gpus(2, 3, 4)
def test_as_cuda_graphs(world: World) -> None:
    """The handshake takes place when graphs are captured, and not when they are replayed."""
    loss = ClipLoss()

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        x, y = (F.normalize(torch.randn(256, 64), dim=1).bfloat16() for _ in range(2))
        return leaf(x), leaf(y), leaf(torch.tensor(10.0))

    graphed = torch.cuda.make_graphed_callables(lambda *inputs: loss(*inputs), batch())
    for _ in range(3):
        mine = batch()
        theirs = tuple(map(leaf, mine))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "megabatch.similarity.distributed.comm.agree",
                lambda *words: pytest.fail("handshake"),
            )
            value = graphed(*mine)
            value.backward()
        truth = loss(*theirs)
        truth.backward()
        assert torch.equal(value, truth)
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a.grad, b.grad)
    del graphed, value
    gc.collect()  # NCCL cannot end while graphs hold its transfers


def dying(rank: int, size: int, port: int, folder: Path) -> None:
    """Rank 1 dies between two losses; rank 0 writes its error."""
    join(rank, size, port, seconds=TIMEOUT, device="cuda")
    x, y = (torch.randn(256, 64, device="cuda", requires_grad=True) for _ in range(2))

    def step() -> None:
        ClipLoss()(x, y, 10.0).backward()
        torch.cuda.synchronize()

    step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        step()
    except CommunicationError as error:
        (folder / "error").write_text(f"{time.monotonic() - begin}\n{error}")
    os._exit(0)


def after(processes: list[Any], limit: float) -> tuple[float, list[int | None]]:
    """Seconds until all have ended, at most the limit, and their exit codes."""
    begin = time.monotonic()
    for process in processes:
        process.join(max(0.0, begin + limit - time.monotonic()))
    taken, codes = time.monotonic() - begin, [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return taken, codes


def two_gpus(test: Callable[..., None]) -> Callable[..., None]:
    few = torch.cuda.device_count() < 2
    return pytest.mark.gpu(pytest.mark.skipif(few, reason="needs 2 CUDA devices")(test))


@two_gpus
def test_a_rank_that_died_is_noticed_by_the_next_loss(tmp_path: Path) -> None:
    _, codes = after(start(2, dying, tmp_path, device="cuda"), 60)
    assert codes == [0, -signal.SIGKILL]
    seconds, message = (tmp_path / "error").read_text().split("\n", 1)
    assert float(seconds) < 2
    assert message.startswith("split_logsumexp: before the first transfer, rank 0: rank 1 of the")
