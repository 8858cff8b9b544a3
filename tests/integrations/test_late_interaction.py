"""PyLate's and colpali-engine's losses equal their definitions and, where installed, themselves."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.integrations.colpali import ColbertLoss
from megabatch.integrations.pylate import CachedContrastive
from tests.similarity.distributed.processes import World, on_processes

B = 5
LIBRARIES = pytest.mark.parametrize("library", [False, True], ids=["definition", "library"])
REASON = "needs pylate==1.6.0 or colpali-engine==0.3.18 in an environment with their libraries"


class Model(nn.Module):
    """PyLate's interface. Tokens 3 and 4 do not count in documents, and 0 is padding."""

    skiplist = (3, 4)

    def __init__(self, do_query_expansion: bool) -> None:
        super().__init__()
        self.do_query_expansion = do_query_expansion
        self.embedding = nn.Embedding(12, 6, dtype=torch.float64)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        features["token_embeddings"] = self.embedding(features["input_ids"])
        return features


def texts(columns: int, rows: int = B) -> list[dict[str, Tensor]]:
    ids = [torch.randint(1, 12, (rows, tokens)) for tokens in (4, 7, 7)[:columns]]
    ids = [t * (torch.arange(t.shape[1]) < torch.randint(1, 8, (rows, 1))) for t in ids]
    return [{"input_ids": t, "attention_mask": (t != 0).long()} for t in ids]


def unit_tokens(model: nn.Module, column: dict[str, Tensor]) -> Tensor:
    return F.normalize(model(dict(column))["token_embeddings"], dim=2)


def with_gradients(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def colbert(q: Tensor, d: Tensor, offset: int, **options: Any) -> Tensor:
    """colpali-engine's loss as plain operations."""
    scores = torch.einsum("bnd,csd->bcns", q, d).max(3).values.sum(2)
    if options.get("normalize_scores", True):
        scores = scores / (q[..., 0] != 0).sum(1)[:, None]
    target = torch.arange(offset, offset + len(q))
    if "pos_aware_negative_filtering" in options:
        own = F.one_hot(target, len(d)).bool()
        high = scores > options.get("filter_threshold", 0.95) * scores[own][:, None]
        scores = torch.where(high & ~own, scores * options.get("filter_factor", 0.5), scores)
    return F.cross_entropy(scores / options.get("temperature", 0.02), target)


FILTER = {"pos_aware_negative_filtering": True}
OTHERS = {"filter_threshold": 0.7, "filter_factor": 0.8, "normalize_scores": False}


@LIBRARIES
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, FILTER, FILTER | OTHERS])
@pytest.mark.parametrize(("number", "offset"), [(B, 0), (3 * B, B)])
def test_colbert_loss(number: int, offset: int, options: dict[str, Any], library: bool) -> None:
    """Also with documents of other processes, which the trainer gathers and tells the offset."""
    theirs: Any = partial(colbert, **options)
    if library:
        own = pytest.importorskip("colpali_engine.loss", reason=REASON)
        theirs = own.ColbertLoss(**options)
    model, columns, found = Model(True), texts(2, number), []
    for loss in (ColbertLoss(**options), theirs):
        q, d = (unit_tokens(model, c) * c["attention_mask"][..., None] for c in columns)
        found.append(with_gradients(model, loss(q[offset : offset + B], d, offset)))
    torch.testing.assert_close(*found, rtol=0, atol=1e-11)


def contrastive(model: Model, columns: list[dict[str, Tensor]]) -> Tensor:
    """PyLate's loss of each query as plain operations, (b,)."""
    q, *documents = (unit_tokens(model, column) for column in columns)
    masks = [(c["input_ids"][..., None] != torch.tensor([0, 3, 4])).all(2) for c in columns[1:]]
    products = torch.einsum("bnd,cjsd->bcjns", q, torch.stack(documents, 1))
    products = products * torch.stack(masks, 1)[:, :, None]
    if not model.do_query_expansion:
        products = products * columns[0]["attention_mask"][:, None, None, :, None]
    scores = products.max(4).values.sum(3).flatten(1)
    target = torch.arange(len(q)) * len(documents)
    return F.cross_entropy(scores / 0.5, target, reduction="none")


@LIBRARIES
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(("expansion", "columns"), [(True, 3), (False, 2)])
def test_cached_contrastive(columns: int, expansion: bool, mean: bool, library: bool) -> None:
    model, batch = Model(expansion), texts(columns)
    loss = CachedContrastive(model, mini_batch_size=2, size_average=mean, temperature=0.5)
    losses = contrastive(model, batch)
    expected = losses.mean() if mean else losses.sum()
    if library:  # its cached loss always has the gradients of the sum
        own = pytest.importorskip("pylate.losses", reason=REASON)
        kind = own.Contrastive if mean else own.CachedContrastive
        expected = kind(model, size_average=mean, temperature=0.5)([dict(c) for c in batch])
    wanted = with_gradients(model, expected)
    torch.testing.assert_close(with_gradients(model, loss(batch)), wanted, rtol=0, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(loss(batch), wanted[0])


@on_processes(2)
def test_gradients_with_distributed_data_parallel(world: World) -> None:
    """They are those of one process with the plain loss of the whole batch."""
    for mean in (True, False):
        model = Model(True)
        ddp = DistributedDataParallel(copy.deepcopy(model))
        loss = CachedContrastive(ddp, None, 2, None, mean, True, temperature=0.5)
        for _ in range(2):
            batch = texts(3, 2 * B)
            losses = contrastive(model, batch)  # PyLate multiplies by the number of processes
            wanted = with_gradients(model, losses.mean() * 2 if mean else losses.sum())
            mine = [{k: world.shard(t, [B, B]) for k, t in column.items()} for column in batch]
            found = with_gradients(ddp, loss(mine))
            torch.testing.assert_close(found[1:], wanted[1:], rtol=0, atol=1e-11)


def test_refusals() -> None:
    q = torch.zeros(2, 1, 4)
    with pytest.raises(ValueError, match="use_smooth_max: expected False"):
        ColbertLoss(use_smooth_max=True)
    with pytest.raises(ValueError, match="filter_factor: expected a positive"):
        ColbertLoss(filter_factor=0)
    with pytest.raises(ValueError, match="offset: expected 0 to 0"):
        ColbertLoss()(q, q, 1)
    with pytest.raises(ValueError, match="score_metric: expected None"):
        CachedContrastive(Model(True), nn.Identity())
