"""The loss that a configuration names, called alike whichever it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megabatch.data import Batch
from megabatch.losses import (
    ClipLoss,
    DCLLoss,
    InfoNCELoss,
    MatryoshkaLoss,
    NTXentLoss,
    SigLipLoss,
)
from megabatch.training.config import TrainConfig


class Objective(nn.Module):
    """Calls a loss with what the models of this library give: `Towers.module`'s outputs, and ids.

    loss: called as `loss(image_features, text_features, scale, bias, ids)`.
    takes_ids: whether ids reach the loss; else `ids` must be None.
    """

    def __init__(self, loss: Callable[..., Tensor], *, takes_ids: bool) -> None:
        super().__init__()
        self.loss = loss
        self.takes_ids = takes_ids

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        *,
        ids: Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch.

        Args:
            image_features, text_features: (b, d), normalised.
            logit_scale, logit_bias: shape () or (1,).
            ids: (b,) int64, equal for equal captions; on any device.

        Raises:
            ValueError: ids where the loss takes none, or none where it needs them.
        """
        if (ids is not None) != self.takes_ids:
            expected = "the batch's" if self.takes_ids else "None"
            raise ValueError(f"ids: expected {expected}, got {'None' if ids is None else 'ids'}")
        if ids is not None:
            ids = ids.to(image_features.device, non_blocking=True)
        return self.loss(image_features, text_features, logit_scale, logit_bias, ids)


def create_objective(config: TrainConfig, *, group: Any = None) -> Objective:
    """The loss of `config.loss` with its options.

    Args:
        config: possible, as `choices.problems` says.
        group: processes that share one batch: None, "local" or a process group.
    """
    makers = {
        "clip": _clip,
        "siglip": _siglip,
        "infonce": _infonce,
        "ntxent": _ntxent,
        "dcl": _dcl,
    }
    loss = makers[config.loss](config, group)
    if config.matryoshka_dims:
        loss = MatryoshkaLoss(loss, config.matryoshka_dims)
    return Objective(loss, takes_ids=config.duplicates != "negatives")


def ids_of(batch: Batch) -> Tensor:
    """Ids of a batch's pairs, int64 (b,): its own, or where it has none a hash of each text.

    The hash is of the tokens, the same on every rank: texts that the model cannot tell apart are
    one. At 62 bits a million different texts share an id with probability 1e-7.
    """
    own: Tensor | None = getattr(batch, "ids", None)
    if own is not None:
        return own
    rows = batch.texts.cpu().numpy()
    digests = (hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
    return torch.tensor([int.from_bytes(d, "little") >> 2 for d in digests], dtype=torch.int64)


def uses_bias(config: TrainConfig) -> bool:
    """Whether the loss depends on a logit bias; in a softmax one common to all logits cancels."""
    return config.loss == "siglip"


# The functions that follow are called with positions only: features are what MatryoshkaLoss cuts.


def _clip(config: TrainConfig, group: Any) -> Callable[..., Tensor]:
    kind: Literal["positive", "ignored"]
    kind = "ignored" if config.duplicates == "ignored" else "positive"
    loss = ClipLoss(label_smoothing=config.label_smoothing, duplicates=kind, group=group)

    def call(x: Tensor, y: Tensor, scale: Tensor, bias: Any, ids: Any) -> Any:
        return loss(x, y, scale, ids=ids)

    return call


def _siglip(config: TrainConfig, group: Any) -> Callable[..., Tensor]:
    loss = SigLipLoss(group=group)

    def call(x: Tensor, y: Tensor, scale: Tensor, bias: Any, ids: Any) -> Any:
        return loss(x, y, scale, bias, ids=ids)

    return call


def _infonce(config: TrainConfig, group: Any) -> Callable[..., Tensor]:
    loss = InfoNCELoss(1.0, margin=config.infonce_margin, group=group)

    def call(x: Tensor, y: Tensor, scale: Tensor, bias: Any, ids: Any) -> Any:
        return loss(x, y, ids=ids, temperature=scale.reciprocal())

    return call


def _ntxent(config: TrainConfig, group: Any) -> Callable[..., Tensor]:
    return _of_views(NTXentLoss(1.0, group=group))


def _dcl(config: TrainConfig, group: Any) -> Callable[..., Tensor]:
    return _of_views(DCLLoss(1.0, group=group))


def _of_views(loss: nn.Module) -> Callable[..., Tensor]:
    def call(x: Tensor, y: Tensor, scale: Tensor, bias: Any, ids: Any) -> Any:
        return loss(x, y, temperature=scale.reciprocal())

    return call
