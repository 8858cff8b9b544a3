"""colpali-engine's `ColbertLoss`, with its arguments, without the scores of all pairs.

In place of `from colpali_engine.loss import ColbertLoss`; the library itself is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megabatch.losses.arguments import check_number
from megabatch.losses.base import TemperatureLoss
from megabatch.losses.terms import minus_log_probability
from megabatch.similarity import Split, split_logsumexp
from megabatch.similarity.arguments import check_two


class ColbertLoss(TemperatureLoss):
    """InfoNCE of queries and documents of many vectors; see `colpali_engine.loss.ColbertLoss`.

    Padding is tokens of zeros, which score 0. See `ContrastiveLoss` for errors.

    Args:
        temperature: see `TemperatureLoss`.
        normalize_scores: divide a query's scores by the number of its tokens.
        use_smooth_max: must be False: log-sum-exps over tokens are not supported.
        pos_aware_negative_filtering: multiply scores of negatives that exceed `filter_threshold`
            times that of the positive by `filter_factor`. This takes three passes instead of one.
        max_batch_size, tau, norm_tol: have no effect: no buffer, no smooth maximum, no check.
        filter_threshold, filter_factor: see above; the factor is positive.
    """

    def __init__(
        self,
        temperature: float | Tensor = 0.02,
        normalize_scores: bool = True,
        use_smooth_max: bool = False,
        pos_aware_negative_filtering: bool = False,
        max_batch_size: int = 1024,
        tau: float = 0.1,
        norm_tol: float = 1e-3,
        filter_threshold: float = 0.95,
        filter_factor: float = 0.5,
    ) -> None:
        super().__init__(temperature, normalize=False, group="local")
        if use_smooth_max:
            raise ValueError(f"use_smooth_max: expected False, got {use_smooth_max!r}")
        self.normalize_scores = normalize_scores
        self.pos_aware_negative_filtering = pos_aware_negative_filtering
        self.filter_threshold = check_number("filter_threshold", filter_threshold)
        self.filter_factor = check_number(
            "filter_factor", filter_factor, "a positive, finite number"
        )

    def forward(self, query_embeddings: Tensor, doc_embeddings: Tensor, offset: int = 0) -> Tensor:
        """The mean loss over queries, in float32 (float64 for float64 embeddings).

        Args:
            query_embeddings: (b, l, d). doc_embeddings: (n, k, d), of which the b from `offset` on
                are those of the queries.
        """
        names = "query_embeddings", "doc_embeddings"
        check_two(query_embeddings, doc_embeddings, names, tokens=True)
        b, n = len(query_embeddings), len(doc_embeddings)
        if not 0 <= offset <= n - b:
            raise ValueError(f"offset: expected 0 to {n - b}, {n} documents less {b}, got {offset}")
        weight = None
        if self.normalize_scores:  # the library, too, looks at tokens' first features
            number = (query_embeddings[..., 0] != 0).sum(1)
            weight = number.clamp(min=1).to(torch.float64).reciprocal()
        places = torch.arange(n, device=doc_embeddings.device)
        sweep = partial(
            split_logsumexp,
            self._operand(query_embeddings),
            self._operand(doc_embeddings),
            ids=(places[offset : offset + b], places),
            row_weight=weight,
            sides="rows",
            group="local",
        )
        scale = self._scale(None, query_embeddings)
        if self.pos_aware_negative_filtering:
            return self._filtered(sweep, scale).mean()
        rows, _ = sweep(scale=scale)
        return minus_log_probability(rows.positive_sum, rows.negative).mean()

    def _filtered(self, sweep: Callable[..., tuple[Split, Any]], scale: Tensor) -> Tensor:
        """Losses with the scores of high negatives multiplied by a factor f, (b,).

        A ceiling leaves high ones out. Their sum of e^(f s) is that of all, less that of the low
        ones. For f <= 1 and s >= 0 the latter is below the low ones' sum of e^s, which is in the
        softmax too, so that the difference loses no accuracy.
        """
        every, _ = sweep(scale=scale * self.filter_factor)
        ceiling = self.filter_threshold * every.positive_sum.detach()
        low, _ = sweep(scale=scale * self.filter_factor, ceiling=ceiling)
        rows, _ = sweep(scale=scale, ceiling=ceiling / self.filter_factor)
        positive = rows.positive_sum
        logits = torch.stack([positive, rows.negative, every.negative, low.negative])
        largest = logits.detach().amax(0)
        own, low_ones, weakened, weakened_low_ones = (logits - largest).exp()
        high_ones = (weakened - weakened_low_ones).clamp(min=0)
        return largest - positive + (own + low_ones + high_ones).log()
