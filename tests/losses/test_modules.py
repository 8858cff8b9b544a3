"""Losses as modules: repr, copies, pickles, state dicts, and moves between devices and dtypes."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import megabatch as mb

pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.ones(6, 4)
IDS = torch.tensor([0, 1, 1, -1, 2, 2])
PAIR = [("a", "b")]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (
            mb.ClipLoss(label_smoothing=0.1),
            "ClipLoss(label_smoothing=0.1, duplicates='positive', normalize=False, group=None)",
        ),
        (mb.SigLipLoss(group="local"), "SigLipLoss(normalize=False, group='local')"),
        (
            mb.InfoNCELoss(0.05, margin=0.1, same_tower=("query",)),
            "InfoNCELoss(temperature=0.05, margin=0.1, margin_strategy='absolute', "
            "same_tower=('query',), reverse=None, share_negatives=False, hardness_mode=None, "
            "hardness_strength=0.0, "
            "label_smoothing=0.0, tau_plus=0.0, normalize=False, group=None)",
        ),
        (
            mb.NTXentLoss(0.5),
            "NTXentLoss(temperature=0.5, tau_plus=0.0, normalize=None, group=None)",
        ),
        (
            mb.NTXentLoss(nn.Parameter(torch.tensor([0.07]))),
            "NTXentLoss(temperature=0.07 (learnt), tau_plus=0.0, normalize=None, group=None)",
        ),
        (
            mb.DCLLoss(torch.tensor(0.07), normalize=True),
            "DCLLoss(temperature=0.07, sigma=None, normalize=True, group=None)",
        ),
        (
            mb.DCLLoss(torch.tensor(0.07, device="meta")),
            "DCLLoss(temperature=meta, sigma=None, normalize=None, group=None)",
        ),
        (
            mb.SupConLoss(0.1, form="in"),
            "SupConLoss(temperature=0.1, form='in', normalize=None, group=None)",
        ),
        (
            mb.SincereLoss(0.1, average="pairs"),
            "SincereLoss(temperature=0.1, average='pairs', normalize=None, group=None)",
        ),
        (
            mb.MatryoshkaLoss(mb.SigLipLoss(), [2, 4]),
            "MatryoshkaLoss(\n  dims=(2, 4), weights=(1.0, 1.0), normalize=True\n"
            "  (loss): SigLipLoss(normalize=False, group=None)\n)",
        ),
        (
            mb.MatryoshkaLoss(max, [2]),
            "MatryoshkaLoss(loss=<built-in function max>, dims=(2,), weights=(1.0,), "
            "normalize=True)",
        ),
        (
            mb.MultiModalLoss(PAIR, loss=mb.SigLipLoss()),
            "MultiModalLoss(\n  pairs=(('a', 'b'),), weights=(1.0,), normalize=False, group=None\n"
            "  (loss): SigLipLoss(normalize=False, group=None)\n)",
        ),
    ],
)
def test_repr_shows_all_settings(loss: nn.Module, expected: str) -> None:
    assert repr(loss) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: mb.ClipLoss(label_smoothing=0.1),
        lambda: mb.InfoNCELoss(0.1, margin=0.3),
        lambda: mb.NTXentLoss(nn.Parameter(torch.tensor(0.3))),
        lambda: mb.SupConLoss(torch.tensor(0.3)),
        lambda: mb.MatryoshkaLoss(mb.SigLipLoss(), [2]),
        lambda: mb.MultiModalLoss(PAIR, weights=[2.0]),
    ],
)
def test_copies_pickles_and_state_dicts(make: Any) -> None:
    loss = make()
    file = io.BytesIO()
    torch.save(loss, file)
    file.seek(0)
    for other in (
        copy.deepcopy(loss),
        pickle.loads(pickle.dumps(loss)),
        torch.load(file, weights_only=False),
    ):
        assert repr(other) == repr(loss)
        assert other is not loss
    other = make()
    other.load_state_dict(loss.state_dict())
    learnt = isinstance(getattr(loss, "temperature", None), nn.Parameter)
    assert list(loss.state_dict()) == (["temperature"] if learnt else [])


@pytest.mark.parametrize("make", [lambda t: t, nn.Parameter])
def test_a_tensors_temperature_moves_with_the_module(make: Any) -> None:
    loss = mb.NTXentLoss(make(torch.tensor(0.3)))
    expected = loss(X, Y)
    assert loss.to("meta").temperature.device.type == "meta"
    loss = mb.NTXentLoss(make(torch.tensor(0.25))).half()
    assert loss.temperature.dtype == torch.float16
    assert torch.equal(loss(X, Y), mb.NTXentLoss(0.25)(X, Y))
    assert torch.equal(mb.NTXentLoss(make(torch.tensor(0.3))).double()(X, Y), expected)


def test_one_parameter_as_the_temperature_of_two_losses() -> None:
    shared, single = (nn.Parameter(torch.tensor(0.3)) for _ in range(2))
    total = mb.NTXentLoss(shared)(X, Y) + mb.SupConLoss(shared)(X, IDS)
    total.backward()
    assert shared.grad is not None
    parts = [
        torch.autograd.grad(loss, single)[0]
        for loss in (mb.NTXentLoss(single)(X, Y), mb.SupConLoss(single)(X, IDS))
    ]
    torch.testing.assert_close(shared.grad, parts[0] + parts[1])
