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
from megabatch.losses.registry import describe_losses
from megabatch.models import ModelOptions
from megabatch.training import TrainConfig

IDS = torch.tensor([7, 3, 7, 1, 7, 3])


def outputs() -> list[Tensor]:
    """A model's: features, scale and bias, in float64."""
    torch.manual_seed(0)
    x, y = (F.normalize(torch.randn(6, 8, dtype=torch.float64), dim=-1) for _ in range(2))
    return [x, y, *(torch.tensor(v, dtype=torch.float64) for v in (12.0, -3.0))]


# --- by name --------------------------------------------------------------------------------------


MARGIN = {"loss": "infonce", "infonce_margin": 0.1, "duplicates": "ignored"}


@pytest.mark.parametrize(
    ("changes", "loss", "outputs_taken"),
    [
        ({}, mb.ClipLoss(), 3),
        ({"label_smoothing": 0.1}, mb.ClipLoss(label_smoothing=0.1), 3),
        ({"duplicates": "positives"}, mb.ClipLoss(), 3),
        ({"duplicates": "ignored"}, mb.ClipLoss(duplicates="ignored"), 3),
        ({"loss": "siglip"}, mb.SigLipLoss(), 4),
        ({"loss": "siglip", "duplicates": "positives"}, mb.SigLipLoss(), 4),
        ({"loss": "infonce"}, mb.InfoNCELoss(1 / 12), 2),
        (MARGIN, mb.InfoNCELoss(1 / 12, margin=0.1), 2),
        ({"loss": "ntxent"}, mb.NTXentLoss(1 / 12), 2),
        ({"loss": "dcl"}, mb.DCLLoss(1 / 12), 2),
        ({"matryoshka_dims": (4, 8)}, mb.MatryoshkaLoss(mb.ClipLoss(), (4, 8)), 3),
    ],
)
def test_a_name_is_its_loss(changes: dict[str, Any], loss: Any, outputs_taken: int) -> None:
    objective = create_objective(TrainConfig(**changes), group="local")
    ids = {"ids": IDS} if "duplicates" in changes else {}
    expected = loss(*outputs()[:outputs_taken], **ids)
    torch.testing.assert_close(objective(*outputs(), **ids), expected)


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


def test_model_planner_and_help_read_the_entry() -> None:
    options = ModelOptions.of({"loss": "siglip"})
    assert (options.init_logit_scale, options.init_logit_bias) == (math.log(10), -10.0)
    assert "; siglip: a sigmoid for each pair on its own;" in describe_losses()
    assert ModelOptions.of({"loss": "maxsim", "maxsim_dim": 6}).multi_vector
    assert not ModelOptions.of({"loss": "clip"}).multi_vector


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


class WithNegatives:
    """Takes hard negatives."""

    def __call__(self, a: Tensor, b: Tensor, negatives: Tensor) -> Tensor:
        return (a * b).sum() + negatives.sum()


class Learnt(Recording):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def objective_of(name: str, **changes: Any) -> Any:
    return create_objective(TrainConfig(loss=f"{__name__}:{name}", **changes), group="local")


def test_the_call_gets_the_arguments_of_its_signature() -> None:
    x, y, scale, bias = outputs()
    objective = objective_of("Recording")
    assert objective.loss.group == "local"
    assert objective(x, y, scale, bias, ids=IDS) == (x * y).sum()
    assert objective.loss.given == {"temperature": 1 / scale, "ids": IDS}


def test_negatives_reach_a_loss_that_takes_them() -> None:
    x, y, scale, _ = outputs()
    objective = objective_of("WithNegatives", hard_negatives=2)
    value = objective(x, y, scale, negative_features=torch.ones(6, 2, 8, dtype=torch.float64))
    torch.testing.assert_close(value, (x * y).sum() + 96)
    with pytest.raises(UsageError, match=r"--hard-negatives: the call of .* no parameter neg"):
        objective_of("Recording", hard_negatives=1)
    with pytest.raises(UsageError, match="its call: it needs negatives"):
        objective_of("WithNegatives")


def test_a_loss_has_no_parameters() -> None:
    with pytest.raises(UsageError, match=r"Learnt: expected no parameters.*, got \['weight'\]"):
        objective_of("Learnt")
