"""InfoNCE in one direction (van den Oord et al. 2018, arXiv 1807.03748) at any batch size."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megabatch.losses.arguments import (
    check_choice,
    check_number,
    check_pairs,
    check_weights,
    own_ids,
)
from megabatch.losses.base import ContrastiveLoss, TemperatureLoss
from megabatch.losses.terms import minus_log_probability
from megabatch.similarity import Split, logsumexp, paired, split_logsumexp
from megabatch.similarity.arguments import accumulator_dtype, check_dense, check_two
from megabatch.similarity.distributed.means import global_mean, pair_ids

#: Elements of per-query negatives that are converted at a time.
CHUNK = 1 << 22


class InfoNCELoss(TemperatureLoss):
    """Each query against its own positive and, as negatives, all other queries' positives.

    Further negatives join the same softmax: shared ones, each query's own, a queue, the other rows
    of the same tower. With `margin=0.1` and `same_tower=("query", "positive")` this is the loss of
    Qwen3-Embedding (arXiv 2506.05176).

    Args:
        temperature: see `TemperatureLoss`.
        margin: negatives more similar to their row than its query is to its positive, by more than
            this, are taken for false ones and left out; in units of <query, positive>, before the
            temperature. A negative number leaves out close ones too. None: all are kept.
        same_tower: of "query" and "positive": whose other rows become negatives too, queries of a
            query, positives of its positive (Li et al. 2023, arXiv 2308.03281).
        normalize: scale each row of all features, negatives and queue included, to unit length
            first, as `F.normalize` does.
        group: processes that share one batch: None, "local" or a process group.
    """

    settings = ("temperature", "margin", "same_tower", *ContrastiveLoss.settings)

    def __init__(
        self,
        temperature: float | Tensor,
        *,
        margin: float | None = None,
        same_tower: Collection[str] = (),
        normalize: bool = False,
        group: object = None,
    ) -> None:
        super().__init__(temperature, normalize=normalize, group=group)
        if isinstance(same_tower, str):
            raise TypeError(f"same_tower: expected a collection of names, got {same_tower!r}")
        self.margin = None if margin is None else check_number("margin", margin)
        self.same_tower = tuple(same_tower)
        for name in self.same_tower:
            check_choice("same_tower", name, ("query", "positive"))
        if len(set(self.same_tower)) < len(self.same_tower):
            raise ValueError(f"same_tower: expected each name once, got {self.same_tower}")

    def forward(
        self,
        query: Tensor,
        positive: Tensor,
        negatives: Tensor | None = None,
        *,
        queue: Tensor | None = None,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        temperature: float | Tensor | None = None,
    ) -> Tensor:
        """The mean loss over queries; a query without any negative has loss 0.

        Args:
            query, positive: (b, d), row i of one belongs to row i of the other.
            negatives: (k, d), negatives of every query, of all processes; or (b, k, d), k of each
                query's own. The latter cost O(b·k) beside themselves.
            queue: (q, d), negatives that every process holds alike, such as MoCo's memory (He et
                al. 2019, arXiv 1911.05722); no gradient flows into it.
            ids: (b,) integers below 2**62; pairs of equal ids (the same document) are left out of
                each other's negatives. A negative id is shared with no other pair.
            weights: (b,) factors of the queries' losses, data, not negative; the loss is their
                weighted mean, 0 where all weights are 0.
            temperature: this call's, instead of the constructor's.

        Returns:
            A scalar in float32 (float64 for float64 features).

        Raises:
            TypeError, ValueError: the message names the argument, what came, what was expected.
        """
        check_pairs(query, positive, ("query", "positive"))
        _check_negatives(query, negatives)
        if queue is not None:
            check_two(query, queue, ("query", "queue"))
            queue = queue.detach()
        query, positive, negatives, queue = self._operands(query, positive, negatives, queue)
        shared = negatives if negatives is not None and negatives.dim() == 2 else None
        own = negatives if negatives is not None and negatives.dim() == 3 else None
        weights = check_weights(weights, query)
        scale = self._scale(temperature, query)
        if ids is not None:
            ids = own_ids(ids, query, self.group)
        ceiling = self._ceiling(query, positive, scale)
        split = partial(split_logsumexp, scale=scale, ceiling=ceiling, sides="rows")

        rows = self._in_batch(split, query, positive, shared, ids)
        parts = [rows.negative]
        if shared is not None and ids is not None:
            nobodies = _nothing(query), _nothing(shared)
            parts.append(split(query, shared, ids=nobodies, group=self.group)[0].negative)
        if own is not None:
            parts.append(_own_logsumexp(query, own, scale, ceiling))
        if queue is not None and ceiling is None:
            parts.append(logsumexp(query, queue, scale, sides="rows", group="local")[0])
        elif queue is not None:
            nobody = _nothing(query), _nothing(queue)
            parts.append(split(query, queue, ids=nobody, group="local")[0].negative)
        for name in self.same_tower:
            tower = query if name == "query" else positive
            same = "paired" if ids is None else ids
            parts.append(split(tower, None, ids=same, group=self.group)[0].negative)
        losses = minus_log_probability(rows.positive_sum, reduce(torch.logaddexp, parts))
        return global_mean(losses, self.group, weights, name="query")

    def _in_batch(
        self,
        split: Callable[..., tuple[Split, Split | None]],
        query: Tensor,
        positive: Tensor,
        shared: Tensor | None,
        ids: Tensor | None,
    ) -> Split:
        """Queries against all positives and, without ids, the shared negatives.

        Those are columns of the same matrix then: one sweep, one rounding of the queries' gradient.
        """
        if ids is not None:
            return split(query, positive, ids=(ids, ids), positives="paired", group=self.group)[0]
        if shared is None:
            return split(query, positive, group=self.group)[0]
        ids = pair_ids(query.shape[0], self.group, device=query.device)
        candidates = torch.cat([positive, shared])
        candidate_ids = torch.cat([ids, _nothing(shared)])
        return split(query, candidates, ids=(ids, candidate_ids), group=self.group)[0]

    def _ceiling(self, query: Tensor, positive: Tensor, scale: Tensor) -> Tensor | None:
        if self.margin is None:
            return None
        scale = scale.detach()
        return paired(query.detach(), positive.detach(), scale) + self.margin * scale


def _check_negatives(query: Tensor, negatives: Any) -> None:
    """None, shared negatives (k, d) or each query's own (b, k, d)."""
    if negatives is None:
        return
    if not isinstance(negatives, Tensor) or negatives.dim() not in (2, 3):
        came = tuple(negatives.shape) if isinstance(negatives, Tensor) else type(negatives).__name__
        raise (ValueError if isinstance(negatives, Tensor) else TypeError)(
            f"negatives: expected a tensor of shape (k, d) or (b, k, d), got {came}"
        )
    check_dense("negatives", negatives)
    check_two(query, negatives.flatten(0, -2), ("query", "negatives"))
    if negatives.dim() == 3 and negatives.shape[0] != query.shape[0]:
        raise ValueError(
            f"negatives: expected {query.shape[0]} rows of own negatives, one for each query, "
            f"got {negatives.shape[0]}"
        )


def _nothing(features: Tensor) -> Tensor:
    """Ids for rows that are no query's positive."""
    return torch.full((features.shape[0],), -1, device=features.device)


def _own_logsumexp(
    query: Tensor, negatives: Tensor, scale: Tensor, ceiling: Tensor | None
) -> Tensor:
    """Log-sum-exp of each query's logits with its own negatives (b, k, d), (b,)."""
    rows = max(1, CHUNK // max(1, negatives[:1].numel()))
    chunks = [
        # Checkpointed, to keep the logits only and not the converted features.
        checkpoint(_products, q, n, use_reentrant=False, preserve_rng_state=False)
        for q, n in zip(query.split(rows), negatives.split(rows), strict=True)
    ]
    logits = torch.cat(chunks) * scale
    if ceiling is not None:
        logits = logits.masked_fill(logits > ceiling[:, None], -torch.inf)
    return logits.logsumexp(1)


def _products(query: Tensor, negatives: Tensor) -> Tensor:
    """<query_i, negative_ik>, (rows, k), in the accumulator's dtype."""
    dtype = accumulator_dtype(query.dtype)
    kind = query.device.type  # autocast does not know meta
    with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
        return torch.bmm(negatives.to(dtype), query.to(dtype).unsqueeze(2)).squeeze(2)
