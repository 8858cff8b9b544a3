"""InfoNCE's candidates: log-sum-exps over negatives, their number and their mean logit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megabatch.losses.terms import scale_gradient
from megabatch.similarity import Split, logsumexp, split_logsumexp
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.distributed.means import pair_ids, sum_over_ranks
from megabatch.torch_internals import transforms_active

#: Elements of per-query negatives that are converted at a time.
CHUNK = 1 << 22


class Logits:
    """Similarities times a scale, and their log-sum-exps.

    With a `strength` a > 0 the exponential of each negative is multiplied by e^(a c), where c is
    its similarity without gradient. The logit is (scale + a) c in the forward pass, and its
    derivative with respect to c is `scale`. So the log-sum-exp is computed at scale + a, which
    makes the features' gradients too large by (scale + a) / scale. The upstream gradients are
    corrected for that: one number a row, in the accumulator's dtype, and no further rounding.

    Args:
        scale: (). limit: (rows,) similarities; negatives above their row's are left out. None: all
            are kept. group: as in `split_logsumexp`. strength: a.
    """

    def __init__(
        self, scale: Tensor, limit: Tensor | None, group: object, strength: float = 0.0
    ) -> None:
        self.group, self.factor = group, None
        if strength:
            self.factor = (scale / (scale + strength)).detach()
            # The scale's own gradient needs no correction: undo the factor there.
            scale = scale_gradient(scale + strength, self.factor.reciprocal())
        self.scale = scale
        self.ceiling = None if limit is None else limit * scale.detach()

    def split(self, x: Tensor, y: Tensor | None, **options: Any) -> tuple[Split, Split | None]:
        """`split_logsumexp` with weighted negatives; `positive` is then not to be used."""
        common: dict[str, Any] = {"sides": "rows", "ceiling": self.ceiling, "group": self.group}
        rows, columns = split_logsumexp(x, y, self.scale, **(common | options))
        return self._weighted(rows), None if columns is None else self._weighted(columns)

    def all(self, x: Tensor, y: Tensor, group: object) -> Tensor:
        """Log-sum-exp of each row of x over all rows of y, (m,)."""
        if self.ceiling is not None:
            return self.split(x, y, ids=(no_ids(x), no_ids(y)), group=group)[0].negative
        return self._corrected(logsumexp(x, y, self.scale, sides="rows", group=group)[0])

    def others(self, x: Tensor, own: Tensor) -> Tensor:
        """Log-sum-exp of each row i of x over the `own` (m, k, d) of all other rows, (m,)."""
        pairs = pair_ids(x.shape[0], self.group, device=x.device)
        owners = pairs.repeat_interleave(own.shape[1])
        return self.split(x, own.flatten(0, 1), ids=(pairs, owners))[0].negative

    def own(self, x: Tensor, own: Tensor) -> Tensor:
        """Log-sum-exp of each row i of x over its `own[i]` (k, d), (m,)."""
        logits = own_products(x, own) * self.scale
        if self.ceiling is not None:
            logits = logits.masked_fill(logits > self.ceiling[:, None], -torch.inf)
        return self._corrected(logits.logsumexp(1))

    def _weighted(self, side: Split) -> Split:
        if self.factor is None:
            return side
        # The factor turns a logit at scale + a, and its gradient, into those at `scale`.
        positive_sum = side.positive_sum * self.factor
        return side._replace(negative=self._corrected(side.negative), positive_sum=positive_sum)

    def _corrected(self, lse: Tensor) -> Tensor:
        return lse if self.factor is None else scale_gradient(lse, self.factor)


def no_ids(features: Tensor) -> Tensor:
    """Ids for rows that are no other row's positive."""
    return torch.full((features.shape[0],), -1, device=features.device)


def own_products(query: Tensor, own: Tensor) -> Tensor:
    """<query_i, own_ik> of (b, d) and (b, k, d), (b, k), in the accumulator's dtype."""
    if not torch.compiler.is_compiling() and transforms_active():
        return _products(query, own)  # torch.func does not take checkpoints
    rows = max(1, CHUNK // max(1, own[:1].numel()))
    chunks = [
        # Checkpointed, to keep the logits only and not the converted features.
        checkpoint(_products, q, n, use_reentrant=False, preserve_rng_state=False)
        for q, n in zip(query.split(rows), own.split(rows), strict=True)
    ]
    return torch.cat(chunks)


def _products(query: Tensor, negatives: Tensor) -> Tensor:
    """<query_i, negative_ik>, (rows, k), in the accumulator's dtype."""
    dtype = accumulator_dtype(query.dtype)
    kind = query.device.type  # autocast does not know meta
    with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
        return torch.bmm(negatives.to(dtype), query.to(dtype).unsqueeze(2)).squeeze(2)


class Candidates(NamedTuple):
    """The candidates of the queries' softmax. Queries share them all, except `own`."""

    positive: Tensor  #: (b, d)
    shared: Tensor | None  #: (k, d)
    own: Tensor | None  #: (b, k, d)
    queue: Tensor | None  #: (q, d), which all processes hold alike

    def number(self, group: object) -> Tensor:
        """The number of candidates of one query of this process, ()."""
        rows = len(self.positive) + (0 if self.shared is None else len(self.shared))
        own = 0 if self.own is None else self.own.shape[1]
        queue = 0 if self.queue is None else len(self.queue)
        dtype = accumulator_dtype(self.positive.dtype)
        here = torch.full((), rows, dtype=dtype, device=self.positive.device)
        return sum_over_ranks(here, group) + (own + queue)

    def mean_product(self, query: Tensor, group: object) -> Tensor:
        """The mean of <query_i, c> over the candidates c of query i, (b,).

        A query's product with the candidates' sum, which takes O(b·d) and no sweep.
        """
        dtype = accumulator_dtype(query.dtype)
        total = self.positive.sum(0, dtype=dtype)
        if self.shared is not None:
            total = total + self.shared.sum(0, dtype=dtype)
        total = sum_over_ranks(total, group)
        if self.queue is not None:
            total = total + self.queue.sum(0, dtype=dtype)
        products = own_products(query, total.expand(len(query), 1, -1))[:, 0]
        if self.own is not None:
            products = products + own_products(query, self.own).sum(1)
        return products / self.number(group)
