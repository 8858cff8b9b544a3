"""InfoNCE's candidates: log-sum-exps over negatives, their number and their mean logit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megabatch.losses.terms import scale_gradient
from megabatch.similarity import Split, logsumexp, split_logsumexp
from megabatch.similarity.arguments import accumulator_dtype, check_dense, check_guide
from megabatch.similarity.distributed.means import pair_ids, sum_over_ranks
from megabatch.similarity.pointwise import row_products
from megabatch.torch_internals import transforms_active

#: Elements of per-query negatives that are converted at a time.
CHUNK = 1 << 22


class Rows(NamedTuple):
    """Features, (m, d) or (b, k, d), and a guide model's of the same rows; None without a guide."""

    features: Tensor
    guide: Tensor | None

    def flat(self) -> Rows:
        """(b, k, d) as (b * k, d)."""
        guide = None if self.guide is None else self.guide.flatten(0, 1)
        return Rows(self.features.flatten(0, 1), guide)

    def followed_by(self, others: Rows) -> Rows:
        """These rows, followed by the others."""
        guide = None
        if self.guide is not None and others.guide is not None:
            guide = torch.cat([self.guide, others.guide])
        return Rows(torch.cat([self.features, others.features]), guide)


class Logits:
    """Similarities times a scale, and their log-sum-exps.

    With a `strength` a > 0 the exponential of each negative is multiplied by e^(a c), where c is
    its similarity without gradient. The logit is (scale + a) c in the forward pass, and its
    derivative with respect to c is `scale`. So the log-sum-exp is computed at scale + a, which
    makes the features' gradients too large by (scale + a) / scale. The upstream gradients are
    corrected for that: one number a row, in the accumulator's dtype, and no further rounding.

    Args:
        scale: (). limit: (rows,) similarities; negatives above their row's are left out. None: all
            are kept. group: as in `split_logsumexp`. strength: a. guided: the limit is about the
            guide's similarities.
    """

    def __init__(
        self,
        scale: Tensor,
        limit: Tensor | None,
        group: object,
        strength: float = 0.0,
        *,
        guided: bool = False,
    ) -> None:
        self.group, self.factor = group, None
        if strength:
            self.factor = (scale / (scale + strength)).detach()
            # The scale's own gradient needs no correction: undo the factor there.
            scale = scale_gradient(scale + strength, self.factor.reciprocal())
        self.scale = scale
        self.ceiling = limit if limit is None or guided else limit * scale.detach()

    def split(self, x: Rows, y: Rows | None, **options: Any) -> tuple[Split, Split | None]:
        """`split_logsumexp` with weighted negatives, whose `positive` must not be used then."""
        common: dict[str, Any] = {"sides": "rows", "ceiling": self.ceiling, "group": self.group}
        if x.guide is not None:
            common["guide"] = x.guide if y is None else (x.guide, y.guide)
        columns_of = None if y is None else y.features
        rows, columns = split_logsumexp(x.features, columns_of, self.scale, **(common | options))
        return self._weighted(rows), None if columns is None else self._weighted(columns)

    def all(self, x: Rows, y: Rows, group: object) -> Tensor:
        """Log-sum-exp of each row of x over all rows of y, (m,)."""
        if self.ceiling is not None:
            return self.split(x, y, ids=(no_ids(x), no_ids(y)), group=group)[0].negative
        found = logsumexp(x.features, y.features, self.scale, sides="rows", group=group)
        return self._corrected(found[0])

    def others(self, x: Rows, own: Rows) -> Tensor:
        """Log-sum-exp of each row i of x over the `own` (m, k, d) of all other rows, (m,)."""
        m, k = own.features.shape[:2]
        pairs = pair_ids(m, self.group, device=x.features.device)
        return self.split(x, own.flat(), ids=(pairs, pairs.repeat_interleave(k)))[0].negative

    def own(self, x: Rows, own: Rows) -> Tensor:
        """Log-sum-exp of each row i of x over its `own[i]` (k, d), (m,)."""
        logits = own_products(x.features, own.features) * self.scale
        if self.ceiling is not None:
            compared = logits
            if x.guide is not None and own.guide is not None:
                compared = own_products(x.guide, own.guide)
            logits = logits.masked_fill(compared > self.ceiling[:, None], -torch.inf)
        return self._corrected(logits.logsumexp(1))

    def _weighted(self, side: Split) -> Split:
        if self.factor is None:
            return side
        # The factor turns a logit at scale + a, and its gradient, into those at `scale`.
        positive_sum = side.positive_sum * self.factor
        return side._replace(negative=self._corrected(side.negative), positive_sum=positive_sum)

    def _corrected(self, lse: Tensor) -> Tensor:
        return lse if self.factor is None else scale_gradient(lse, self.factor)


def similarity_limit(query: Rows, positive: Rows, margin: float, strategy: str) -> Tensor:
    """(b,) similarities above which a negative counts as a false one.

    That of query and positive, plus the margin, or with strategy "relative" that share of its
    absolute value.
    """
    # Not a property of `Rows`: torch 2.9 cannot compile those of named tuples.
    x, y = (
        rows.features.detach() if rows.guide is None else rows.guide for rows in (query, positive)
    )
    similarity = row_products(x, y)
    share = similarity.abs() if strategy == "relative" else 1
    # A sum of d products is rounded in a different order here than in a tile.
    rounding = torch.finfo(similarity.dtype).eps * math.sqrt(x.shape[1])
    tie = rounding * row_products(x, x).sqrt() * row_products(y, y).sqrt()
    return similarity + margin * share + tie


def no_ids(rows: Rows) -> Tensor:
    """Ids for rows that are no other row's positive."""
    return torch.full((len(rows.features),), -1, device=rows.features.device)


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


def check_guides(
    features: Sequence[Tensor | None], guides: Sequence[Any], margin: float | None
) -> None:
    """A guide's features of the query, positives, negatives and queue: of all that are, or none."""
    if all(guide is None for guide in guides):
        return
    if margin is None:
        raise ValueError("margin: expected a number with the features of a guide, got None")
    query, names = features[0], ("query", "positive", "negatives", "queue")
    assert query is not None
    for name, like, guide in zip(names, features, guides, strict=True):
        if (guide is None) != (like is None):
            expected = f"None without {name}" if like is None else "the guide's features too"
            came = "None" if guide is None else "a guide's features"
            raise ValueError(f"guide_{name}: expected {expected}, got {came}")
        if like is None:
            continue
        shape = f"({', '.join(map(str, like.shape[:-1]))}, d')"
        if not isinstance(guide, Tensor):
            came = type(guide).__name__
            raise TypeError(f"guide_{name}: expected a tensor of shape {shape}, got {came}")
        if guide.shape[:-1] != like.shape[:-1]:
            came = str(tuple(guide.shape))
            raise ValueError(f"guide_{name}: expected shape {shape}, got {came}")
        check_dense(f"guide_{name}", guide)
        both, called = (guides[0], guide.flatten(0, -2)), ("guide_query", f"guide_{name}")
        check_guide(both, query, like.flatten(0, -2), called, ("query", name))


class Candidates(NamedTuple):
    """The candidates of the queries' softmax. Queries share them all, except `own`."""

    positive: Tensor  #: (b, d)
    shared: Tensor | None  #: (k, d)
    own: Tensor | None  #: (b, k, d)
    queue: Tensor | None  #: (q, d), the same on all processes

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
