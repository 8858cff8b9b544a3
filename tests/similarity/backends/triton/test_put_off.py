"""Products of x's gradient that are put off: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megabatch.similarity.pairs import Pairs
from megabatch.similarity.sigmoid_blocks import Need, Terms
from tests.similarity.features import MAKERS

pytest.importorskip("triton")
from megabatch.similarity.backends.triton.blocks import FusedBlocks
from megabatch.similarity.backends.triton.sigmoid_blocks import SigmoidBlocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE, BIAS = (torch.tensor(number, device=DEVICE) for number in (10.0, -3.0))
WORKSPACE = 1 << 20  # two strips of 600 rows, two blocks of 700 columns

Deferred = list[Callable[[], None]] | None

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def log_sum_exps(x: Tensor, y: Tensor) -> tuple[FusedBlocks, Callable[..., None]]:
    """Blocks, and what adds the gradients of one strip of their rows."""
    blocks = FusedBlocks(x, y, Pairs(), False, WORKSPACE)
    rows, columns = blocks.values(SCALE, 1, True)
    assert columns is not None
    sides = [blocks.pull(v, torch.full_like(v, 1e-3)) for v in (rows, columns)]

    def add(i: slice, dx: Tensor, dy: Tensor, overwrite: tuple[bool, bool], to: Deferred) -> None:
        blocks.backward(i, SCALE, *sides, dx, dy, overwrite, to)

    return blocks, add


def sigmoids(x: Tensor, y: Tensor) -> tuple[FusedBlocks, Callable[..., None]]:
    """The same of the sigmoid loss."""
    blocks = SigmoidBlocks(x, y, Pairs(), Terms(SCALE, BIAS, None), Need(True, True, True, True))
    return blocks, blocks.add


@pytest.mark.parametrize("kind", [log_sum_exps, sigmoids])
def test_the_last_product_of_dx_may_be_left_to_the_caller(
    kind: Callable[..., tuple[FusedBlocks, Callable[..., None]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megabatch.similarity.sweep.workspace", lambda like: WORKSPACE)
    x, y = (t.to(DEVICE, torch.float16) for t in MAKERS["random"](600, 700, 24))
    made = []
    deferred: Deferred
    for deferred in (None, []):
        blocks, add = kind(x, y)
        dx, dy = blocks.buffer(len(x)), blocks.buffer(len(y))
        strips = list(blocks.strips())
        assert len(strips) == 2
        for i in strips:
            add(i, dx[i], dy, (True, i.start == 0), deferred)
            if deferred is not None:
                assert len(deferred) == 1
                before = dx[i].clone()
                deferred.pop()()
                assert not torch.equal(before, dx[i])
        made.append((dx, dy))
    for a, b in zip(*made, strict=True):
        assert torch.equal(a, b)
