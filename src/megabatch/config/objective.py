"""The loss that a configuration names, the library's or the user's, called in one way."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn

import megabatch.losses
from megabatch.errors import UsageError
from megabatch.losses.registry import TRAINABLE
from megabatch.models import own_code
from megabatch.models.padding import counted
from megabatch.options import is_reference


class Objective(nn.Module):
    """Calls a loss with the outputs of `Towers.module`, and ids.

    Args:
        loss: called as `loss(image_features, text_features, **others)`.
        takes: the names of the others, among "logit_scale", "temperature" (its inverse),
            "logit_bias", "ids", "negatives" and, for features of tokens, "query_mask",
            "document_mask" and "negative_mask".
    """

    def __init__(self, loss: Callable[..., Tensor], takes: Collection[str]) -> None:
        super().__init__()
        self.loss, self.takes = loss, frozenset(takes)

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
        """The loss of normalised features (b, d), with scale and bias of shape () or (1,).

        Features of tokens are (b, length, d), zeros where none counts.

        Args:
            ids: (b,) int64, equal for equal captions; on any device.
            negative_features: (b, k, d), normalised, of each pair's hard negatives; of tokens
                (b, length, k, d).
        """
        others: dict[str, Any] = {"logit_scale": logit_scale, "logit_bias": logit_bias}
        others["temperature"] = logit_scale.reciprocal()
        for name, value in (("ids", ids), ("negatives", negative_features)):
            if value is not None:
                others[name] = value.to(image_features.device, non_blocking=True)
        if "query_mask" in self.takes:
            others |= {"query_mask": counted(image_features)}
            others |= {"document_mask": counted(text_features)}
        if "negative_mask" in self.takes:
            others["negatives"] = others["negatives"].transpose(1, 2)
            others["negative_mask"] = counted(others["negatives"])
        return self.loss(image_features, text_features, **{n: others[n] for n in self.takes})


def create_objective(config: Any, *, group: Any = None) -> Objective:
    """The loss of a `TrainConfig` without problems; `group` as for `ContrastiveLoss`.

    Raises:
        UsageError: a loss of the user's own cannot be imported or made, its call needs other
            arguments than `Objective` has, or it has parameters, which nobody would train.
    """
    if is_reference(config.loss):
        loss, takes = _own_loss(config, group)
    else:
        entry, takes = TRAINABLE[config.loss], set(TRAINABLE[config.loss].takes)
        arguments = {argument: getattr(config, name) for name, argument in entry.settings.items()}
        arguments |= {**entry.arguments, **entry.duplicates[config.duplicates]}
        if config.duplicates != "negatives":
            takes.add("ids")
        if config.hard_negatives:
            takes |= {"negatives", "negative_mask"} if entry.multi_vector else {"negatives"}
            arguments |= entry.negatives or {}
        if "temperature" in takes:
            arguments["temperature"] = 1.0  # each call gives the model's own
        loss = getattr(megabatch.losses, entry.name)(**arguments, group=group)
    if config.matryoshka_dims:
        loss = megabatch.losses.MatryoshkaLoss(loss, config.matryoshka_dims)
    return Objective(loss, takes)


def _own_loss(config: Any, group: Any) -> tuple[Callable[..., Any], set[str]]:
    """The user's own loss, and the arguments of `Objective` that its call takes."""
    label = f"--loss {config.loss}"
    loss = own_code.call(own_code.load(config.loss, "loss"), label, group=group)
    called = loss.forward if isinstance(loss, nn.Module) else loss
    if isinstance(loss, nn.Module) and (learnt := [name for name, _ in loss.named_parameters()]):
        raise UsageError(f"{label}: expected no parameters, which nobody would train, got {learnt}")
    others = ["logit_scale", "temperature", "logit_bias", "ids"]
    others += ["negatives"] * (config.hard_negatives > 0)
    takes = own_code.accepted(called, others, f"{label}: its call", positional=2)
    if config.hard_negatives and "negatives" not in takes:
        raise UsageError(f"--hard-negatives: the call of {label} has no parameter negatives")
    # One that takes both gets the scale alone.
    return loss, takes - {"temperature"} if "logit_scale" in takes else takes
