"""Losses of the user's own, called by their signatures."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch as mb
from megabatch.errors import UsageError
from megabatch.losses import own
from megabatch.losses.objective import create_objective
from megabatch.training import TrainConfig
from tests.similarity.distributed.processes import World, on_processes

IDS = torch.tensor([7, 3, 7, 1, 7, 3])
CPU = torch.device("cpu")


class Recording(nn.Module):
    """Keeps what it is called with."""

    def __init__(self, group: object = "none") -> None:
        super().__init__()
        self.group = group
        self.given: dict[str, Any] = {}

    def forward(
        self, a: Tensor, b: Tensor, temperature: Tensor, *, ids: Tensor, extra: int = 2
    ) -> Tensor:
        self.given = {"temperature": temperature, "ids": ids}
        return (a * b).sum()


class Both:
    """No module; takes scale and temperature."""

    def __call__(
        self, a: Tensor, b: Tensor, logit_scale: Tensor, temperature: float = 3.0,
        logit_bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        bias = 0 if logit_bias is None else logit_bias
        return (a * b).sum() * logit_scale * temperature + bias


def product(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


def make_product() -> Any:
    return product


class Learnt(Recording):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))


class WithWeight(Both):
    def __call__(self, a: Tensor, b: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return a.sum()


class WithMargin(Recording):
    def __init__(self, margin: float) -> None:
        super().__init__()


def no_loss() -> int:
    return 3


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def objective_of(name: str, **changes: Any) -> Any:
    return create_objective(TrainConfig(loss=f"{__name__}:{name}", **changes), group="local")


def outputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x, y = (F.normalize(torch.randn(6, 8), dim=-1) for _ in range(2))
    return x, y, torch.tensor(12.0), torch.tensor(-3.0)


def test_the_call_gets_what_its_signature_has() -> None:
    x, y, scale, bias = outputs()
    objective = objective_of("Recording")
    assert objective.loss.group == "local"
    assert (objective.scale_as, objective.takes_bias, objective.takes_ids) == (
        *("temperature", False, True),
    )
    assert objective(x, y, scale, bias, ids=IDS) == product(x, y)
    assert objective.loss.given == {"temperature": 1 / scale, "ids": IDS}


def test_the_scale_comes_before_the_temperature_and_a_bias_may_be_none() -> None:
    x, y, scale, bias = outputs()
    objective = objective_of("Both")
    assert (objective.scale_as, objective.takes_bias, objective.takes_ids) == (
        *("logit_scale", True, False),
    )
    torch.testing.assert_close(objective(x, y, scale, bias), product(x, y) * 36 - 3)
    torch.testing.assert_close(objective(x, y, scale), product(x, y) * 36)


class Triplet:
    """A loss of the user's own that takes hard negatives."""

    def __call__(self, a: Tensor, b: Tensor, temperature: Tensor, negatives: Tensor) -> Tensor:
        own = torch.einsum("nd,nkd->nk", a, negatives)
        return (own - (a * b).sum(1, keepdim=True)).div(temperature).relu().mean()


def test_negatives_reach_a_loss_that_takes_them() -> None:
    x, y, scale, _ = outputs()
    negatives = F.normalize(torch.randn(6, 2, 8), dim=-1)
    objective = objective_of("Triplet", hard_negatives=2)
    value = objective(x, y, scale, negative_features=negatives)
    torch.testing.assert_close(value, Triplet()(x, y, 1 / scale, negatives))
    own.check(objective, "m:Triplet", 8, CPU, has_bias=False)
    with pytest.raises(
        UsageError, match=r"--hard-negatives: the call of .* no parameter negatives"
    ):
        objective_of("Recording", hard_negatives=1)
    with pytest.raises(UsageError, match="its call: it needs negatives"):
        objective_of("Triplet")


def test_a_function_may_make_a_loss_that_takes_features_alone() -> None:
    x, y, scale, bias = outputs()
    objective = objective_of("make_product")
    assert objective.scale_as == ""
    assert objective(x, y, scale, bias) == product(x, y)


def test_a_loss_of_the_library_and_prefixes_of_the_features() -> None:
    x, y, scale, _ = outputs()
    config = TrainConfig(loss="megabatch:ClipLoss", matryoshka_dims=(4, 8))
    value = create_objective(config, group="local")(x, y, scale, ids=IDS)
    expected = mb.MatryoshkaLoss(mb.ClipLoss(), (4, 8))(x, y, scale, ids=IDS)
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WithMargin", "it needs margin; expected parameters with a default, or group"),
        ("WithWeight", "its call: it needs weight; expected parameters with a default, or logit_s"),
        ("Learnt", "expected no parameters, as only the model's are trained, got weight"),
        ("no_loss", "expected a loss to call, got 3 (int)"),
        ("product", "it needs a, b; expected parameters with a default, or group"),
    ],
)
def test_what_cannot_be_made_says_why(name: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        objective_of(name)
    assert str(caught.value).startswith(f"--loss {__name__}:{name}: {message}")


def checked(call: Any, **takes: Any) -> None:
    objective: Any = SimpleNamespace(
        **{"takes_ids": False, "takes_bias": False, "takes_negatives": False, **takes}
    )

    class Callable(SimpleNamespace):
        def __call__(self, x: Tensor, y: Tensor, scale: Tensor, bias: Any, *, ids: Any) -> Any:
            return call(x, y, bias)

    own.check(Callable(**vars(objective)), "m:L", 4, CPU, has_bias=False)  # type: ignore[arg-type]


def test_a_loss_with_a_gradient_passes_the_check() -> None:
    checked(lambda x, y, bias: (x * y).sum())
    checked(lambda x, y, bias: x.sum())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y, b: (x * y).sum().item() and None, "a tensor of shape (), got None (NoneT"),
        (lambda x, y, b: (x * y).sum(1), "a tensor of shape (), got one of shape (8,)"),
        (lambda x, y, b: {"loss": (x * y).sum()}, "a tensor of shape (), got dict"),
        (lambda x, y, b: (x * y).sum().detach(), "a gradient, got one without (requires_grad is F"),
        (
            lambda x, y, b: torch.ones((), requires_grad=True) * 2,
            "a gradient of the features, got none: its value does not depend on them",
        ),
        (lambda x, y, b: x @ y, "RuntimeError: "),
    ],
)
def test_what_cannot_be_trained_with_says_why(call: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked(call)
    assert message in str(caught.value)
    assert str(caught.value).startswith("--loss m:L: ")


def test_a_bias_that_the_model_lacks() -> None:
    with pytest.raises(UsageError, match=r"TypeError: .* logit_bias \(--init-logit-bias gives it"):
        checked(lambda x, y, bias: x.sum() + bias, takes_bias=True)


@on_processes(2)
def test_ranks_share_a_batch(world: World) -> None:
    objective = create_objective(TrainConfig(loss="megabatch:ClipLoss"))
    own.check(objective, "megabatch:ClipLoss", 8, CPU, has_bias=False)
    torch.manual_seed(0)
    x, y = (F.normalize(torch.randn(6, 8, dtype=torch.float64), dim=-1) for _ in range(2))
    mine = [world.shard(part, [2, 4]) for part in (x, y, IDS)]
    value = objective(*mine[:2], torch.tensor(12.0), ids=mine[2])
    dist.all_reduce(value)
    whole = mb.ClipLoss(group="local")(x, y, torch.tensor(12.0), ids=IDS)
    torch.testing.assert_close(value / 2, whole, rtol=0, atol=1e-12)
