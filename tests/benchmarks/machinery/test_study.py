from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from machinery import study, text_pairs
from machinery.study import OBJECTIVES, Model, Run, Training, evaluate, rates
from machinery.study_data import Pairs, load
from megabatch import ClipLoss
from megabatch.similarity import topk
from tests.benchmarks.study_files import write_texts

RUN = Run("texts", "clip", batch=8, group=8, steps=12, lr=1e-3, warmup=0.25, seed=0)


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pairs:
    monkeypatch.setattr(text_pairs, "VOCABULARY", 128)  # a table of 16,384 takes seconds
    return load("texts", write_texts(tmp_path / "texts.npz", 40), torch.device("cpu")).train


def features(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = F.normalize(torch.randn(2, n, 5, dtype=torch.float64, generator=generator), dim=-1)
    return x.requires_grad_(), y.requires_grad_()


def test_the_rate_rises_and_falls() -> None:
    made = rates(replace(RUN, steps=16))
    assert len(made) == 16
    assert made[:4] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])
    assert made[10] == pytest.approx(0.5e-3)
    assert 0 < made[-1] < 0.05e-3


def test_a_seed_gives_one_sequence_of_samples_whatever_the_batch(pairs: Pairs) -> None:
    order = Training(RUN, pairs).order
    assert torch.equal(order, Training(replace(RUN, batch=16, steps=6), pairs).order)
    assert torch.equal(order[:40].sort().values, torch.arange(40))
    assert not torch.equal(order, Training(replace(RUN, seed=1), pairs).order)


def test_pairs_of_two_groups_never_meet(pairs: Pairs) -> None:
    x, y = features(8)
    objective = OBJECTIVES["clip"](replace(RUN, group=4), pairs).double()
    rows = torch.arange(0, 16, 2)  # of different documents
    value = objective(x, y, rows, None)
    loss, scale = ClipLoss(), objective.scale
    expected = (loss(x[:4], y[:4], scale) + loss(x[4:], y[4:], scale)) / 2
    torch.testing.assert_close(value, expected)
    for mine, right in zip(
        torch.autograd.grad(value, (x, y)), torch.autograd.grad(expected, (x, y)), strict=True
    ):
        torch.testing.assert_close(mine, right)


def test_moving_averages_estimate_the_gradient_of_the_global_loss(pairs: Pairs) -> None:
    x, y = features(8)
    rows = torch.arange(8)  # two queries of each document
    objective = OBJECTIVES["sogclr"](replace(RUN, loss="sogclr-0.25"), pairs).double()
    apart = (pairs.ids[rows][:, None] != pairs.ids[rows]).double()

    def normalisers() -> Tensor:
        logits = objective.scale * (x @ y.T)
        own = logits.diagonal()
        both = (logits - own[:, None]).exp() * apart, (logits.T - own[:, None]).exp() * apart
        return torch.stack([part.sum(1) / 7 for part in both])

    first = normalisers()
    value = objective(x, y, rows, None)
    assert value.item() == pytest.approx(first.log().mean().item())
    own = torch.autograd.grad(value, (x, y))
    for mine, right in zip(own, torch.autograd.grad(first.log().mean(), (x, y)), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-6)  # no average yet
    with torch.no_grad():
        x.mul_(-1)
    second = normalisers()
    average = 0.75 * first.detach() + 0.25 * second.detach()
    own = torch.autograd.grad(objective(x, y, rows, None), (x, y))
    expected = torch.autograd.grad((second / average).mean(), (x, y))
    for mine, right in zip(own, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-6)


def test_mined_negatives_are_the_best_ranked_wrong_documents(pairs: Pairs) -> None:
    run = replace(RUN, loss="hard-3")
    torch.manual_seed(0)
    model = Model(run, pairs).train()
    objective = model.objective
    assert objective.negatives(torch.arange(4)) is None
    objective.mine(model, pairs)
    x, y = (study.features(model.first, side) for side in (pairs.first, pairs.second[::2]))
    _, best = topk(x, y, 3, ids=(pairs.ids, pairs.ids[::2]))
    assert torch.equal(pairs.ids[objective.hardest], pairs.ids[::2][best])
    drawn = objective.negatives(torch.arange(40))
    assert drawn is not None
    assert (objective.hardest == drawn[:, None]).any(1).all()
    assert model.first.training


LOSSES = ("clip", "siglip", "fixed-20", "sogclr-0.5", "sogclr-0.5-20", "query", "hard-2")


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains(loss: str, pairs: Pairs) -> None:
    training = Training(replace(RUN, loss=loss, lr=3e-3), pairs)
    training.advance(12)
    assert training.losses.isfinite().all()
    scale = training.model.objective.scale.item()
    assert (abs(scale - 20) < 1e-5) == loss.endswith("-20")


@pytest.mark.parametrize("loss", ["clip", "hard-2"])
def test_large_batches_have_the_same_gradients_through_caching(
    loss: str, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses() -> Tensor:
        training = Training(replace(RUN, loss=loss), pairs)
        training.model.eval()  # random forms of samples would differ
        training.advance(4)
        return training.losses[:4]

    whole = losses()
    monkeypatch.setattr(study, "LARGEST_GRAPH", 7)
    monkeypatch.setattr(study, "MICRO_BATCH", 3)
    torch.testing.assert_close(losses(), whole, rtol=1e-4, atol=1e-5)


def test_large_batches_of_texts_are_divided_where_they_do_not_fit() -> None:
    whole, half = study.LARGEST_GRAPH, study.MICRO_BATCH
    icons, texts, hard = replace(RUN, data="icons"), RUN, replace(RUN, loss="hard-16")
    assert [study.most_at_once(icons, memory) for memory in (80e9, 140e9)] == [whole, whole]
    assert [study.most_at_once(texts, memory) for memory in (80e9, 140e9)] == [half, whole]
    assert study.most_at_once(hard, 140e9) == half


def test_figures_of_retrieval(pairs: Pairs) -> None:
    torch.manual_seed(0)
    model = Model(RUN, pairs)
    figures = evaluate(model, pairs)
    x, y = (study.features(model.first, side) for side in (pairs.first, pairs.second[::2]))
    scores = x @ y.T
    right = pairs.ids[:, None] == pairs.ids[::2]
    forward = right.gather(1, scores.argmax(1, keepdim=True)).float().mean()
    backward = right.T.gather(1, scores.T.argmax(1, keepdim=True)).float().mean()
    assert figures["recall@1"] == pytest.approx(((forward + backward) / 2).item(), abs=1e-6)
    loss = ClipLoss(duplicates="ignored")(
        x, study.features(model.first, pairs.second), 1 / 0.07, ids=pairs.ids
    )
    assert figures["loss"] == pytest.approx(loss.item(), abs=1e-4)
    assert figures["x_to_y/recall@1"] == pytest.approx(forward.item(), abs=1e-6)
    assert figures["x_to_y/recall@10"] >= figures["x_to_y/recall@1"]
