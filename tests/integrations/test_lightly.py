"""lightly's criteria equal their papers' definitions and lightly's own classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.similarity import set_workspace
from tests.losses.reference import assert_equal, leaves
from tests.losses.test_everywhere import Largest
from tests.similarity.distributed.processes import World, on_processes

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


# --- the definitions of the papers ----------------------------------------------------------------


def others(out0: Tensor, out1: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """The cosines of each of the 2b views with its positive and with its negatives."""
    b = len(out0)
    z = torch.cat([F.normalize(out0), F.normalize(out1)])
    for i in range(2 * b):
        cosines = z @ z[i]
        partner = (i + b) % (2 * b)
        keep = [k for k in range(2 * b) if k not in (i, partner)]
        yield cosines[partner], cosines[keep]


def mean(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).mean()


def ntxent(out0: Tensor, out1: Tensor, t: float) -> Tensor:
    """Chen et al. 2020, equation 1."""
    pairs = others(out0, out1)
    return mean(
        -torch.log(torch.exp(p / t) / (p / t).exp().add((n / t).exp().sum())) for p, n in pairs
    )


def dcl(out0: Tensor, out1: Tensor, t: float) -> Tensor:
    """Yeh et al. 2021, equation 5."""
    return mean(-p / t + (n / t).exp().sum().log() for p, n in others(out0, out1))


def dclw(out0: Tensor, out1: Tensor, t: float, sigma: float) -> Tensor:
    """Yeh et al. 2021, equation 6: the weights are 2 - e^(cosine / sigma) / its mean."""
    pairs = list(others(out0, out1))
    strengths = torch.stack([(p / sigma).exp() for p, _ in pairs]).detach()
    weights = 2 - strengths / strengths.mean()
    terms = zip(weights, pairs, strict=True)
    return mean(-w * p / t + (n / t).exp().sum().log() for w, (p, n) in terms)


def macl(out0: Tensor, out1: Tensor, t: float, alpha: float, start: float) -> Tensor:
    """Huang et al. 2023: temperature and weights depend on the alignment, without a gradient."""
    pairs = list(others(out0, out1))
    t = t * (1 + alpha * (mean(p for p, _ in pairs).item() - start))
    probabilities = [(p / t).exp() / ((p / t).exp() + (n / t).exp().sum()) for p, n in pairs]
    return mean(-p.log() / (1 - p.detach()) for p in probabilities)


def moco(query: Tensor, key: Tensor, bank: Tensor, t: float) -> Tensor:
    """He et al. 2019, equation 1: the negatives are the keys of earlier batches."""
    query, key = F.normalize(query), F.normalize(key)
    positive = (query * key).sum(1) / t
    negative = (query @ bank.T / t).exp().sum(1)
    return -(positive.exp() / (positive.exp() + negative)).log().mean()


@pytest.mark.parametrize("temperature", [0.05, 0.5, 3.0])
def test_the_papers_definitions(temperature: float) -> None:
    t = temperature
    assert_equal(ours.NTXentLoss(t), lambda x, y: ntxent(x, y, t), *views(6, 4))
    assert_equal(ours.DCLLoss(t), lambda x, y: dcl(x, y, t), *views(6, 4))
    weighted = ours.DCLWLoss(t, sigma=0.3)
    # The mean of the weights is over the views of one side; both sides have the same cosines.
    assert_equal(weighted, lambda x, y: dclw(x, y, t, 0.3), *views(6, 4))
    if t > 0.05:  # lightly adds 1e-8 to 1 - p
        loss = ours.MACLLoss(t, alpha=0.7, A_0=0.1)
        loss.eps = 0.0
        assert_equal(loss, lambda x, y: macl(x, y, t, 0.7, 0.1), *views(6, 4))
    loss = ours.NTXentLoss(t, memory_bank_size=(9, 4)).double()
    bank = loss.memory_bank.bank.clone()
    assert_equal(loss, lambda x, y: moco(x, y, bank, t), *views(6, 4))


def detcon_view(
    pred: Tensor, other: Tensor, same: Tensor, mask: Tensor, other_mask: Tensor, t: float
) -> Tensor:
    """Henaff et al. 2021, equation 3, region by region."""
    b, m, _ = pred.shape
    pred, other, same = (F.normalize(x, dim=2) for x in (pred, other, same))
    terms = []
    for i in range(b):
        for k in range(m):
            across, within = other @ pred[i, k] / t, same @ pred[i, k] / t  # (b, m) each
            mine = torch.zeros(b, m, dtype=torch.bool)
            mine[i] = mask[i] == mask[i, k]
            hits = torch.zeros(b, m, dtype=torch.bool)
            hits[i] = other_mask[i] == mask[i, k]
            total = torch.cat([across.flatten(), within[~mine]]).logsumexp(0)
            loss = -(across[hits] - total).mean() if hits.any() else 0 * total
            terms.append(loss / mine.sum())
    return torch.stack(terms).mean()


def detcon(p0: Tensor, p1: Tensor, t0: Tensor, t1: Tensor, m0: Tensor, m1: Tensor) -> Tensor:
    return detcon_view(p0, t1, t0, m0, m1, 0.2) + detcon_view(p1, t0, t1, m1, m0, 0.2)


def region_masks(b: int, m: int) -> list[Tensor]:
    """Masks that recur in an image; some are in one view alone."""
    return [torch.arange(b * m).view(b, m) * k % 5 % 3 for k in (1, 3)]


@pytest.mark.parametrize(("b", "m"), [(1, 1), (1, 4), (3, 4)])
def test_regions_of_images(b: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = region_masks(b, m)
    features = [torch.randn(b, m, 5) for _ in range(4)]
    mine, own = ours.DetConBLoss(0.2), lightly.DetConBLoss(0.2)
    assert_equal(lambda *x: mine(*x, *masks), lambda *x: detcon(*x, *masks), *features)
    assert_equal(lambda *x: mine(*x, *masks), lambda *x: own(*x, *masks), *features)
    mine, own = ours.DetConSLoss(0.2), lightly.DetConSLoss(0.2)
    assert_equal(lambda *x: mine(*x, *masks), lambda *x: own(*x, *masks), *features[:2])
    monkeypatch.setattr(lightly.DetConBLoss, "forward", None)  # which needs a matrix
    mine(*features[:2], *masks)


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


def test_the_keys_of_a_memory_bank_need_no_gradient() -> None:
    """MoCo's keys come from a momentum encoder."""
    mine, own = (with_bank(module.NTXentLoss, (10, 4)) for module in (ours, lightly))
    key = views(6, 4)[1]
    assert_equal(lambda x: mine(x, key), lambda x: own(x, key), views(6, 4)[0])
    assert not torch.equal(mine.memory_bank.bank, bank_of((10, 4)))


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


@pytest.mark.filterwarnings("ignore:Memory bank size")  # before 1.6 the first batch gives the width
@pytest.mark.parametrize("size", [5, -1, (5, -1), (0, 4), 0])
def test_sizes_of_a_memory_bank_are_those_of_lightly(size: Any) -> None:
    def outcome(module: Any) -> tuple[Any, ...]:
        try:
            loss = module.NTXentLoss(memory_bank_size=size)
        except ValueError as error:
            return (str(error),)
        loss(*(x.float().requires_grad_() for x in views(3, 4)))
        return loss.memory_bank.size, loss.memory_bank.bank.shape

    assert outcome(ours) == outcome(lightly)


# --- several processes ----------------------------------------------------------------------------


#: Criteria over all processes, and over each process alone.
IN_PROCESSES: list[tuple[str, dict[str, Any]]] = [
    ("NTXentLoss", {"gather_distributed": True}),
    ("NTXentLoss", {"gather_distributed": False}),
    ("NTXentLoss", {"gather_distributed": True, "memory_bank_size": (16, 4)}),
    ("NTXentLoss", {"gather_distributed": False, "memory_bank_size": (16, 4)}),
    ("DCLWLoss", {"gather_distributed": True}),
    ("DCLWLoss", {"gather_distributed": False}),
    ("DetConSLoss", {"gather_distributed": True}),
    ("DetConSLoss", {"gather_distributed": False}),
]


def after_training(loss: nn.Module, world: World) -> list[Tensor]:
    """The losses and the weights of two steps under DistributedDataParallel."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(5, 4).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    regions = isinstance(loss, lightly.DetConSLoss)
    losses = []
    for batch in torch.randn(2, world.size, 12, 5, dtype=torch.float64)[:, world.rank]:
        optimizer.zero_grad()
        pair = model(batch).split(6)
        if regions:
            losses.append(loss(*(x.view(3, 2, 4) for x in pair), *region_masks(3, 2)))
        else:
            losses.append(loss(*pair))
        losses[-1].backward()
        optimizer.step()
    return [*losses, *model.parameters()]


@on_processes(2)
def test_two_processes_train_what_lightly_trains(world: World) -> None:
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


@on_processes(2)
def test_processes_with_different_numbers_of_views(world: World) -> None:
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


@pytest.mark.parametrize("name", ["NTXentLoss", "DCLWLoss", "MACLLoss"])
def test_no_matrix_is_formed(name: str) -> None:
    b, d = 256, 8
    before = set_workspace(64 << 10)
    try:
        with Largest() as largest:
            getattr(ours, name)()(*leaves(*views(b, d))).backward()
    finally:
        set_workspace(before)
    assert largest.elements <= 4 * b * d < (2 * b) ** 2 / 8


def test_half_precision_gives_a_float32_loss() -> None:
    exact = [x.bfloat16().double() for x in views(6, 4)]
    for name, loss in (
        ("NTXentLoss", {}),
        ("DCLLoss", {}),
        ("NTXentLoss", {"memory_bank_size": (8, 4)}),
    ):
        torch.manual_seed(0)
        mine = getattr(ours, name)(**loss)
        value = mine(*(x.bfloat16() for x in exact))
        assert value.dtype == torch.float32
        assert abs(value - mine.double()(*exact)) < 0.01 * abs(value)


def test_a_temperature_may_change_and_may_be_learnt() -> None:
    mine, own = ours.NTXentLoss(0.5), lightly.NTXentLoss(0.5)
    mine.temperature = own.temperature = 0.2
    assert_equal(mine, own, *views(5, 3))
    temperature = torch.tensor(0.3, dtype=torch.float64)

    def of(module: Any) -> Callable[[Tensor], Tensor]:
        return lambda t: module.NTXentLoss(t)(*views(5, 3))

    assert_equal(of(ours), of(lightly), temperature)


@pytest.mark.parametrize(
    "name", ["NTXentLoss", "DCLLoss", "DCLWLoss", "DetConBLoss", "DetConSLoss"]
)
def test_a_negative_temperature_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="temperature: expected a positive"):
        getattr(ours, name)(temperature=-0.5)


def test_wrong_projections_are_named() -> None:
    x, y = views(5, 3)
    for loss in (ours.NTXentLoss(), ours.NTXentLoss(memory_bank_size=(4, 3)), ours.DCLLoss()):
        with pytest.raises(ValueError, match="out1: expected 5 rows"):
            loss(x, y[:4])
        with pytest.raises(ValueError, match="out1: expected width 3"):
            loss(x, y[:, :2])
    with pytest.raises(TypeError, match="z1: expected"):
        ours.MACLLoss()(x, y.float())
    masks = region_masks(2, 3)
    features = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match=r"pred_view1: expected shape \(b, m, d\)"):
        ours.DetConSLoss()(features, features[0], *masks)
    with pytest.raises(ValueError, match=r"mask_view1: expected shape \(2, 3\)"):
        ours.DetConSLoss()(features, features, masks[0], masks[1][:, :2])
