"""The deferred product of x's gradient, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megabatch.similarity import engine, settings
from megabatch.similarity.masks import Pairs
from megabatch.similarity.reductions.operands import Need, SigmoidParams
from tests.similarity.features import MAKERS

pytest.importorskip("triton")
from megabatch.similarity.backends.triton.sigmoid_tiles import SigmoidKernelTiles
from megabatch.similarity.backends.triton.softmax import SoftmaxKernelTiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE, BIAS = (torch.tensor(number, device=DEVICE) for number in (10.0, -3.0))
WORKSPACE = 1 << 20  # two strips of 600 rows, two blocks of 700 columns

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("kind", ["log-sum-exps", "sigmoids"])
def test_the_last_product_of_dx_can_be_deferred(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "workspace", lambda like: WORKSPACE)
    x, y = (t.to(DEVICE, torch.float16) for t in MAKERS["random"](600, 700, 24))
    made = []
    for deferred in (None, []):
        tiles: Any
        upstreams: list[Any] = [None, None]
        if kind == "sigmoids":
            need = Need(True, True, True, True)
            tiles = SigmoidKernelTiles(
                x, y, Pairs(), SigmoidParams(SCALE, BIAS, None), need, (0, len(x))
            )
        else:
            tiles = SoftmaxKernelTiles(x, y, Pairs(), SCALE)
            sides = tiles.reduce(True)
            upstreams = [tiles.make_upstream(v, torch.full_like(v, 1e-3)) for v in sides]
        dx, dy = tiles.new_total(len(x)), tiles.new_total(len(y))
        strips = list(tiles.row_blocks())
        assert len(strips) == 2
        for i in strips:
            engine.add_strip(tiles, i, *upstreams, dx[i], dy, (True, i.start == 0), deferred)
            if deferred is not None:
                assert len(deferred) == 1
                before = dx[i].clone()
                engine.flush(deferred)
                assert not torch.equal(before, dx[i])
        made.append((dx, dy))
    for a, b in zip(*made, strict=True):
        assert torch.equal(a, b)
