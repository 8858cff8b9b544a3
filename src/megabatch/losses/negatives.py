"""InfoNCE's candidates: log-sum-exps over negatives, their number and their mean logit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megabatch.losses.terms import scale_gradient
from megabatch.similarity import (
    Split,
    logsumexp,
    pair_ids,
    split_logsumexp,
    sum_over_ranks,
)
from megabatch.similarity.arguments import (
    accumulator_dtype,
    check_dense,
    check_guide,
    check_vector,
    extremes,
)
from megabatch.similarity.pointwise import row_products
from megabatch.torch_internals import transforms_active

#: Elements of hard negatives that are converted at a time.
CHUNK = 1 << 22


class Rows(NamedTuple):
    """Features, (m, d) or (b, k, d), and a guide model's of the same rows; None without a guide.

    In late interaction (m, l, d) or (b, k, l, d), with factors of the queries' scores (m,) and the
    documents' numbers of tokens, (m,) or (b, k): see `logsumexp`. `log_q`, (m,) or (b, k): what is
    subtracted from the candidates' logits; None: nothing.
    """

    features: Tensor
    guide: Tensor | None
    weight: Tensor | None = None
    lengths: Tensor | None = None
    log_q: Tensor | None = None

    def flat(self) -> Rows:
        """(b, k, ...) as (b * k, ...)."""
        guide, lengths, log_q = (
            None if t is None else t.flatten(0, 1) for t in (self.guide, self.lengths, self.log_q)
        )
        return Rows(self.features.flatten(0, 1), guide, None, lengths, log_q)

    def followed_by(self, others: Rows) -> Rows:
        """These rows, followed by the others."""
        theirs = others.guide, others.lengths, others.log_q
        guide, lengths, log_q = (
            None if a is None or b is None else torch.cat([a, b])
            for a, b in zip((self.guide, self.lengths, self.log_q), theirs, strict=True)
        )
        return Rows(torch.cat([self.features, others.features]), guide, None, lengths, log_q)

    def of_columns(self, rows: Rows) -> dict[str, Any]:
        """Options of the reductions with these as columns of `rows`."""
        bias = None if self.log_q is None else -self.log_q
        return {"row_weight": rows.weight, "col_lengths": self.lengths, "col_bias": bias}


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
        if y is not None:
            common |= y.of_columns(x)
        columns_of = None if y is None else y.features
        rows, columns = split_logsumexp(x.features, columns_of, self.scale, **(common | options))
        return self._weighted(rows), None if columns is None else self._weighted(columns)

    def over_all(self, x: Rows, y: Rows, group: object) -> Tensor:
        """Log-sum-exp of each row of x over all rows of y, (m,)."""
        if self.ceiling is not None:
            return self.split(x, y, ids=(no_ids(x), no_ids(y)), group=group)[0].negative
        options = y.of_columns(x)
        rows, _ = logsumexp(
            x.features, y.features, self.scale, sides="rows", group=group, **options
        )
        return self._corrected(rows)

    def over_hard_of_others(self, x: Rows, hard: Rows) -> Tensor:
        """Log-sum-exp of each row i of x over the `hard` (m, k, d) of all other rows, (m,)."""
        m, k = hard.features.shape[:2]
        pairs = pair_ids(m, self.group, device=x.features.device)
        return self.split(x, hard.flat(), ids=(pairs, pairs.repeat_interleave(k)))[0].negative

    def over_hard(self, x: Rows, hard: Rows) -> Tensor:
        """Log-sum-exp of each row i of x over its `hard[i]` (k, d), (m,)."""
        logits = similarities(x, hard) * self.scale
        logits = logits if hard.log_q is None else logits - hard.log_q
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
    if x.dim() == 3:
        own = Rows(
            y[:, None], None, None, None if positive.lengths is None else positive.lengths[:, None]
        )
        similarity = similarities(query._replace(features=x), own)[:, 0]
        sizes = [torch.linalg.vector_norm(t, dim=2, dtype=similarity.dtype) for t in (x, y)]
        size = sizes[0].sum(1) * sizes[1].amax(1)
        size = size if query.weight is None else size * query.weight
    else:
        similarity = row_products(x, y)
        size = row_products(x, x).sqrt() * row_products(y, y).sqrt()
    share = similarity.abs() if strategy == "relative" else 1
    # A sum of d products is rounded in a different order here than in a tile.
    rounding = torch.finfo(similarity.dtype).eps * math.sqrt(x.shape[-1])
    return similarity + margin * share + rounding * size


def similarities(query: Rows, hard: Rows) -> Tensor:
    """The similarities of each row i of the queries with `hard[i]`, (b, k)."""
    x, y = query.features, hard.features
    if x.dim() == 2:
        return hard_products(x, y)
    numbers = y[:1].numel() + y.shape[1] * y.shape[2] * x.shape[1]
    scores = _in_chunks(_largest_products, numbers, x, y, hard.lengths)
    return scores if query.weight is None else scores * query.weight[:, None].to(scores.dtype)


def hard_products(query: Tensor, hard: Tensor) -> Tensor:
    """<query_i, hard_ik> of (b, d) and (b, k, d), (b, k), in the accumulator's dtype."""
    return _in_chunks(_products, hard[:1].numel(), query.unsqueeze(1), hard).squeeze(1)


def _in_chunks(function: Callable[..., Tensor], numbers: int, *tensors: Tensor | None) -> Tensor:
    """A function of rows, on some of them at a time; a row takes so many numbers."""
    if not torch.compiler.is_compiling() and transforms_active():
        return function(*tensors)  # torch.func does not take checkpoints
    rows = max(1, CHUNK // max(1, numbers))
    split = [None if t is None else t.split(rows) for t in tensors]
    count = max(len(parts) for parts in split if parts is not None)
    chunks = [
        # Checkpointed, to keep the results only and not the converted features.
        checkpoint(function, *each, use_reentrant=False, preserve_rng_state=False)
        for each in zip(
            *([None] * count if parts is None else parts for parts in split), strict=True
        )
    ]
    return torch.cat(chunks)


def _products(query: Tensor, hard: Tensor) -> Tensor:
    """<query_il, hard_ik>, (b, l, k), in the accumulator's dtype."""
    dtype = accumulator_dtype(query.dtype)
    kind = query.device.type  # autocast does not know meta
    with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
        return torch.bmm(query.to(dtype), hard.to(dtype).transpose(1, 2))


def _largest_products(query: Tensor, hard: Tensor, lengths: Tensor | None) -> Tensor:
    """Sums over tokens of (b, l, d) of the largest product with a token of (b, n, k, d), (b, n)."""
    products = _products(query, hard.flatten(1, 2)).unflatten(2, hard.shape[1:3])  # (b, l, n, k)
    if lengths is not None:
        padding = torch.arange(hard.shape[2], device=hard.device) >= lengths[..., None]
        products = products.masked_fill(padding[:, None], -torch.inf)
    return products.max(3).values.sum(1)


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
        _check_both(guide_name, guide, name, like, "a guide's features")
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


def check_log_q(
    positive: Tensor, negatives: Tensor | None, queue: Tensor | None, log_q: Sequence[Any]
) -> list[Tensor | None]:
    """Logarithms of sampling probabilities of the three, given for all that there are or for none.

    Returned in the accumulator's dtype. Whether they are finite is checked as in `extremes`.
    """
    if all(value is None for value in log_q):
        return list(log_q)
    checked: list[Tensor | None] = []
    candidates = (("positive", positive), ("negatives", negatives), ("queue", queue))
    for (name, like), value in zip(candidates, log_q, strict=True):
        own_name = "log_q" if name == "positive" else f"log_q_{name}"
        _check_both(own_name, value, name, like, "a tensor")
        if like is not None:
            value = check_vector(own_name, value, like.shape[:-1], like)
            values = extremes(value)
            if values is not None and not -math.inf < values[0] <= values[1] < math.inf:
                raise ValueError(
                    f"{own_name}: expected finite numbers, as candidates that are never sampled "
                    f"are in no batch, got {values[0]:.6g} to {values[1]:.6g}"
                )
        checked.append(value)
    return checked


def _check_both(name: str, value: Any, of: str, like: Tensor | None, what: str) -> None:
    """`value` must be given if and only if what it belongs to, `like`, is."""
    if (value is None) != (like is None):
        expected = f"None without {of}" if like is None else f"{what} for {of} too"
        raise ValueError(f"{name}: expected {expected}, got {'None' if value is None else what}")
