"""The loss that a configuration names, called in one way whichever it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

import megabatch.losses
from megabatch.hints import is_reference
from megabatch.losses import own
from megabatch.losses.registry import TRAINABLE


class LossSettings(Protocol):
    """The part of a configuration that concerns the loss; each loss adds its own settings."""

    @property
    def loss(self) -> str:
        """A key of `registry.TRAINABLE`, or a reference `module:Class`."""

    @property
    def duplicates(self) -> str:
        """A key of the loss's `duplicates`."""

    @property
    def hard_negatives(self) -> int:
        """Negatives that come with each pair."""

    @property
    def matryoshka_dims(self) -> tuple[int, ...]:
        """Widths of the prefixes; none: the features as a whole."""


class Objective(nn.Module):
    """Calls a loss with the outputs of `Towers.module`, and ids.

    Args:
        loss: called as `loss(image_features, text_features, **others)`.
        scale_as, takes_bias: see `registry.LossEntry`; scale_as "": the loss takes no scale.
        takes_ids: whether ids reach the loss; else `ids` must be None.
        takes_negatives: likewise for features of negatives.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        *,
        scale_as: str,
        takes_bias: bool,
        takes_ids: bool,
        takes_negatives: bool = False,
    ) -> None:
        super().__init__()
        self.loss = loss
        self.takes_negatives = takes_negatives
        self.scale_as, self.takes_bias, self.takes_ids = scale_as, takes_bias, takes_ids

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        negative_features: Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch, shape ().

        Args:
            image_features, text_features: (b, d), normalised.
            logit_scale, logit_bias: shape () or (1,).
            ids: (b,) int64, equal for equal captions; on any device.
            negative_features: (b, k, d), normalised, of each pair's hard negatives.

        Raises:
            ValueError: ids or negatives where the loss takes none, or none where it needs them.
        """
        if (negative_features is not None) != self.takes_negatives:
            expected = "those of each pair" if self.takes_negatives else "None"
            came = "None" if negative_features is None else "features"
            raise ValueError(f"negative_features: expected {expected}, got {came}")
        if (ids is not None) != self.takes_ids:
            expected = "the batch's" if self.takes_ids else "None"
            raise ValueError(f"ids: expected {expected}, got {'None' if ids is None else 'ids'}")
        reciprocal = self.scale_as == "temperature"
        others: dict[str, Any] = {}
        if self.scale_as:
            others[self.scale_as] = logit_scale.reciprocal() if reciprocal else logit_scale
        if self.takes_bias:
            others["logit_bias"] = logit_bias
        if ids is not None:
            others["ids"] = ids.to(image_features.device, non_blocking=True)
        if negative_features is not None:
            others["negatives"] = negative_features
        return self.loss(image_features, text_features, **others)


def create_objective(config: LossSettings, *, group: Any = None) -> Objective:
    """The loss of `config.loss` with its settings.

    Args:
        config: has no problem (`megabatch.config.problems`).
        group: processes that share one batch: None, "local", a process group or a DeviceMesh.

    Raises:
        UsageError: `config.loss` is a reference to no loss; see `own.create`.
    """
    if is_reference(config.loss):
        return _create_own(config, group)
    entry = TRAINABLE[config.loss]
    settings = {argument: getattr(config, name) for name, argument in entry.settings.items()}
    negatives = (entry.negatives or {}) if config.hard_negatives else {}
    arguments = {**entry.arguments, **entry.duplicates[config.duplicates], **settings, **negatives}
    loss = getattr(megabatch.losses, entry.name)(**arguments, group=group)
    return Objective(
        _with_prefixes(loss, config),
        scale_as=entry.scale_as,
        takes_bias=entry.takes_bias,
        takes_ids=config.duplicates != "negatives",
        takes_negatives=config.hard_negatives > 0,
    )


def _create_own(config: LossSettings, group: Any) -> Objective:
    negatives = config.hard_negatives > 0
    loss, takes = own.create(config.loss, group=group, negatives=negatives)
    scales = [name for name in ("logit_scale", "temperature") if name in takes]
    return Objective(
        _with_prefixes(loss, config),
        scale_as=scales[0] if scales else "",
        takes_bias="logit_bias" in takes,
        takes_ids="ids" in takes,
        takes_negatives=negatives,
    )


def _with_prefixes(loss: Any, config: LossSettings) -> Any:
    if not config.matryoshka_dims:
        return loss
    return megabatch.losses.MatryoshkaLoss(loss, config.matryoshka_dims)
