"""The trainer's losses, by name and of the user's own, equal the classes and say what is wrong."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch as mb
from megabatch.config.objective import create_objective
from megabatch.errors import UsageError
from megabatch.losses.registry import TRAINABLE, describe_losses
from megabatch.models import ModelOptions
from megabatch.options import option_texts
from megabatch.training import TrainConfig

IDS = torch.tensor([7, 3, 7, 1, 7, 3])


def outputs() -> list[Tensor]:
    """A model's: features, scale and bias, in float64."""
    torch.manual_seed(0)
    x, y = (F.normalize(torch.randn(6, 8, dtype=torch.float64), dim=-1) for _ in range(2))
    return [x, y, *(torch.tensor(v, dtype=torch.float64) for v in (12.0, -3.0))]


# --- by name --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "direct"),
    [
        ({}, lambda x, y, s, b: mb.ClipLoss()(x, y, s)),
        ({"label_smoothing": 0.1}, lambda x, y, s, b: mb.ClipLoss(label_smoothing=0.1)(x, y, s)),
        ({"duplicates": "positives"}, lambda x, y, s, b: mb.ClipLoss()(x, y, s, ids=IDS)),
        (
            {"duplicates": "ignored"},
            lambda x, y, s, b: mb.ClipLoss(duplicates="ignored")(x, y, s, ids=IDS),
        ),
        ({"loss": "siglip"}, lambda x, y, s, b: mb.SigLipLoss()(x, y, s, b)),
        (
            {"loss": "siglip", "duplicates": "positives"},
            lambda x, y, s, b: mb.SigLipLoss()(x, y, s, b, ids=IDS),
        ),
        ({"loss": "infonce"}, lambda x, y, s, b: mb.InfoNCELoss(1 / s)(x, y)),
        (
            {"loss": "infonce", "infonce_margin": 0.1, "duplicates": "ignored"},
            lambda x, y, s, b: mb.InfoNCELoss(1 / s, margin=0.1)(x, y, ids=IDS),
        ),
        ({"loss": "ntxent"}, lambda x, y, s, b: mb.NTXentLoss(1 / s)(x, y)),
        ({"loss": "dcl"}, lambda x, y, s, b: mb.DCLLoss(1 / s)(x, y)),
        (
            {"matryoshka_dims": (4, 8)},
            lambda x, y, s, b: mb.MatryoshkaLoss(mb.ClipLoss(), (4, 8))(x, y, s),
        ),
    ],
)
def test_a_name_is_its_loss(changes: dict[str, Any], direct: Any) -> None:
    objective = create_objective(TrainConfig(**changes), group="local")
    ids = {"ids": IDS} if "ids" in objective.takes else {}
    torch.testing.assert_close(objective(*outputs(), **ids), direct(*outputs()))


@pytest.mark.parametrize("name", TRAINABLE)
def test_scale_and_bias_get_gradients_if_the_loss_depends_on_them(name: str) -> None:
    given = [value.requires_grad_() for value in outputs()]
    create_objective(TrainConfig(loss=name))(*given).backward()
    assert all(value.grad is not None for value in given[:3])
    assert (given[3].grad is not None) == ("logit_bias" in TRAINABLE[name].takes)
    value = create_objective(TrainConfig(loss=name if name != "siglip" else "clip"))(*given[:3])
    assert value.isfinite()


def test_hard_negatives_are_those_of_all_queries() -> None:
    x, y, scale, _ = outputs()
    negatives = F.normalize(torch.randn(6, 3, 8, dtype=torch.float64), dim=-1)
    given = [tensor.requires_grad_() for tensor in (x, y, negatives, scale)]
    objective = create_objective(TrainConfig(loss="infonce", hard_negatives=3), group="local")
    value = objective(x, y, scale, negative_features=negatives)
    logits = scale * x @ torch.cat([y, negatives.flatten(0, 1)]).T
    dense = F.cross_entropy(logits, torch.arange(6))
    torch.testing.assert_close(value, dense, rtol=0, atol=1e-12)
    ours, theirs = (torch.autograd.grad(loss, given) for loss in (value, dense))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_what_a_loss_takes_is_given_and_nothing_else() -> None:
    for given, changes in (({}, {"duplicates": "ignored"}), ({"ids": IDS}, {})):
        with pytest.raises(ValueError, match=r"ids: given \w+, taken \w+"):
            create_objective(TrainConfig(**changes))(*outputs(), **given)
    negatives = TrainConfig(loss="infonce", hard_negatives=1)
    with pytest.raises(ValueError, match="negatives: given False, taken True"):
        create_objective(negatives)(*outputs())


def test_model_planner_and_help_read_the_entry() -> None:
    options = ModelOptions.of({"loss": "siglip"})
    assert (options.init_logit_scale, options.init_logit_bias) == (math.log(10), -10.0)
    assert "; siglip: a sigmoid for each pair on its own;" in describe_losses()


@pytest.mark.parametrize("value", ["positives", "ignored"])
def test_help_names_the_losses_that_treat_duplicates_so(value: str) -> None:
    names = [name for name, loss in TRAINABLE.items() if value in loss.duplicates]
    text = " ".join(option_texts(TrainConfig)["duplicates"].split())
    assert f"{value}: {' and '.join(names)} only" in text


# --- of the user's own ----------------------------------------------------------------------------


class Recording(nn.Module):
    """Keeps the arguments of its call."""

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


class Triplet:
    """Takes hard negatives."""

    def __call__(self, a: Tensor, b: Tensor, temperature: Tensor, negatives: Tensor) -> Tensor:
        products = torch.einsum("nd,nkd->nk", a, negatives)
        return (products - (a * b).sum(1, keepdim=True)).div(temperature).relu().mean()


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


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def objective_of(name: str, **changes: Any) -> Any:
    return create_objective(TrainConfig(loss=f"{__name__}:{name}", **changes), group="local")


def test_the_call_gets_the_arguments_of_its_signature() -> None:
    x, y, scale, bias = outputs()
    objective = objective_of("Recording")
    assert objective.loss.group == "local"
    assert objective.takes == {"temperature", "ids"}
    assert objective(x, y, scale, bias, ids=IDS) == product(x, y)
    assert objective.loss.given == {"temperature": 1 / scale, "ids": IDS}
    objective = objective_of("Both")  # the scale comes before the temperature
    assert objective.takes == {"logit_scale", "logit_bias"}
    torch.testing.assert_close(objective(x, y, scale, bias), product(x, y) * 36 - 3)
    torch.testing.assert_close(objective(x, y, scale), product(x, y) * 36)
    objective = objective_of("make_product")
    assert objective.takes == set()
    assert objective(x, y, scale, bias) == product(x, y)


def test_negatives_reach_a_loss_that_takes_them() -> None:
    x, y, scale, _ = (t.float() for t in outputs())
    negatives = F.normalize(torch.randn(6, 2, 8), dim=-1)
    objective = objective_of("Triplet", hard_negatives=2)
    value = objective(x, y, scale, negative_features=negatives)
    torch.testing.assert_close(value, Triplet()(x, y, 1 / scale, negatives))
    with pytest.raises(UsageError, match=r"--hard-negatives: the call of .* no parameter neg"):
        objective_of("Recording", hard_negatives=1)
    with pytest.raises(UsageError, match="its call: it needs negatives"):
        objective_of("Triplet")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WithMargin", "it needs margin; expected parameters with a default, or group"),
        ("WithWeight", "its call: it needs weight; expected parameters with a default, or logit_s"),
        ("Learnt", "expected no parameters, as only the model's are trained, got weight"),
        ("product", "it needs a, b; expected parameters with a default, or group"),
    ],
)
def test_a_loss_that_cannot_be_made(name: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        objective_of(name)
    assert str(caught.value).startswith(f"--loss {__name__}:{name}: {message}")
