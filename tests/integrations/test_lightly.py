"""lightly's criteria equal lightly's own classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.losses.reference import assert_equal
from tests.losses.test_everywhere import Largest
from tests.similarity.distributed.processes import World
from tests.similarity.exact import leaves

lightly = pytest.importorskip("lightly.loss")
ours = pytest.importorskip("megabatch.integrations.lightly")

#: lightly's own von Mises-Fisher weights copy a tensor by its constructor.
pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor")

SHAPES = [(1, 3), (2, 1), (7, 5)]


def views(b: int, d: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b, d, dtype=torch.float64, generator=generator) for _ in range(2)]


def squared_distance(out0: Tensor, out1: Tensor) -> Tensor:
    """A weight function whose weights have a gradient."""
    return ((out0 - out1) ** 2).sum(1)


# --- lightly's own classes ------------------------------------------------------------------------


#: Criteria with default arguments and with others.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("NTXentLoss", {}),
    ("NTXentLoss", {"temperature": 0.07}),
    ("DCLLoss", {}),
    ("DCLLoss", {"temperature": 0.5, "weight_fn": squared_distance}),
    ("DCLWLoss", {}),
    ("DCLWLoss", {"temperature": 0.3, "sigma": 0.2}),
    ("MACLLoss", {}),
    ("MACLLoss", {"temperature": 0.3, "alpha": 1.0, "A_0": 0.5}),
]


@pytest.mark.parametrize(("name", "arguments"), CASES)
@pytest.mark.parametrize(("b", "d"), SHAPES)
def test_value_and_gradients_are_lightlys(
    name: str, arguments: dict[str, Any], b: int, d: int
) -> None:
    mine, own = getattr(ours, name)(**arguments), getattr(lightly, name)(**arguments)
    assert isinstance(mine, type(own))
    assert mine.state_dict().keys() == own.state_dict().keys()
    if b == 1 and name.startswith("DCL"):  # there are no negatives
        assert mine(*views(b, d)) == own(*views(b, d)) == -torch.inf
        return
    assert_equal(mine, own, *views(b, d))


def bank_of(size: tuple[int, int], seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(size, generator=generator, dtype=torch.float64))


def with_bank(kind: type, size: tuple[int, int], **arguments: Any) -> Any:
    loss = kind(temperature=0.2, memory_bank_size=size, **arguments).double()
    loss.memory_bank.bank.copy_(bank_of(size))
    return loss


def test_a_memory_bank_over_several_calls() -> None:
    """Batches that fit, that fill the bank or are cut at its end, and an evaluation."""
    mine, own = (with_bank(module.NTXentLoss, (10, 4)) for module in (ours, lightly))
    for step, b in enumerate([4, 3, 7, 5, 10]):
        with torch.no_grad():
            assert abs(mine(*views(2, 4, 50)) - own(*views(2, 4, 50))) < 1e-12
        assert_equal(mine, own, *views(b, 4, step))
        torch.testing.assert_close(mine.memory_bank.bank, own.memory_bank.bank)
        assert torch.equal(mine.memory_bank.bank_ptr, own.memory_bank.bank_ptr)
    x, key = views(6, 4)  # MoCo's keys come from a momentum encoder, without a gradient
    assert_equal(lambda x: mine(x, key), lambda x: own(x, key), x)
    torch.testing.assert_close(mine.memory_bank.bank, own.memory_bank.bank)


def test_gradient_caching_fills_a_memory_bank_once_per_step() -> None:
    from megabatch import GradientCache

    tower, inputs = nn.Linear(5, 4).double(), views(6, 5)
    mine, own = (with_bank(module.NTXentLoss, (10, 4)) for module in (ours, lightly))
    step = GradientCache((tower, tower), mine, 2)
    for _ in range(2):
        own(*map(tower, inputs)).backward()
        expected = [p.grad for p in tower.parameters()]
        tower.zero_grad()
        step(*inputs).backward()
        torch.testing.assert_close([p.grad for p in tower.parameters()], expected)
        torch.testing.assert_close(mine.memory_bank.bank, own.memory_bank.bank)
        assert torch.equal(mine.memory_bank.bank_ptr, own.memory_bank.bank_ptr)
        tower.zero_grad()


# --- several processes ----------------------------------------------------------------------------


#: Criteria over all processes, and over each process alone.
IN_PROCESSES: list[tuple[str, dict[str, Any]]] = [
    ("NTXentLoss", {"gather_distributed": True}),
    ("NTXentLoss", {"gather_distributed": False}),
    ("NTXentLoss", {"gather_distributed": True, "memory_bank_size": (16, 4)}),
    ("NTXentLoss", {"gather_distributed": False, "memory_bank_size": (16, 4)}),
    ("DCLWLoss", {"gather_distributed": True}),
    ("DCLWLoss", {"gather_distributed": False}),
]


def after_training(loss: nn.Module, world: World) -> list[Tensor]:
    """The losses and the weights of two steps under DistributedDataParallel."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(5, 4).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for batch in torch.randn(2, world.size, 12, 5, dtype=torch.float64)[:, world.rank]:
        optimizer.zero_grad()
        losses.append(loss(*model(batch).split(6)))
        losses[-1].backward()
        optimizer.step()
    return [*losses, *model.parameters()]


def on_two_trains_what_lightly_trains(world: World) -> None:
    for name, arguments in IN_PROCESSES:
        torch.manual_seed(world.rank)  # each has a memory bank of its own
        mine, own = (getattr(module, name)(**arguments).double() for module in (ours, lightly))
        if arguments.get("memory_bank_size"):
            mine.memory_bank.bank.copy_(own.memory_bank.bank)
        message = f"{name} {arguments}"
        a, b = after_training(mine, world), after_training(own, world)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=message)
        if arguments.get("memory_bank_size"):
            a, b = mine.memory_bank.bank, own.memory_bank.bank
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=message)


def on_two_different_numbers_of_views(world: World) -> None:
    """lightly needs equal numbers; here the loss is that of the whole batch."""
    whole = [x.requires_grad_() for x in views(7, 4)]
    shards = [world.shard(x.detach(), [5, 2]).requires_grad_() for x in whole]
    alone = lightly.NTXentLoss()(*whole)
    alone.backward()
    value = ours.NTXentLoss(gather_distributed=True)(*shards)
    value.backward()
    total = value.detach().clone()
    torch.distributed.all_reduce(total)
    torch.testing.assert_close(total / 2, alone.detach())
    for shard, x in zip(shards, whole, strict=True):
        torch.testing.assert_close(shard.grad / 2, world.shard(x.grad, [5, 2]))


# --- memory, dtypes, learnt temperatures, errors --------------------------------------------------


def test_no_matrix_is_formed(small_blocks: None) -> None:
    b, d = 256, 8
    with Largest() as largest:
        ours.NTXentLoss()(*leaves(*views(b, d))).backward()
    assert largest.elements <= 4 * b * d < (2 * b) ** 2 / 8


@pytest.mark.parametrize("size", [0, (8, 4)])
def test_half_precision_gives_a_float32_loss(size: Any) -> None:
    rounded = [x.bfloat16() for x in views(6, 4)]
    torch.manual_seed(0)
    mine = ours.NTXentLoss(memory_bank_size=size)
    value = mine(*rounded)
    assert value.dtype == torch.float32
    assert abs(value - mine.double()(*(x.double() for x in rounded))) < 0.01 * abs(value)


def test_a_temperature_may_change_and_may_be_learnt() -> None:
    mine, own = ours.NTXentLoss(0.5), lightly.NTXentLoss(0.5)
    mine.temperature = own.temperature = 0.2
    assert_equal(mine, own, *views(5, 3))
    temperature = torch.tensor(0.3, dtype=torch.float64)

    def of(module: Any) -> Callable[[Tensor], Tensor]:
        return lambda t: module.NTXentLoss(t)(*views(5, 3))

    assert_equal(of(ours), of(lightly), temperature)


def test_wrong_arguments_are_named() -> None:
    x, y = views(5, 3)
    for loss in (ours.NTXentLoss(), ours.NTXentLoss(memory_bank_size=(4, 3)), ours.DCLLoss()):
        with pytest.raises(ValueError, match="out1: expected 5 rows"):
            loss(x, y[:4])
        with pytest.raises(ValueError, match="out1: expected width 3"):
            loss(x, y[:, :2])
        loss.temperature = -0.5
        with pytest.raises(ValueError, match="temperature: expected a positive"):
            loss(x, y)
    with pytest.raises(TypeError, match="z1: expected"):
        ours.MACLLoss()(x, y.float())
