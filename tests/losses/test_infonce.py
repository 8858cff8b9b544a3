"""InfoNCELoss; test_random_calls.py has each option and combinations of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch.losses import negatives as module
from tests.losses.reference import assert_equal
from tests.similarity.exact import leaves
from tests.similarity.features import MAKERS

B, D = 12, 5
TOWERS = ("query", "positive")


def features(maker: str) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
    """query, positive, negatives of both kinds, queue."""
    query, positive = MAKERS[maker](B, B, D)
    (_, shared), (_, hard), (_, queue) = (MAKERS[maker](B, n, D) for n in (7, B * 3, 9))
    return query, positive, {"shared": shared, "hard": hard.view(B, 3, D)}, queue


def test_a_learnable_temperature_is_a_parameter() -> None:
    loss = mb.InfoNCELoss(torch.nn.Parameter(torch.tensor([0.2])))
    assert [name for name, _ in loss.named_parameters()] == ["temperature"]


def test_a_query_without_negatives_has_loss_zero_and_a_queue_no_gradient() -> None:
    query, positive, queue = leaves(*(torch.randn(3, 4) for _ in range(3)))
    nothing, ids = torch.zeros(3, 0, 4).double(), torch.zeros(3).long()
    for loss in (mb.InfoNCELoss(0.1), mb.InfoNCELoss(0.1, same_tower=("query",))):
        value = loss(query, positive, nothing, ids=ids)
        value.backward()
        assert value == 0
        assert not query.grad.any()
    value = mb.InfoNCELoss(0.1, reverse="joint")(query, positive, ids=ids)
    torch.testing.assert_close(value, torch.tensor(2.0).double().log())
    mb.InfoNCELoss(0.1)(query, positive, queue=queue).backward()
    assert queue.grad is None


def test_a_guide_is_normalised_as_the_features_are() -> None:
    query, positive, negatives, _ = features("random")
    guide, lengths = negatives["shared"], torch.arange(1, 7)[:, None]
    guides = {"guide_query": 3 * guide[:6], "guide_positive": 5 * guide[1:7]}
    normalised = {name: F.normalize(g, dim=1) for name, g in guides.items()}
    ours = mb.InfoNCELoss(0.1, margin=0.0, normalize=True)
    value = ours(lengths * query[:6], positive[:6], **guides)
    truth = mb.InfoNCELoss(0.1, margin=0.0)(query[:6], positive[:6], **normalised)
    torch.testing.assert_close(value, truth)


def test_log_q_is_subtracted_from_every_candidates_logit() -> None:
    """From the positive's, too: Yi et al. 2019. A margin compares similarities without it."""
    query, positive, negatives, queue = features("clustered")
    ids = torch.arange(B) % 8
    shapes = (B,), (B, 3), (len(queue),)
    log_q = [-15 * torch.rand(shape, dtype=torch.float64) for shape in shapes]

    def dense(q: Tensor, p: Tensor, n: Tensor, t: Tensor, *log_q: Tensor) -> Tensor:
        products = [q @ p.T, (n @ q[:, :, None])[:, :, 0], q @ queue.T]
        own = products[0].diagonal()[:, None]
        dropped = torch.cat([s.detach() > own.detach() + 0.1 for s in products], 1)
        dropped[:, :B] |= (ids[:, None] == ids) & ~torch.eye(B, dtype=torch.bool)
        corrected = [s / t - c for s, c in zip(products, log_q, strict=True)]
        logits = torch.cat(corrected, 1).masked_fill(dropped, -torch.inf)
        return F.cross_entropy(logits, torch.arange(B))

    def ours(q: Tensor, p: Tensor, n: Tensor, t: Tensor, *log_q: Tensor) -> Tensor:
        names = "log_q", "log_q_negatives", "log_q_queue"
        corrections = dict(zip(names, log_q, strict=True))
        loss = mb.InfoNCELoss(1.0, margin=0.1)
        return loss(q, p, n, queue=queue, ids=ids, temperature=t, **corrections)

    assert_equal(ours, dense, query, positive, negatives["hard"], 0.07, *log_q)


def test_log_q_under_gradient_caching_and_of_prefixes() -> None:
    """It goes to the loss by keyword, as ids do; that of hard negatives has the shape (b, k)."""
    query, positive, negatives, _ = features("random")
    loss = mb.MatryoshkaLoss(mb.InfoNCELoss(0.2), [2, D], normalize=False)
    log_q = {"log_q": -torch.rand(B), "log_q_negatives": -torch.rand(B, 3)}
    towers = [torch.nn.Identity() for _ in range(3)]
    inputs = leaves(query, positive, negatives["hard"])
    value = mb.GradientCache(tuple(towers), loss, 5)(*inputs, **log_q)
    parts = [mb.InfoNCELoss(0.2)(*(t[..., :d] for t in inputs), **log_q) for d in (2, D)]
    torch.testing.assert_close(value, (parts[0] + parts[1]).detach())


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_the_positive_are_not_excluded(dtype: torch.dtype, guided: bool) -> None:
    """At a margin of 0 they lie on the limit, and rounding puts them on either side of it."""
    b, d = 200, 384
    query = F.normalize(torch.randn(b, d), dim=1).to(dtype)
    positive = query[:1].expand(b, d)
    features, guides = (query, positive), {}
    if guided:
        features = query[:, :8], query[:, 8:16]
        guides = {"guide_query": query, "guide_positive": positive}
    value = mb.InfoNCELoss(1.0, margin=0.0)(*features, **guides)
    torch.testing.assert_close(value, mb.InfoNCELoss(1.0)(*features), rtol=1e-6, atol=0)
    assert mb.InfoNCELoss(1.0, margin=-1e-5)(*features, **guides) == 0  # excludes all


def test_hard_negatives_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    query, positive, negatives, _ = features("random")
    found = []
    for chunk in (module.CHUNK, 5 * negatives["hard"][0].numel()):
        monkeypatch.setattr(module, "CHUNK", chunk)
        inputs = leaves(query, positive, negatives["hard"])
        value = mb.InfoNCELoss(0.1)(*inputs)
        found.append([value, *torch.autograd.grad(value, inputs)])
    torch.testing.assert_close(*found, rtol=0, atol=1e-11)


def test_hard_negatives_save_no_float32_copies() -> None:
    shapes = (32, 8), (32, 8), (32, 6, 8)
    inputs = [torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = mb.InfoNCELoss(0.1)(*inputs)
    assert not any(t.dtype == torch.float32 and t.numel() >= inputs[2].numel() for t in saved)
    loss.backward()
    assert inputs[2].grad is not None
    assert inputs[2].grad.any()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3}])
def test_logits_outside_of_sweeps_are_float32(options: Any) -> None:
    query, positive, negatives, _ = features("learnt")
    query, positive = query.bfloat16(), positive.bfloat16()
    for some in negatives.values():
        some = some.bfloat16()
        loss = mb.InfoNCELoss(0.05, **options)
        exact = loss(query.double(), positive.double(), some.double())
        ours = loss(query, positive, some)
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = loss(query.float(), positive.float(), some.float())
        torch.testing.assert_close(cast, ours, rtol=0, atol=0)


def test_several_sweeps_in_bfloat16() -> None:
    """Each rounds the queries' gradient once."""
    query, positive = (t.bfloat16() for t in MAKERS["learnt"](96, 96, 32))
    hard = MAKERS["random"](96, 96 * 4, 32)[1].view(96, 4, 32).bfloat16()
    loss = mb.InfoNCELoss(0.05, same_tower=TOWERS)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [t.to(dtype).detach().clone().requires_grad_() for t in (query, positive, hard)]
        loss(*inputs).backward()
        results.append([t.grad.double().flatten(0, -2) for t in inputs])
    for mine, exact in zip(*results, strict=True):
        error = (mine - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-6)
        assert error.median() < 0.005
        assert error.max() < 0.02
