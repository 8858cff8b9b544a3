"""Groups by name, the handshake, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabatch import similarity
from megabatch.losses import ClipLoss, NTXentLoss
from megabatch.similarity.distributed import comm, layout
from megabatch.similarity.distributed.comm import group_name
from tests.similarity.distributed.processes import World, on_processes


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


#: name -> calls of rank 0 and of the others, and a word of the error for each
DISAGREEMENTS: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[str, str]]] = {
    "width": (
        lambda: ClipLoss()(x(4), x(4), 1.0),
        lambda: ClipLoss()(x(5), x(5), 1.0),
        ("width 4", "width 5"),
    ),
    "dtype": (
        lambda: similarity.logsumexp(x(), x()),
        lambda: similarity.logsumexp(x(dtype=torch.float64), x(dtype=torch.float64)),
        ("float32", "float64"),
    ),
    "gradients": (
        lambda: ClipLoss()(x(requires_grad=True), x(), 1.0),
        lambda: ClipLoss()(x(requires_grad=True), x(requires_grad=True), 1.0),
        ("gradients wanted: x,", "gradients wanted: x, y,"),
    ),
    "gradient mode": (
        lambda: similarity.logsumexp(x(requires_grad=True), x()),
        lambda: torch.no_grad()(similarity.logsumexp)(x(requires_grad=True), x()),
        ("gradients wanted: x,", "gradients wanted: none,"),
    ),
    "loss": (
        lambda: ClipLoss()(x(), x(), 1.0),
        lambda: NTXentLoss(0.1)(x(), x()),
        ("x against y", "x against itself"),
    ),
    "sides": (
        lambda: similarity.logsumexp(x(), x()),
        lambda: similarity.logsumexp(x(), x(), sides="rows"),
        ("sides: both", "sides: rows"),
    ),
    "ids": (
        lambda: similarity.split_logsumexp(x(), x()),
        lambda: similarity.split_logsumexp(x(), x(), ids=(torch.arange(3), torch.arange(3))),
        ("ids: none", "ids: given"),
    ),
    "function": (
        lambda: similarity.logsumexp(x(), x()),
        lambda: similarity.topk(x(), x(), 2),
        ("logsumexp", "topk, k 2"),
    ),
    "k": (
        lambda: similarity.topk(x(), x(), 2),
        lambda: similarity.topk(x(), x(), 3),
        ("k 2", "k 3"),
    ),
}


@on_processes(3)
def test_ranks_that_disagree_raise_before_any_transfer(world: World) -> None:
    for first, others, words in DISAGREEMENTS.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layout, "all_gather", lambda *_: pytest.fail("features were sent"))
            with pytest.raises(ValueError, match="same call on all ranks") as caught:
                (others if world.rank else first)()
        before, after = str(caught.value).split("ranks 1, 2: ")
        assert "rank 0: " in before
        assert words[0] in before
        assert words[1] in after
        assert words[1] not in before
    # The group is still usable.
    similarity.logsumexp(x(), x())
