"""Losses by name equal the loss classes, called with a model's outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch.losses.objective import create_objective
from megabatch.losses.registry import TRAINABLE
from megabatch.training import TrainConfig

IDS = torch.tensor([7, 3, 7, 1, 7, 3])


def outputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    x, y = (F.normalize(torch.randn(6, 8), dim=-1) for _ in range(2))
    scale, bias = torch.tensor(12.0), torch.tensor(-3.0)
    return {"image_features": x, "text_features": y, "logit_scale": scale, "logit_bias": bias}


@pytest.mark.parametrize(
    ("changes", "direct"),
    [
        ({}, lambda x, y, s, b: mb.ClipLoss()(x, y, s)),
        (
            {"label_smoothing": 0.1},
            lambda x, y, s, b: mb.ClipLoss(label_smoothing=0.1)(x, y, s),
        ),
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
        ({"loss": "infonce"}, lambda x, y, s, b: mb.InfoNCELoss(1 / 12)(x, y)),
        (
            {"loss": "infonce", "infonce_margin": 0.1, "duplicates": "ignored"},
            lambda x, y, s, b: mb.InfoNCELoss(1 / 12, margin=0.1)(x, y, ids=IDS),
        ),
        ({"loss": "ntxent"}, lambda x, y, s, b: mb.NTXentLoss(1 / 12)(x, y)),
        ({"loss": "dcl"}, lambda x, y, s, b: mb.DCLLoss(1 / 12)(x, y)),
        (
            {"matryoshka_dims": (4, 8)},
            lambda x, y, s, b: mb.MatryoshkaLoss(mb.ClipLoss(), (4, 8))(x, y, s),
        ),
    ],
)
def test_a_name_is_its_loss(changes: dict[str, Any], direct: Any) -> None:
    objective = create_objective(TrainConfig(**changes), group="local")
    ids = {"ids": IDS} if objective.takes_ids else {}
    value = objective(**outputs(), **ids)
    torch.testing.assert_close(value, direct(*outputs().values()))


@pytest.mark.parametrize("name", TRAINABLE)
def test_scale_and_bias_get_gradients(name: str) -> None:
    config = TrainConfig(loss=name)
    given = {key: value.requires_grad_() for key, value in outputs().items()}
    create_objective(config)(**given).backward()
    assert all(given[key].grad is not None for key in given if key != "logit_bias")
    assert (given["logit_bias"].grad is not None) == TRAINABLE[name].takes_bias


def test_ids_are_not_ignored() -> None:
    with pytest.raises(ValueError, match="ids: expected the batch's, got None"):
        create_objective(TrainConfig(duplicates="ignored"))(**outputs())
    with pytest.raises(ValueError, match="ids: expected None"):
        create_objective(TrainConfig())(**outputs(), ids=IDS)


def test_hard_negatives_are_those_of_all_queries() -> None:
    torch.manual_seed(0)
    x, y = (F.normalize(torch.randn(6, 8, dtype=torch.float64), dim=-1) for _ in range(2))
    negatives = F.normalize(torch.randn(6, 3, 8, dtype=torch.float64), dim=-1)
    scale = torch.tensor(12.0, dtype=torch.float64)
    given = [tensor.requires_grad_() for tensor in (x, y, negatives, scale)]
    objective = create_objective(TrainConfig(loss="infonce", hard_negatives=3), group="local")
    value = objective(x, y, scale, negative_features=negatives)
    logits = scale * x @ torch.cat([y, negatives.flatten(0, 1)]).T
    dense = F.cross_entropy(logits, torch.arange(6))
    torch.testing.assert_close(value, dense, rtol=0, atol=1e-12)
    ours, theirs = (torch.autograd.grad(loss, given) for loss in (value, dense))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="negative_features: expected those of each pair, got N"):
        objective(x, y, scale)
    with pytest.raises(ValueError, match="negative_features: expected None, got features"):
        create_objective(TrainConfig())(x, y, scale, negative_features=negatives)


def test_softmax_losses_take_a_model_without_a_bias() -> None:
    given = {key: value for key, value in outputs().items() if key != "logit_bias"}
    assert create_objective(TrainConfig())(**given).isfinite()
