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
from megabatch.similarity import Split, logsumexp, pair_ids, split_logsumexp, sum_over_ranks
from megabatch.similarity.arguments import accumulator_dtype, check_dense, check_guide
from megabatch.similarity.pointwise import row_products
from megabatch.torch_internals import transforms_active

#: Elements of hard negatives that are converted at a time.
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

    def over_all(self, x: Rows, y: Rows, group: object) -> Tensor:
        """Log-sum-exp of each row of x over all rows of y, (m,)."""
        if self.ceiling is not None:
            return self.split(x, y, ids=(no_ids(x), no_ids(y)), group=group)[0].negative
        rows, _ = logsumexp(x.features, y.features, self.scale, sides="rows", group=group)
        return self._corrected(rows)

    def over_hard_of_others(self, x: Rows, hard: Rows) -> Tensor:
        """Log-sum-exp of each row i of x over the `hard` (m, k, d) of all other rows, (m,)."""
        m, k = hard.features.shape[:2]
        pairs = pair_ids(m, self.group, device=x.features.device)
        return self.split(x, hard.flat(), ids=(pairs, pairs.repeat_interleave(k)))[0].negative

    def over_hard(self, x: Rows, hard: Rows) -> Tensor:
        """Log-sum-exp of each row i of x over its `hard[i]` (k, d), (m,)."""
        logits = hard_products(x.features, hard.features) * self.scale
        if self.ceiling is not None:
            compared = logits
            if x.guide is not None and hard.guide is not None:
                compared = hard_products(x.guide, hard.guide)
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


def no_ids(rows: Rows) -> Tensor:
    """Ids for rows that are no other row's positive."""
    return torch.full((len(rows.features),), -1, device=rows.features.device)


def similarity_limit(query: Rows, positive: Rows, margin: float, strategy: str) -> Tensor:
    """(b,) similarities above which a negative counts as a false one.

    The similarity of query and positive, plus the margin; with strategy "relative" the margin is a
    share of its absolute value.
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


def hard_products(query: Tensor, hard: Tensor) -> Tensor:
    """<query_i, hard_ik> of (b, d) and (b, k, d), (b, k), in the accumulator's dtype."""
    if not torch.compiler.is_compiling() and transforms_active():
        return _products(query, hard)  # torch.func does not take checkpoints
    rows = max(1, CHUNK // max(1, hard[:1].numel()))
    chunks = [
        # Checkpointed, to keep the logits only and not the converted features.
        checkpoint(_products, q, n, use_reentrant=False, preserve_rng_state=False)
        for q, n in zip(query.split(rows), hard.split(rows), strict=True)
    ]
    return torch.cat(chunks)


def _products(query: Tensor, hard: Tensor) -> Tensor:
    dtype = accumulator_dtype(query.dtype)
    kind = query.device.type  # autocast does not know meta
    with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
        return torch.bmm(hard.to(dtype), query.to(dtype).unsqueeze(2)).squeeze(2)


def sum_of_candidates(
    in_batch: Tensor, hard: Tensor | None, queue: Tensor | None, group: object
) -> tuple[Tensor, Tensor]:
    """Sum (d,) of the candidates that all queries share, and number () of a query's candidates.

    Args:
        in_batch: (n, d), this process's part of all positives and shared negatives.
        hard: (b, k, d), not in the sum. queue: (q, d), the same on all processes.
    """
    dtype = accumulator_dtype(in_batch.dtype)
    here = torch.full((), len(in_batch), dtype=dtype, device=in_batch.device)
    total = sum_over_ranks(in_batch.sum(0, dtype=dtype), group)
    number = sum_over_ranks(here, group)
    if hard is not None:
        number = number + hard.shape[1]
    if queue is not None:
        total, number = total + queue.sum(0, dtype=dtype), number + len(queue)
    return total, number


def check_guides(
    features: Sequence[Tensor | None], guides: Sequence[Any], margin: float | None
) -> None:
    """Check a guide's features of query, positives, negatives and queue, given for all or none."""
    if all(guide is None for guide in guides):
        return
    if margin is None:
        raise ValueError("margin: expected a number with the features of a guide, got None")
    query, names = features[0], ("query", "positive", "negatives", "queue")
    assert query is not None
    for name, like, guide in zip(names, features, guides, strict=True):
        guide_name = f"guide_{name}"
        if (guide is None) != (like is None):
            expected = f"None without {name}" if like is None else "the guide's features too"
            came = "None" if guide is None else "a guide's features"
            raise ValueError(f"{guide_name}: expected {expected}, got {came}")
        if like is None:
            continue
        is_tensor = isinstance(guide, Tensor)
        if not is_tensor or guide.shape[:-1] != like.shape[:-1]:
            shape = f"({', '.join(map(str, like.shape[:-1]))}, d')"
            came = str(tuple(guide.shape)) if is_tensor else type(guide).__name__
            error = ValueError if is_tensor else TypeError
            raise error(f"{guide_name}: expected a tensor of shape {shape}, got {came}")
        check_dense(guide_name, guide)
        both, called = (guides[0], guide.flatten(0, -2)), ("guide_query", guide_name)
        check_guide(both, query, like.flatten(0, -2), called, ("query", name))
