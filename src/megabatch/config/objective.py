"""The loss that a configuration names, the library's or the user's, called in one way."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch.losses
from megabatch.errors import UsageError
from megabatch.hints import is_reference
from megabatch.losses.registry import TRAINABLE
from megabatch.models import own_code


class Objective(nn.Module):
    """Calls a loss with the outputs of `Towers.module`, and ids.

    Args:
        loss: called as `loss(image_features, text_features, **others)`.
        takes: the names of the others, among "logit_scale", "temperature" (its inverse),
            "logit_bias", "ids" and "negatives".
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
        """The loss of a batch, shape ().

        Args:
            image_features, text_features: (b, d), normalised.
            logit_scale, logit_bias: shape () or (1,).
            ids: (b,) int64, equal for equal captions; on any device.
            negative_features: (b, k, d), normalised, of each pair's hard negatives.

        Raises:
            ValueError: ids or negatives where the loss takes none, or none where it needs them.
        """
        ids = None if ids is None else ids.to(image_features.device, non_blocking=True)
        others: dict[str, Any] = {
            "logit_scale": logit_scale,
            "logit_bias": logit_bias,
            "ids": ids,
            "negatives": negative_features,
        }
        for name, argument in (("ids", "ids"), ("negative_features", "negatives")):
            if (argument in self.takes) != (others[argument] is not None):
                taken = argument in self.takes
                expected = (
                    "a tensor, as the loss takes it, got None" if taken else "None, got a tensor"
                )
                raise ValueError(f"{name}: expected {expected}")
        if "temperature" in self.takes:
            others["temperature"] = logit_scale.reciprocal()
        return self.loss(image_features, text_features, **{n: others[n] for n in self.takes})


def create_objective(config: Any, *, group: Any = None) -> Objective:
    """The loss of `config.loss` with its settings.

    Args:
        config: a `TrainConfig` that has no problem (`megabatch.config.problems`).
        group: as for `ContrastiveLoss`.

    Raises:
        UsageError: `config.loss` is a reference to no loss; see `create_custom`.
    """
    if is_reference(config.loss):
        negatives = config.hard_negatives > 0
        loss, takes = create_custom(config.loss, group=group, negatives=negatives)
    else:
        entry = TRAINABLE[config.loss]
        arguments = {argument: getattr(config, name) for name, argument in entry.settings.items()}
        arguments |= entry.duplicates[config.duplicates]
        takes = set(entry.takes)
        if "temperature" in takes:
            arguments["temperature"] = 1.0  # each call gives the model's own
        if config.duplicates != "negatives":
            takes.add("ids")
        if config.hard_negatives:
            takes.add("negatives")
            arguments |= entry.negatives or {}
        loss = getattr(megabatch.losses, entry.name)(**arguments, group=group)
    if config.matryoshka_dims:
        loss = megabatch.losses.MatryoshkaLoss(loss, config.matryoshka_dims)
    return Objective(loss, takes)


# --- a loss of the user's own, named by a reference `module:Class` --------------------------------


def create_custom(
    reference: str, *, group: Any = None, negatives: bool = False
) -> tuple[Callable[..., Any], set[str]]:
    """Make the user's loss.

    Args:
        reference: of a class, or of a function that returns a loss. It is called with `group` if it
            has such a parameter.
        group: as for `ContrastiveLoss`.
        negatives: whether its call gets `negatives`, features of shape (b, k, d).

    Returns:
        The loss, and the arguments of `Objective` that are parameters of its call, without the
        temperature if it takes the scale.

    Raises:
        UsageError: it cannot be imported or made, its call needs other arguments, or it has
            parameters, which the trainer would not train.
    """
    label = f"--loss {reference}"
    loss = own_code.call(own_code.load(reference, "loss"), label, group=group)
    if not callable(loss) or isinstance(loss, type):
        raise UsageError(f"{label}: expected a loss to call, got {own_code.describe(loss)}")
    is_module = isinstance(loss, nn.Module)
    if learnt := [name for name, _ in loss.named_parameters()] if is_module else []:
        raise UsageError(
            f"{label}: expected no parameters, as only the model's are trained, got "
            + ", ".join(learnt)
        )
    others = ["logit_scale", "temperature", "logit_bias", "ids"] + ["negatives"] * negatives
    called = loss.forward if is_module else loss
    takes = own_code.accepted(called, others, f"{label}: its call", positional=2)
    if negatives and "negatives" not in takes:
        raise UsageError(f"--hard-negatives: the call of {label} has no parameter negatives")
    return loss, takes - {"temperature"} if "logit_scale" in takes else takes


def check_custom(
    objective: Objective, reference: str, width: int, device: torch.device, *, has_bias: bool
) -> None:
    """Call the user's loss once with a few random features, on every rank of its group together.

    Args:
        objective: with the loss. reference: of the loss, for messages.
        width, device: of the features.
        has_bias: whether the model has a bias; otherwise the loss gets None.

    Raises:
        UsageError: it fails, or returns anything but a tensor of shape () with a gradient.
    """
    label = f"--loss {reference}"
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 8, width, generator=generator).to(device)
    x, y = (F.normalize(part, dim=-1).requires_grad_() for part in drawn)
    scale, bias = (torch.tensor(v, device=device, requires_grad=True) for v in (10.0, -10.0))
    ids = torch.arange(8) if "ids" in objective.takes else None
    negatives = y.detach().roll(1, 0)[:, None] if "negatives" in objective.takes else None
    given = (x, y, scale, bias if has_bias else None)
    try:
        value = objective(*given, ids=ids, negative_features=negatives)
    except Exception as error:
        lacking = "logit_bias" in objective.takes and not has_bias
        hint = "; the model has no logit_bias (--init-logit-bias gives it one)" if lacking else ""
        raise UsageError(f"{own_code.failure(label, error)}{hint}") from error
    if not isinstance(value, Tensor) or value.shape != ():
        is_tensor = isinstance(value, Tensor)
        came = f"one of shape {tuple(value.shape)}" if is_tensor else own_code.describe(value)
        raise UsageError(f"{label}: expected to return a tensor of shape (), got {came}")
    gradients: Any = (None, None)
    if value.requires_grad:
        gradients = torch.autograd.grad(value, (x, y), allow_unused=True)
    if gradients == (None, None):
        raise UsageError(
            f"{label}: expected to return a tensor with a gradient of the features, got none: its "
            f"value does not depend on them (requires_grad is {value.requires_grad})"
        )
