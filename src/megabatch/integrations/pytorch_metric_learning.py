"""pytorch-metric-learning's softmax losses, with its names and arguments, without a matrix.

    from megabatch.integrations.pytorch_metric_learning import SupConLoss, NTXentLoss

Each class is a subclass of the library's own, which keeps its reducers, regularizers and wrappers;
only `compute_loss` is replaced, for pairs that labels give. For listed pairs, such as a miner's,
the library's own runs. docs/integrations/pytorch_metric_learning.md lists all differences.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from pytorch_metric_learning import distances, losses, reducers
from torch import Tensor

from megabatch.losses.arguments import check_temperature
from megabatch.losses.base import unit_rows
from megabatch.losses.labels import SincereLoss
from megabatch.losses.terms import cross_entropy
from megabatch.similarity import split_logsumexp
from megabatch.similarity.arguments import check_scalar, product_dtype

try:
    from pytorch_metric_learning.utils import loss_and_miner_utils as _  # noqa: F401
except ImportError as error:
    raise ImportError(
        "pytorch-metric-learning: expected a release from 2.5 on, below 3, whose losses have "
        "another interface: pip install 'pytorch-metric-learning>=2.5,<3'"
    ) from error

__all__ = ["NTXentLoss", "SupConLoss"]

Losses: TypeAlias = dict[str, dict[str, Any]]


class SupConLoss(losses.SupConLoss):
    """Supervised contrastive loss; see `pytorch_metric_learning.losses.SupConLoss`.

    Args:
        temperature: a positive number, or a tensor of shape () or (1,) that may be learnt.
        **kwargs: distance, reducer, embedding_regularizer, embedding_reg_weight, collect_stats.

    Raises:
        TypeError, ValueError: for a temperature that is not positive, or a distance other than
            CosineSimilarity and DotProductSimilarity; when called, for wrong inputs, naming the
            argument.
    """

    def __init__(self, temperature: float = 0.1, **kwargs: Any) -> None:
        super().__init__(check_temperature(temperature), **kwargs)
        _check_distance(self.distance)

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Losses:
        """Each anchor's loss, for the reducer."""
        inputs: tuple[Any, ...] = embeddings, labels, indices_tuple, ref_emb, ref_labels
        if not _pairs_by_labels(*inputs):
            own: Losses = super().compute_loss(*inputs)
            return own
        x, ids, y, ref_ids = _operands(self.distance, *inputs)
        scale = check_scalar("temperature", self.temperature, x).reciprocal()
        both = ids if ref_ids is None else (ids, ref_ids)
        rows, _ = split_logsumexp(x, y, scale, ids=both, sides="rows", group="local")
        if not ((rows.positive_count > 0).any() and (rows.negative > -torch.inf).any()):
            return self.zero_losses()
        indices = torch.arange(len(x), device=x.device)
        return _result(cross_entropy(rows), indices, "element")


class NTXentLoss(losses.NTXentLoss):
    """Each positive pair against the anchor's negatives alone, averaged over positive pairs.

    `megabatch.SincereLoss(average="pairs")` under the name and with the arguments of
    `pytorch_metric_learning.losses.NTXentLoss`.

    Args:
        temperature, kwargs: as for `SupConLoss`, with the same errors.
    """

    def __init__(self, temperature: float = 0.07, **kwargs: Any) -> None:
        super().__init__(check_temperature(temperature), **kwargs)
        _check_distance(self.distance)

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Losses:
        """The mean over pairs; for another reducer, the library's own losses of all pairs."""
        inputs: tuple[Any, ...] = embeddings, labels, indices_tuple, ref_emb, ref_labels
        if not (_pairs_by_labels(*inputs) and _is_plain_mean(self.reducer)):
            own: Losses = super().compute_loss(*inputs)
            return own
        x, ids, y, ref_ids = _operands(self.distance, *inputs)
        loss = SincereLoss(1.0, average="pairs", normalize=False, group="local")
        return _result(loss(x, ids, y, ref_ids, temperature=self.temperature))


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


def _pairs_by_labels(
    embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
) -> bool:
    """Whether labels alone decide on all pairs.

    If `ref_labels` is the same object as `labels`, the library leaves out the pairs (i, i), with
    other references too, where they are not those of a row and itself.
    """
    own = ref_emb is embeddings or ref_labels is not labels
    return labels is not None and indices_tuple is None and own


def _operands(
    distance: Any, embeddings: Tensor, labels: Tensor, _: None, ref_emb: Tensor, ref_labels: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Anchors and their ids, references and theirs; None: the anchors, but no row and itself."""
    _check_distance(distance)  # an attribute, which may have changed
    x = _features(distance, embeddings)
    y = x if ref_emb is embeddings else _features(distance, ref_emb)
    distance.reset_stats()
    distance.set_default_stats(embeddings, ref_emb, x, y)
    # No id is negative: that would equal no other.
    _, ids = torch.cat([labels, ref_labels]).unique(return_inverse=True)
    if ref_labels is labels:
        return x, ids[: len(x)], None, None
    return x, ids[: len(x)], y, ids[len(x) :]


def _features(distance: Any, embeddings: Tensor) -> Tensor:
    dtype = product_dtype(embeddings)
    return unit_rows(embeddings, dtype) if distance.normalize_embeddings else embeddings.to(dtype)


def _is_plain_mean(reducer: Any) -> bool:
    """Whether only the mean of the loss is asked for; regularizers may have other reducers."""
    if isinstance(reducer, reducers.MultipleReducers):
        reducer = dict(reducer.reducers.items()).get("loss", reducer.default_reducer)
    return type(reducer) is reducers.MeanReducer and not reducer.collect_stats


def _result(values: Tensor, indices: Any = None, kind: str = "already_reduced") -> Losses:
    return {"loss": {"losses": values, "indices": indices, "reduction_type": kind}}
