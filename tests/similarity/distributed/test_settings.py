"""Settings on several processes are fixed when a call is made; some must agree on all ranks."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from megabatch import similarity
from tests.similarity.changes import CHANGES, EAGER_ONLY, LOSSES, gradients, leaves
from tests.similarity.distributed.processes import World, on_processes


def close(ours: list[torch.Tensor], truth: list[torch.Tensor]) -> None:
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@on_processes(2)
def test_a_setting_changed_before_the_backward_pass(world: World) -> None:
    """Changed on all ranks, or on one: transfers are those of the forward pass."""
    for loss in LOSSES.values():
        truth = gradients(loss, leaves(torch.float64, 100, world.rank), nullcontext())
        for change in CHANGES.values():
            for everywhere in (True, False):
                within = change() if everywhere or world.rank == 0 else nullcontext()
                close(gradients(loss, leaves(torch.float64, 100, world.rank), within), truth)


@on_processes(2)
def test_a_setting_changed_before_a_compiled_backward_pass(world: World) -> None:
    for loss in LOSSES.values():
        truth = gradients(loss, leaves(torch.float64, 100, world.rank), nullcontext())
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        for change in sorted(CHANGES.keys() - EAGER_ONLY):
            within = CHANGES[change]() if world.rank == 0 else nullcontext()
            close(gradients(compiled, leaves(torch.float64, 100, world.rank), within), truth)


@on_processes(2)
def test_ranks_whose_settings_differ(world: World) -> None:
    """Settings that must agree raise an error on every rank before the first transfer."""
    x, y, scale = leaves(torch.float32)
    reported = {
        "no gather": "gathered up to 0 bytes",
        "grid": "grid: 2 columns",
        "overlap": "one by one",
    }
    reported |= {"gather, smaller": "gathered up to 65536 bytes", "precision": "products: bf16"}
    for change, words in reported.items():
        for call in (
            lambda: LOSSES["softmax"](x, y, scale),
            lambda: LOSSES["self-similarity"](x, y, scale),
            lambda: LOSSES["sigmoid"](x, y, scale),
            lambda: similarity.topk(x, y, 3),
        ):
            with (
                CHANGES[change]() if world.rank == 0 else nullcontext(),
                pytest.raises(ValueError, match=f"the same call on all ranks, got .*{words}"),
            ):
                call()


@on_processes(2)
def test_ranks_with_workspaces_of_their_own(world: World) -> None:
    """Workspaces may differ: each rank divides its own part of the matrix into blocks."""
    for loss in LOSSES.values():
        truth = gradients(loss, leaves(torch.float64, 100, world.rank), nullcontext())
        before = similarity.set_workspace(None if world.rank else 64 << 10)
        close(gradients(loss, leaves(torch.float64, 100, world.rank), nullcontext()), truth)
        similarity.set_workspace(before)
