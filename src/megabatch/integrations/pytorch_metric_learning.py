"""pytorch-metric-learning's softmax losses, with its names and arguments, without a matrix.

    from megabatch.integrations.pytorch_metric_learning import SupConLoss, NTXentLoss

Each class is a subclass of the library's own, which keeps its reducers, regularizers and wrappers;
only `compute_loss` is replaced. docs/integrations/pytorch_metric_learning.md lists all differences.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from pytorch_metric_learning import distances, losses, reducers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megabatch.losses.arguments import check_temperature
from megabatch.losses.base import unit_rows
from megabatch.losses.labels import SincereLoss
from megabatch.losses.terms import cross_entropy, minus_log_probability
from megabatch.similarity import (
    Split,
    global_mean,
    paired,
    replicated,
    split_logsumexp,
    sum_over_ranks,
)
from megabatch.similarity.arguments import (
    accumulator_dtype,
    check_integers,
    check_scalar,
    check_two,
    product_dtype,
)
from megabatch.similarity.distributed.comm import group_name

try:
    from pytorch_metric_learning.utils import common_functions as c_f
    from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
    from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
except ImportError as error:
    raise ImportError(
        "pytorch-metric-learning: expected a release from 2.5 on, below 3, whose losses have "
        "another interface: pip install 'pytorch-metric-learning>=2.5,<3'"
    ) from error

__all__ = ["NTXentLoss", "SupConLoss"]

#: Number of logits computed at a time for listed pairs.
LISTED = 1 << 22

#: Labels from here on, or below its negative, are refused.
LARGEST = 1 << 62


class SupConLoss(losses.SupConLoss):
    """Supervised contrastive loss; see `pytorch_metric_learning.losses.SupConLoss`.

    Args:
        temperature: a positive number, or a tensor of shape () or (1,) that may be learnt.
        group: processes that share one batch: "local", None for the default group, or a process
            group. This replaces `DistributedLossWrapper`, inside which it must be "local".
        **kwargs: distance, reducer, embedding_regularizer, embedding_reg_weight, collect_stats.

    Raises:
        TypeError, ValueError: for a temperature that is not positive, or a distance other than
            CosineSimilarity and DotProductSimilarity; when called, for wrong inputs, naming the
            argument.
    """

    def __init__(self, temperature: float = 0.1, *, group: object = "local", **kwargs: Any) -> None:
        super().__init__(check_temperature(temperature), **kwargs)
        _check_distance(self.distance)
        self.group = group

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> dict[str, dict[str, Any]]:
        """Each anchor's loss, for the reducer; in a group the mean over all processes' anchors."""
        x, y, ids = _operands(self, embeddings, labels, indices_tuple, ref_emb, ref_labels)
        scale = _scale(self, x)
        if ids is not None:
            rows, _ = split_logsumexp(x, y, scale, ids=ids, sides="rows", group=self.group)
        else:
            pairs = lmu.convert_to_pairs(indices_tuple, labels, ref_labels)
            rows = _listed_pairs(x, x if y is None else y, scale, pairs, repeats=False).rows
        values = cross_entropy(rows)
        anchors = torch.stack([rows.positive_count > 0, rows.negative > -torch.inf]).sum(1)
        if not sum_over_ranks(anchors, self.group).all():  # no positive or no negative pair
            return self.zero_losses()
        if not group_name(self.group):
            return _result(values, torch.arange(len(values), device=values.device), "element")
        if type(_reducer(self)) is reducers.AvgNonZeroReducer:
            weights = (values.detach() > 0).to(values.dtype)
            return _result(global_mean(values, self.group, weights, name="embeddings"))
        _check_reducer(self, reducers.MeanReducer, "AvgNonZeroReducer or MeanReducer")
        return _result(global_mean(values, self.group, name="embeddings"))


class NTXentLoss(losses.NTXentLoss):
    """Each positive pair against the anchor's negatives alone, averaged over positive pairs.

    `megabatch.SincereLoss(average="pairs")` under the name and with the arguments of
    `pytorch_metric_learning.losses.NTXentLoss`.

    Args:
        temperature, group, kwargs: as for `SupConLoss`, with the same errors.
    """

    def __init__(
        self, temperature: float = 0.07, *, group: object = "local", **kwargs: Any
    ) -> None:
        super().__init__(check_temperature(temperature), **kwargs)
        _check_distance(self.distance)
        self.group = group

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> dict[str, dict[str, Any]]:
        """The mean over pairs; or each pair's loss for other reducers and for given pairs."""
        x, y, ids = _operands(self, embeddings, labels, indices_tuple, ref_emb, ref_labels)
        if group_name(self.group):
            _check_reducer(self, reducers.MeanReducer, "MeanReducer")
        reducer = _reducer(self)
        if ids is not None and type(reducer) is reducers.MeanReducer and not reducer.collect_stats:
            loss = SincereLoss(1.0, average="pairs", normalize=False, group=self.group)
            own, others = (ids, None) if isinstance(ids, Tensor) else ids
            return _result(loss(x, own, y, others, temperature=self.temperature))
        scale = _scale(self, x)
        if ids is not None:
            rows, _ = split_logsumexp(x, y, scale, ids=ids, sides="rows", group="local")
            anchors, positives = _positive_pairs(ids)
            logits = paired(x[anchors], (x if y is None else y)[positives], scale)
        else:
            pairs = lmu.convert_to_pairs(indices_tuple, labels, ref_labels)
            listed = _listed_pairs(x, x if y is None else y, scale, pairs, repeats=True)
            rows, anchors, positives, logits = listed
        if not (len(anchors) and (rows.negative > -torch.inf).any()):
            return self.zero_losses()
        values = minus_log_probability(logits, rows.negative[anchors])
        return _result(values, (anchors, positives), "pos_pair")


# --- arguments ------------------------------------------------------------------------------------


def _check_distance(distance: Any) -> None:
    """Refuse distances that are not plain products, which need their matrix."""
    known = type(distance) in (distances.CosineSimilarity, distances.DotProductSimilarity)
    if known and distance.power == 1 and (distance.p == 2 or not distance.normalize_embeddings):
        return
    came = f"{type(distance).__name__}(p={distance.p}, power={distance.power})"
    raise ValueError(
        "distance: expected CosineSimilarity or DotProductSimilarity with p=2 and power=1, got "
        f"{came}. Other distances are not products of features; use "
        "pytorch_metric_learning.losses."
    )


def _reducer(loss: Any) -> Any:
    """The reducer of the loss itself, not those of regularizers."""
    reducer = loss.reducer
    if isinstance(reducer, reducers.MultipleReducers):
        return dict(reducer.reducers.items()).get("loss", reducer.default_reducer)
    return reducer


def _check_reducer(loss: Any, kind: type, expected: str) -> None:
    reducer = _reducer(loss)
    if type(reducer) is not kind:
        raise ValueError(
            f"reducer: expected {expected} in a group of processes, got {type(reducer).__name__}, "
            'which knows the losses of one process only. Use group="local", or reduce afterwards.'
        )


def _operands(
    loss: Any,
    embeddings: Tensor,
    labels: Tensor | None,
    indices_tuple: tuple[Tensor, ...] | None,
    ref_emb: Tensor,
    ref_labels: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | tuple[Tensor, Tensor] | None]:
    """Anchors x, references y (None: x, without the pairs of a row and itself) and their ids.

    The ids are None if pairs are listed instead.
    """
    c_f.labels_or_indices_tuple_required(labels, indices_tuple)
    check_two(embeddings, ref_emb, ("embeddings", "ref_emb"))
    _check_distance(loss.distance)
    x = _features(loss.distance, embeddings)
    y = x if ref_emb is embeddings else _features(loss.distance, ref_emb)
    loss.distance.reset_stats()
    loss.distance.set_default_stats(embeddings, ref_emb, x, y)
    if group_name(loss.group) and _is_called_by(DistributedLossWrapper.forward):
        raise ValueError(
            'group: expected "local" inside DistributedLossWrapper, which gathers the embeddings '
            "of all processes itself, so that each would count once for every process; use the "
            "loss without the wrapper"
        )
    if indices_tuple is not None:
        if group_name(loss.group):
            raise ValueError(
                "indices_tuple: expected None in a group of processes, got pairs, which a miner or "
                'CrossBatchMemory found on one process. Use group="local".'
            )
        return x, y, None
    if ref_labels is labels:
        if ref_emb is not embeddings:
            raise ValueError(
                "ref_labels: got the tensor of labels itself, for which pytorch-metric-learning "
                "leaves out the pairs (i, i). Give labels.clone() to keep them as positives."
            )
        return x, None, _ids("labels", labels, x)
    return x, y, (_ids("labels", labels, x), _ids("ref_labels", ref_labels, y))


def _is_called_by(function: Any) -> bool:
    """Whether this call comes from inside a function; in compiled code nobody knows."""
    frame = None if torch.compiler.is_compiling() else inspect.currentframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def _features(distance: Any, embeddings: Tensor) -> Tensor:
    dtype = product_dtype(embeddings)
    return unit_rows(embeddings, dtype) if distance.normalize_embeddings else embeddings.to(dtype)


def _ids(name: str, labels: Any, like: Tensor) -> Tensor:
    """Non-negative ids, equal where labels are; negative ids would equal no other."""
    labels = check_integers(name, labels, len(like), like)
    if ((labels >= LARGEST) | (labels < -LARGEST)).any():
        raise ValueError(f"{name}: expected integers from -2**62 to 2**62 - 1, got larger ones")
    return torch.where(labels >= 0, 2 * labels, -2 * labels - 1)


def _scale(loss: Any, like: Tensor) -> Tensor:
    temperature = check_scalar("temperature", loss.temperature, like)
    return replicated(temperature, loss.group).reciprocal()


def _result(
    values: Tensor, indices: Any = None, reduction_type: str = "already_reduced"
) -> dict[str, dict[str, Any]]:
    return {"loss": {"losses": values, "indices": indices, "reduction_type": reduction_type}}


# --- pairs one by one -----------------------------------------------------------------------------


def _positive_pairs(ids: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Row and column of each pair of equal ids; for one vector of ids without the pairs (i, i)."""
    rows, columns = (ids, ids) if isinstance(ids, Tensor) else ids
    known, order = columns.sort(stable=True)
    first = torch.searchsorted(known, rows)
    count = torch.searchsorted(known, rows, right=True) - first
    anchors = torch.arange(len(rows), device=rows.device).repeat_interleave(count)
    within = torch.arange(len(anchors), device=rows.device) - (count.cumsum(0) - count)[anchors]
    positives = order[first[anchors] + within]
    if isinstance(ids, Tensor):
        others = anchors != positives
        anchors, positives = anchors[others], positives[others]
    return anchors, positives


class Listed(NamedTuple):
    """The rows' sums over listed pairs, and the positive pairs in the order of their rows."""

    rows: Split
    anchors: Tensor
    positives: Tensor
    logits: Tensor  #: of the positive pairs


def _listed_pairs(
    x: Tensor, y: Tensor, scale: Tensor, pairs: tuple[Tensor, ...], *, repeats: bool
) -> Listed:
    """Compute `Listed` for a miner's pairs; logits are formed for one strip of rows at a time.

    Args:
        pairs: anchors and positives, anchors and negatives. repeats: whether a negative pair that
            is listed twice counts twice; if not, neither does a positive one in `rows`, and a pair
            must not be in both lists.
    """
    anchors, positives, others, negatives = pairs
    (anchors, order), (others, order_of_others) = (t.sort(stable=True) for t in (anchors, others))
    positives, negatives = positives[order], negatives[order_of_others]
    height = max(1, LISTED // max(1, len(y)))
    starts = torch.arange(0, len(x) + height, height, device=x.device)
    bounds = torch.stack([torch.searchsorted(t, starts) for t in (anchors, others)], 1).tolist()
    strips = []
    for k, strip in enumerate(x.split(height)):
        (a, b), (c, d) = zip(bounds[k], bounds[k + 1], strict=True)
        hits = anchors[a:b] - k * height, positives[a:b]
        misses = others[c:d] - k * height, negatives[c:d]
        part = checkpoint(
            *(_strip, strip, y, scale, *hits, *misses, repeats),
            use_reentrant=False,
            preserve_rng_state=False,
        )
        strips.append(part)
    *rows, logits = (torch.cat(parts) for parts in zip(*strips, strict=True))
    return Listed(Split(*rows), anchors, positives, logits)


def _strip(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    anchors: Tensor,
    positives: Tensor,
    others: Tensor,
    negatives: Tensor,
    repeats: bool,
) -> tuple[Tensor, ...]:
    """The parts of `Split` for some rows, and the logits of their positive pairs."""
    dtype = accumulator_dtype(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        logits = (x.to(dtype) @ y.to(dtype).T) * scale
    hits, misses = _counts(logits, anchors, positives), _counts(logits, others, negatives)
    if not repeats:
        hits, misses = hits.clamp(max=1), misses.clamp(max=1)
        both = int((hits * misses).sum())
        if both:
            raise ValueError(
                f"indices_tuple: expected a pair to be positive or negative, got {both} as both"
            )
    sums = (hits * logits).sum(1)
    parts = _logsumexp(logits, misses), _logsumexp(logits, hits), sums, hits.sum(1)
    return *parts, logits[anchors, positives]


def _counts(logits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """How often each pair is listed."""
    ones = logits.new_ones(len(rows))
    return torch.zeros_like(logits).index_put_((rows, columns), ones, accumulate=True)


def _logsumexp(logits: Tensor, counts: Tensor) -> Tensor:
    """Each row's log-sum-exp with multiplicities; -inf with zero gradients where all are 0."""
    some = counts.any(1)
    weighted = (logits + counts.log()).masked_fill(~some[:, None], 0.0)
    return weighted.logsumexp(1).masked_fill(~some, -torch.inf)
