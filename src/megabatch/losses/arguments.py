"""Arguments that several losses share: temperature, ids of pairs, weights, views."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.similarity.arguments import (
    check_features,
    check_integers,
    check_same_rows,
    check_scalar,
    check_two,
    check_vector,
)
from megabatch.similarity.parallel import pair_ids, replicated

#: Ids from here on are given to pairs that have none of their own.
RESERVED = 1 << 62


class TemperatureLoss(nn.Module):
    """A loss whose logits are similarities divided by a temperature.

    Args:
        temperature: a positive number, or a tensor of shape () or (1,); an `nn.Parameter` is
            learnt and becomes a parameter of this module.
        group: processes that share one batch: None, "local" or a process group.
    """

    def __init__(self, temperature: float | Tensor, *, group: object = None) -> None:
        super().__init__()
        check_temperature(temperature)
        self.temperature = temperature
        self.group = group

    def _scale(self, temperature: float | Tensor | None, like: Tensor) -> Tensor:
        """1 / temperature: of this call, or where that is None of the constructor."""
        if temperature is None:
            temperature = self.temperature
        else:
            check_temperature(temperature)
        return replicated(check_scalar("temperature", temperature, like), self.group).reciprocal()


def check_temperature(temperature: Any) -> None:
    """A number must be positive; of a tensor only type and shape are looked at.

    Raises:
        TypeError, ValueError: naming `temperature`.
    """
    if isinstance(temperature, Tensor):
        check_scalar("temperature", temperature, temperature)
        return
    check_number("temperature", temperature)
    if temperature <= 0:
        raise ValueError(f"temperature: expected a positive number, got {temperature}")


def check_number(name: str, value: Any) -> None:
    """`value` must be a finite number, not a tensor."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """`value` must be one of the names in `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def check_pairs(x: Any, y: Any, names: tuple[str, str]) -> None:
    """Two feature matrices of which row i of one belongs to row i of the other."""
    check_two(x, y, names)
    check_same_rows(x, y, names)


def check_weights(weights: Any, like: Tensor) -> Tensor | None:
    """One number a row, or None; weights are data and need no gradient."""
    if weights is None:
        return None
    weights = check_vector("weights", weights, like.shape[0], like)
    if weights.requires_grad:
        raise ValueError("weights: expected a tensor that needs no gradient, got one that does")
    return weights


def own_ids(ids: Any, like: Tensor, group: object) -> Tensor:
    """The ids of pairs, each pair with a negative id given one that no other pair has.

    Raises:
        TypeError, ValueError: naming `ids`; also where one reaches into the reserved range. That
            is seen on the CPU alone: a look at a GPU's numbers would stall it.
    """
    ids = check_integers("ids", ids, like.shape[0], like)
    eager = not torch.compiler.is_compiling()
    if eager and ids.device.type == "cpu" and ids.numel() and int(ids.max()) >= RESERVED:
        raise ValueError(f"ids: expected numbers below 2**62, got {int(ids.max())}")
    alone = pair_ids(ids.shape[0], group, device=ids.device) + RESERVED
    return torch.where(ids < 0, alone, ids)


def stack_views(views: tuple[Any, ...], group: object) -> tuple[Tensor, Tensor]:
    """Views (b, d) of the same b instances as one matrix, and the instance of each of its rows."""
    if len(views) < 2:
        raise TypeError(f"views: expected two or more, got {len(views)}")
    check_features("views[0]", views[0])
    for i, view in enumerate(views[1:], start=1):
        check_pairs(views[0], view, ("views[0]", f"views[{i}]"))
    ids = pair_ids(views[0].shape[0], group, device=views[0].device)
    return torch.cat(views), ids.repeat(len(views))
