"""A loss of the user's own in the trainer, named by a reference `module:Class`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import references
from megabatch.errors import UsageError

#: Arguments that a call may take besides image and text features.
_OTHERS = ("logit_scale", "temperature", "logit_bias", "ids")


def create(
    reference: str, *, group: Any = None, negatives: bool = False
) -> tuple[Callable[..., Any], set[str]]:
    """Make the loss.

    Args:
        reference: of a class, or of a function that returns a loss. It is called with `group` if it
            has such a parameter.
        group: processes that share one batch: None, "local", a process group or a DeviceMesh.
        negatives: whether its call gets `negatives`, features of shape (b, k, d).

    Returns:
        The loss, and the arguments that its call takes besides two matrices of features: those of
        "logit_scale", "temperature", "logit_bias" and "ids" that are among its parameters.

    Raises:
        UsageError: it cannot be imported or made, its call needs other arguments, or it has
            parameters, which the trainer would not train.
    """
    label = label_of(reference)
    loss = references.call(references.load(reference, "loss"), label, group=group)
    if not callable(loss) or isinstance(loss, type):
        raise UsageError(f"{label}: expected a loss to call, got {references.describe(loss)}")
    learnt = [n for n, _ in loss.named_parameters()] if isinstance(loss, nn.Module) else []
    if learnt:
        raise UsageError(
            f"{label}: expected no parameters, as only the model's are trained, got "
            + ", ".join(learnt)
        )
    called = loss.forward if isinstance(loss, nn.Module) else loss
    others = (*_OTHERS, "negatives") if negatives else _OTHERS
    takes = references.accepted(called, others, f"{label}: its call", positional=2)
    if negatives and "negatives" not in takes:
        raise UsageError(f"--hard-negatives: the call of {label} has no parameter negatives")
    return loss, takes


def check(
    objective: nn.Module, reference: str, width: int, device: torch.device, *, has_bias: bool
) -> None:
    """Call the loss once with a few random features, on every rank of its group together.

    Args:
        objective: `Objective` with the loss.
        reference: of the loss, for messages.
        width: of the features.
        device: of the features.
        has_bias: whether the model has a bias; otherwise the loss gets None.

    Raises:
        UsageError: it fails, or returns anything but a tensor of shape () with a gradient.
    """
    label = label_of(reference)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 8, width, generator=generator).to(device)
    x, y = (F.normalize(part, dim=-1).requires_grad_() for part in drawn)
    scale, bias = (torch.tensor(v, device=device, requires_grad=True) for v in (10.0, -10.0))
    ids = torch.arange(8) if objective.takes_ids else None
    more = (
        {"negative_features": y.detach().roll(1, 0)[:, None]} if objective.takes_negatives else {}
    )
    try:
        value = objective(x, y, scale, bias if has_bias else None, ids=ids, **more)
    except Exception as error:
        lacking = bool(objective.takes_bias) and not has_bias
        hint = "; the model has no logit_bias (--init-logit-bias gives it one)" if lacking else ""
        raise UsageError(f"{references.failure(label, error)}{hint}") from error
    if not isinstance(value, Tensor) or value.shape != ():
        raise UsageError(f"{label}: expected to return a tensor of shape (), got {_shown(value)}")
    if not value.requires_grad:
        raise UsageError(
            f"{label}: expected to return a tensor with a gradient, got one without (requires_grad "
            "is False)"
        )
    gradients = torch.autograd.grad(value, (x, y), allow_unused=True)
    if all(gradient is None for gradient in gradients):
        raise UsageError(
            f"{label}: expected a gradient of the features, got none: its value does not depend on "
            "them"
        )


def label_of(reference: str) -> str:
    """The setting as it is typed."""
    return f"--loss {reference}"


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"one of shape {tuple(value.shape)}"
    return references.describe(value)
