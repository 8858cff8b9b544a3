"""InfoNCE's further negatives (weighted, shared, own), label smoothing and debiasing."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch.losses import negatives as module
from megabatch.losses.infonce import HardnessMode
from tests.losses.reference import assert_equal, infonce
from tests.losses.test_infonce import HARD, IDS, B, X, features
from tests.similarity.features import MAKERS


@pytest.mark.parametrize("margin", [None, 0.1])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("mode", [None, *get_args(HardnessMode)])
def test_weighted_and_shared_own_negatives(mode: Any, share: bool, margin: float | None) -> None:
    query, positive, _, own, queue = features("learnt")
    options = {
        "margin": margin,
        "same_tower": ("query", "positive"),
        "share_negatives": share,
        "hardness_mode": mode,
        "hardness_strength": 0.0 if mode is None else 5.0,
    }
    assert_equal(
        lambda q, p, n, s: mb.InfoNCELoss(1 / s, **options)(q, p, n, queue=queue, ids=IDS),
        lambda q, p, n, s: infonce(q, p, s, own=n, queue=queue, ids=IDS, **options),
        query,
        positive,
        own,
        20.0,
    )


@pytest.mark.parametrize("scale", [0.01, 20.0, 100.0])
@pytest.mark.parametrize("maker", MAKERS)
def test_weighted_negatives(maker: str, scale: float) -> None:
    """Negatives of the sweep that computes the positive."""
    query, positive, shared, *_ = features(maker)
    options = {"hardness_mode": "all_negatives", "hardness_strength": 9.0}
    assert_equal(
        lambda q, p, n, s: mb.InfoNCELoss(1 / s, **options)(q, p, n),
        lambda q, p, n, s: infonce(q, p, s, shared=n, **options),
        query,
        positive,
        shared,
        scale,
    )


def normalised(*features: Tensor) -> list[Tensor]:
    return [F.normalize(t, dim=-1) for t in features]


@pytest.mark.parametrize("options", [{"label_smoothing": 0.2}, {"tau_plus": 0.1}])
@pytest.mark.parametrize("kind", ["none", "shared", "own", "shared own"])
@pytest.mark.parametrize("maker", MAKERS)
def test_smoothed_and_debiased(maker: str, kind: str, options: Any) -> None:
    query, positive, shared, own, queue = normalised(*features(maker))
    weights = torch.rand(B, dtype=torch.float64)
    negatives = {"shared": shared}.get(kind, own)
    loss = mb.InfoNCELoss(1.0, share_negatives=kind == "shared own", **options)

    def ours(q: Tensor, p: Tensor, n: Tensor, s: Tensor) -> Tensor:
        given = None if kind == "none" else n
        return loss(q, p, given, queue=queue, weights=weights, temperature=1 / s)

    def truth(q: Tensor, p: Tensor, n: Tensor, s: Tensor) -> Tensor:
        name = {"shared": "shared"}.get(kind, "own")
        given = {} if kind == "none" else {name: n}
        share = kind == "shared own"
        return infonce(
            q, p, s, **given, share_negatives=share, queue=queue, weights=weights, **options
        )

    assert_equal(ours, truth, query, positive, negatives, 10.0)


@pytest.mark.parametrize("name", ["label_smoothing", "tau_plus"])
@pytest.mark.parametrize(
    "other",
    [
        {"margin": 0.0},
        {"same_tower": ("query",)},
        {"reverse": "joint"},
        {"hardness_mode": "all_negatives"},
    ],
)
def test_smoothing_and_debiasing_refuse_other_options(name: str, other: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}: expected 0 with {next(iter(other))}=.*0\.1"):
        mb.InfoNCELoss(0.1, **{name: 0.1}, **other)
    with pytest.raises(ValueError, match=rf"ids: expected None with {name}=0\.1"):
        mb.InfoNCELoss(0.1, **{name: 0.1})(X, X, ids=torch.arange(6))
    with pytest.raises(ValueError, match="tau_plus: expected 0 with label_smoothing"):
        mb.InfoNCELoss(0.1, label_smoothing=0.1, tau_plus=0.1)


def test_smoothed_logits_are_float32() -> None:
    query, positive, shared, own, _ = (t.bfloat16() for t in normalised(*features("learnt")))
    for kind, negatives in (("shared", shared), ("own", own)):
        ours = mb.InfoNCELoss(0.05, label_smoothing=0.3)(query, positive, negatives)
        exact = infonce(
            query.double(),
            positive.double(),
            20.0,
            label_smoothing=0.3,
            **{kind: negatives.double()},
        )
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


def test_weighting_own_negatives_changes_no_others() -> None:
    query, positive, _, own, _ = features("random")
    plain = mb.InfoNCELoss(0.1)
    loss = mb.InfoNCELoss(0.1, hardness_mode="hard_negatives", hardness_strength=5.0)
    assert torch.equal(loss(query, positive), plain(query, positive))
    assert not torch.isclose(loss(query, positive, own), plain(query, positive, own))


def test_own_negatives_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    query, positive, _, own, _ = features("random")
    monkeypatch.setattr(module, "CHUNK", 5 * own[0].numel())
    assert_equal(
        lambda q, p, n: mb.InfoNCELoss(0.1)(q, p, n),
        lambda q, p, n: infonce(q, p, 10.0, own=n),
        query,
        positive,
        own,
    )


def test_own_negatives_save_no_float32_copies() -> None:
    query, positive, negatives = (
        torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)
        for shape in ((32, 8), (32, 8), (32, 6, 8))
    )
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = mb.InfoNCELoss(0.1)(query, positive, negatives)
    assert not any(t.dtype == torch.float32 and t.numel() >= negatives.numel() for t in saved)
    loss.backward()
    assert negatives.grad is not None
    assert negatives.grad.any()


def test_own_logits_are_float32() -> None:
    query, negatives = torch.randn(16, 64).bfloat16(), torch.randn(16, 3, 64).bfloat16()
    exact = infonce(query.double(), query.double(), 1.0, own=negatives.double())
    ours = mb.InfoNCELoss(1.0)(query, query, negatives)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = mb.InfoNCELoss(1.0)(query.float(), query.float(), negatives.float())
    torch.testing.assert_close(cast, ours, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"share_negatives": True}, HARD])
def test_shared_negatives_are_no_querys_own(options: Any) -> None:
    with pytest.raises(ValueError, match=rf"negatives: .*\(b, k, d\).*{next(iter(options))}=.*"):
        mb.InfoNCELoss(0.1, **options)(X, X, X)
