"""Groups by name, the handshake, and what ranks must or need not agree on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabatch import similarity
from megabatch.losses import ClipLoss, NTXentLoss
from megabatch.similarity import split_logsumexp
from megabatch.similarity.distributed import comm, layout
from megabatch.similarity.distributed.comm import group_name
from tests.process_state import changed
from tests.similarity.changes import CHANGES, LOSSES, gradients, leaves
from tests.similarity.distributed.processes import World, on_devices, on_processes


def test_one_process_has_no_group() -> None:
    assert group_name(None) == group_name("local") == ""


@pytest.mark.parametrize("group", ["world", 3, ["local"]])
def test_a_group_of_a_wrong_type(group: object) -> None:
    with pytest.raises(TypeError, match="group: expected None, 'local' or a process group"):
        similarity.logsumexp(torch.ones(2, 3), torch.ones(2, 3), group=group)


def test_a_group_without_this_process() -> None:
    with pytest.raises(ValueError, match="member"):
        group_name(dist.GroupMember.NON_GROUP_MEMBER)


@on_processes(2)
def test_groups_and_their_names(world: World) -> None:
    assert group_name("local") == ""
    assert group_name(None) == group_name(dist.group.WORLD) != ""
    assert comm.resolve(group_name(None)) is dist.group.WORLD
    alone = [dist.new_group([rank]) for rank in range(2)][world.rank]
    assert group_name(alone) == ""


def x(d: int = 4, **options: Any) -> Tensor:
    return torch.ones(3, d, **options)


def within(change: str) -> Callable[[], Any]:
    def call() -> Any:
        with CHANGES[change]():
            return split_logsumexp(x(), x())

    return call


def guided(width: int) -> Callable[[], Any]:
    guide = torch.ones(3, width)
    return lambda: split_logsumexp(x(), x(), ceiling=torch.zeros(3), guide=(guide, guide))


needing, plain, ids = (
    x(requires_grad=True),
    lambda: split_logsumexp(x(), x()),
    (torch.arange(3),) * 2,
)
#: Calls of rank 0 and of the others, and a word of the error for each.
DISAGREEMENTS: list[tuple[Callable[[], Any], Callable[[], Any], str, str]] = [
    (lambda: ClipLoss()(x(4), x(4), 1), lambda: ClipLoss()(x(5), x(5), 1), "width 4", "width 5"),
    (plain, lambda: split_logsumexp(x().double(), x().double()), "float32", "float64"),
    (
        lambda: ClipLoss()(needing, x(), 1.0),
        lambda: ClipLoss()(needing, needing, 1.0),
        "gradients wanted: x,",
        "gradients wanted: x, y,",
    ),
    (
        lambda: split_logsumexp(needing, x()),
        lambda: torch.no_grad()(split_logsumexp)(needing, x()),
        "gradients wanted: x,",
        "gradients wanted: none,",
    ),
    (
        lambda: ClipLoss()(x(), x(), 1.0),
        lambda: NTXentLoss(0.1)(x(), x()),
        "x against y",
        "x against itself",
    ),
    (plain, lambda: split_logsumexp(x(), x(), sides="rows"), "sides: both", "sides: rows"),
    (plain, lambda: split_logsumexp(x(), x(), ids=ids), "ids: none", "ids: given"),
    (plain, lambda: similarity.topk(x(), x(), 2), "logsumexp", "topk, k 2"),
    (lambda: similarity.topk(x(), x(), 2), lambda: similarity.topk(x(), x(), 3), "k 2", "k 3"),
    (guided(2), guided(3), "guide: width 2, float32", "guide: width 3"),
    (
        lambda: ClipLoss()(x(), x(), 1.0),
        lambda: ClipLoss()(x(), x(), 1.0, weights=torch.ones(3)),
        ", no weights,",
        ", weights,",
    ),
    (within("no gather"), plain, "up to 0 bytes", "up to 402653184 bytes"),
    (within("gather, smaller"), plain, "up to 65536 bytes", "up to 402653184 bytes"),
    (within("grid"), plain, "grid: 2 columns", "grid: by hosts"),
    (within("no grid"), plain, "grid: never", "grid: by hosts"),
    (within("precision"), plain, "products: bf16", "products: ieee"),
]


@on_processes(3)
def test_ranks_that_disagree_raise_before_any_transfer(world: World) -> None:
    for first, others, word_of_first, word_of_others in DISAGREEMENTS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layout, "all_gather", lambda *_: pytest.fail("features were sent"))
            with pytest.raises(ValueError, match="same call on all ranks") as caught:
                (others if world.rank else first)()
        before, after = str(caught.value).split("ranks 1, 2: ")
        assert "rank 0: " in before
        assert word_of_first in before
        assert word_of_others in after
        assert word_of_others not in before
    plain()  # the group is still usable


@on_processes(2)
def test_every_function_compares_settings(world: World) -> None:
    pair = leaves(torch.float32)
    for call in (*LOSSES.values(), lambda x, y, _: similarity.topk(x, y, 3)):
        with (
            CHANGES["no gather"]() if world.rank == 0 else nullcontext(),
            pytest.raises(ValueError, match=r"the same call on all ranks, got .*up to 0 bytes"),
        ):
            call(*pair)


@on_devices(2)
def test_a_bad_target_or_k_is_an_error_on_every_process(world: World) -> None:
    x = torch.randn(3, 4)
    bad = torch.tensor([0, 6 if world.rank else 0, 1])
    with pytest.raises(IndexError, match=r"\[0, 6\), got 0 to 6 on rank 1"):
        similarity.ranks(x, x, bad)
    with pytest.raises(ValueError, match="expected 1 to 6"):
        similarity.topk(x, x, 7)


# --- settings that may differ ---------------------------------------------------------------------


def assert_same_gradients(truth: list[Tensor], loss: Any, world: World, within: Any) -> None:
    found = gradients(loss, leaves(torch.float64, 100, world.rank), within)
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@on_processes(2)
def test_settings_changed_before_the_backward_pass_or_of_one_rank(world: World) -> None:
    """Transfers are those of the forward pass; each rank has a workspace of its own."""
    for loss in LOSSES.values():
        truth = gradients(loss, leaves(torch.float64, 100, world.rank), nullcontext())
        for change, everywhere in product(CHANGES.values(), (True, False)):
            within = change() if everywhere or world.rank == 0 else nullcontext()
            assert_same_gradients(truth, loss, world, within)
        with changed("workspace", None if world.rank else 64 << 10):
            assert_same_gradients(truth, loss, world, nullcontext())
