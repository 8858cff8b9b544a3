"""The loss of late interaction against dense float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megabatch as mb

B, D = 9, 6


def assert_equal(ours: Tensor, truth: Tensor, leaves: list[Tensor]) -> None:
    """Compare two numbers and their gradients."""
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-11)
    found, expected = (torch.autograd.grad(value, leaves) for value in (ours, truth))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def scores(q: Tensor, y: Tensor, q_mask: Tensor, y_mask: Tensor, mean: bool = False) -> Tensor:
    products = torch.einsum("ild,jkd->ijlk", q, y).masked_fill(~y_mask[:, None], -torch.inf)
    sums = (products.max(3).values * q_mask[:, None]).sum(2)
    return sums / q_mask.sum(1)[:, None] if mean else sums


def batch() -> tuple[list[Tensor], list[Tensor]]:
    """Queries and documents with gradients, and masks with tokens that do not count anywhere."""
    features = [torch.randn(B, k, D, dtype=torch.float64, requires_grad=True) for k in (5, 7)]
    masks = [torch.rand(t.shape[:2]) > 0.3 for t in features]
    for mask in masks:
        mask[:, 2] = True
    return features, masks


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("directions", ["query_to_document", "both"])
@pytest.mark.parametrize("score", ["sum", "mean"])
def test_directions_scores_ids_and_weights(score: Any, directions: Any, with_ids: bool) -> None:
    features, masks = batch()
    ids = torch.randint(0, 4, (B,)) if with_ids else None
    weights = torch.rand(B).double()
    temperature = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    loss = mb.MaxSimLoss(1.0, directions=directions, score=score)
    value = loss(*features, *masks, ids=ids, weights=weights, temperature=temperature)
    s = scores(*features, *masks, score == "mean") / temperature
    if ids is not None:
        s = s.masked_fill((ids[:, None] == ids) & ~torch.eye(B, dtype=torch.bool), -torch.inf)
    losses = -s.log_softmax(1).diagonal()
    if directions == "both":
        losses = (losses - s.log_softmax(0).diagonal()) / 2
    assert_equal(value, (losses * weights).sum() / weights.sum(), [*features, temperature])


@pytest.mark.parametrize("mode", [None, "in_batch_negatives", "hard_negatives", "all_negatives"])
@pytest.mark.parametrize("margin", [None, 0.3])
@pytest.mark.parametrize("share", [False, True])
def test_hard_negatives_margins_and_hardness(share: bool, margin: float | None, mode: Any) -> None:
    features, masks = batch()
    hard = torch.randn(B, 3, 4, D, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(B, 3, 4) > 0.3
    mask[..., 1] = True
    strength = 2.0 if mode else 0.0
    loss = mb.MaxSimLoss(
        0.5, margin=margin, share_negatives=share, hardness_mode=mode, hardness_strength=strength
    )
    value = loss(*features, *masks, hard, mask)

    def candidates(c: Tensor, own: Tensor, weighted: bool) -> Tensor:
        """Logits of negatives; -inf for a query's `own` and beyond the margin."""
        limit = s.diagonal().detach().view(-1, *[1] * (c.dim() - 1)) + (margin or 0)
        dropped = own if margin is None else own | (c > limit)
        return (c / 0.5 + weighted * strength * c.detach()).masked_fill(dropped, -torch.inf)

    s = scores(*features, *masks)
    every = scores(features[0], hard.flatten(0, 1), masks[0], mask.flatten(0, 1)).view(B, B, 3)
    own, in_batch = torch.eye(B, dtype=torch.bool), mode in ("in_batch_negatives", "all_negatives")
    of_hard = mode in ("hard_negatives", "all_negatives")
    mine = every.diagonal().T
    parts = [candidates(s, own, in_batch), candidates(mine, torch.zeros_like(mine).bool(), of_hard)]
    if share:
        parts.append(candidates(every, own[..., None], in_batch).flatten(1))
    positive = s.diagonal() / 0.5
    expected = torch.cat([positive[:, None], *parts], 1).logsumexp(1) - positive
    assert_equal(value, expected.mean(), [*features, hard])


@pytest.mark.parametrize("negatives", ["none", "own", "shared"])
def test_label_smoothing(negatives: str) -> None:
    """Of all candidates; a document without tokens is none."""
    features, masks = batch()
    hard = torch.randn(B, 2, 4, D, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(B, 2, 4) > 0.3
    mask[..., 0], mask[0, 1] = True, False
    loss = mb.MaxSimLoss(0.5, label_smoothing=0.2, share_negatives=negatives == "shared")
    more = () if negatives == "none" else (hard, mask)
    value = loss(*features, *masks, *more)
    s = scores(*features, *masks) / 0.5
    if more:
        others = scores(features[0], hard.flatten(0, 1), masks[0], mask.flatten(0, 1)) / 0.5
        if negatives == "own":
            others = others.view(B, B, 2).diagonal().T
        s = torch.cat([s, others], 1)
    counted = s > -torch.inf  # NaN: of -inf, of which no query token counts
    logs = s.masked_fill(~counted, -torch.inf).log_softmax(1)
    mean = torch.where(counted, logs, 0).sum(1) / counted.sum(1)
    expected = -0.8 * logs.diagonal() - 0.2 * mean
    assert_equal(value, expected.mean(), [*features, *([hard] if more else [])])
    with pytest.raises(ValueError, match="ids: expected None with label_smoothing"):
        loss(*features, *masks, ids=torch.arange(B))


def test_negatives_of_all_queries() -> None:
    """With fewer tokens than the documents, and with more."""
    features, masks = batch()
    for tokens, with_mask in itertools.product((3, 9), (True, False)):
        negatives = torch.randn(4, tokens, D, dtype=torch.float64, requires_grad=True)
        mask = torch.rand(4, tokens) > 0.3
        mask[:, 0] = True
        mask = mask if with_mask else torch.ones_like(mask)
        value = mb.MaxSimLoss(0.5)(*features, *masks, negatives, mask if with_mask else None)
        further = scores(features[0], negatives, masks[0], mask)
        s = torch.cat([scores(*features, *masks), further], 1) / 0.5
        expected = torch.nn.functional.cross_entropy(s, torch.arange(B))
        assert_equal(value, expected, [*features, negatives])


def test_packed_tokens() -> None:
    features, masks = batch()
    expected = mb.MaxSimLoss(0.5)(*features, *masks)
    packed = [t[mask] for t, mask in zip(features, masks, strict=True)]
    names = ("query_cu_seqlens", "document_cu_seqlens")
    starts = {
        name: torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
        for name, mask in zip(names, masks, strict=True)
    }
    assert_equal(mb.MaxSimLoss(0.5)(*packed, **starts), expected, features)


def test_tokens_that_do_not_count_may_hold_anything() -> None:
    """Also NaN, as memory that a model left uninitialised; it reaches no gradient."""
    features, masks = batch()
    expected = mb.MaxSimLoss(0.5, normalize=True)(*features, *masks)
    wanted = torch.autograd.grad(expected, features)
    damaged = [
        t.masked_fill(~m[..., None], torch.nan) for t, m in zip(features, masks, strict=True)
    ]
    leaves = [t.detach().requires_grad_() for t in damaged]
    value = mb.MaxSimLoss(0.5, normalize=True)(*leaves, *masks)
    torch.testing.assert_close(value, expected)
    for found, exact in zip(torch.autograd.grad(value, leaves), wanted, strict=True):
        torch.testing.assert_close(found, exact)


class Encoder(nn.Module):
    """Unit features of tokens, and a mask of those that are no padding (0)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.projection = nn.Embedding(50, 8), nn.Linear(8, D)
        self.double()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        features = self.projection(self.embedding(tokens))
        return nn.functional.normalize(features, dim=-1), tokens != 0


@pytest.mark.parametrize("kept", [False, True])
def test_gradient_caching_of_tokens_and_masks(kept: bool) -> None:
    """Micro-batches of similar lengths have as many tokens, and are as long as they need be."""
    encoders, loss = (Encoder(), Encoder()), mb.MaxSimLoss(0.1)
    lengths = [torch.randint(1, most + 1, (B,)) for most in (5, 12)]
    batches = [torch.randint(1, 50, (B, most)) for most in (5, 12)]
    for batch, length in zip(batches, lengths, strict=True):
        batch[torch.arange(batch.shape[1]) >= length[:, None]] = 0
    parameters = [*encoders[0].parameters(), *encoders[1].parameters()]
    expected = loss(encoders[0](batches[0]), encoders[1](batches[1]))
    wanted = torch.autograd.grad(expected, parameters)
    pairs = zip(batches, lengths, strict=True)
    by_length = [mb.SortedByLength(batch, own, multiple=1) for batch, own in pairs]
    step = mb.GradientCache(encoders, loss, 2, kept_micro_batches=2 if kept else 0)
    for given in (batches, by_length):
        for p in parameters:
            p.grad = None
        value = step(*given)
        value.backward()
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-11)
        for p, gradient in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(p.grad, gradient, rtol=0, atol=1e-11)


def test_refusals() -> None:
    (q, y), (q_mask, y_mask) = batch()
    loss, whole = mb.MaxSimLoss(0.5), torch.tensor([0, 5])
    for words, call in (
        ("directions: expected one of", lambda: mb.MaxSimLoss(1.0, directions="documents")),
        ("score: expected one of", lambda: mb.MaxSimLoss(1.0, score="max")),
        (
            "directions: expected 'query_to_document' with margin=0.1",
            lambda: mb.MaxSimLoss(1.0, margin=0.1, directions="both"),
        ),
        (r"queries: expected shape \(n, l, d\)", lambda: loss(q[0], y)),
        ("query_mask: expected None with a tuple", lambda: loss((q, q_mask), y, q_mask)),
        ("documents: expected 9 rows", lambda: loss(q, y[1:])),
        ("documents: expected width 6", lambda: loss(q, y[..., :4])),
        (r"query_mask: expected shape \(9, 5\)", lambda: loss(q, y, y_mask)),
        (r"document_mask: expected shape \(9, 7\)", lambda: loss(q, y, None, q_mask)),
        ("negatives: expected a tensor of shape", lambda: loss(q, y, None, None, q[0])),
        ("negatives: expected 9 rows", lambda: loss(q, y, None, None, y[None])),
        (
            "query_mask: expected None with query_cu_seqlens",
            lambda: loss(q[0], y, q_mask, query_cu_seqlens=whole),
        ),
        (
            r"queries: expected shape \(n, d\)",
            lambda: loss(q, y, query_cu_seqlens=whole),
        ),
        (
            "query_cu_seqlens: expected numbers that rise from 0 to 5",
            lambda: loss(q[0], y, query_cu_seqlens=torch.tensor([0, 4])),
        ),
        (
            "negatives: expected each query's own",
            lambda: mb.MaxSimLoss(1.0, share_negatives=True)(q, y, None, None, y),
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match="query_mask: expected a tensor"):
        loss(q, y, [True])
