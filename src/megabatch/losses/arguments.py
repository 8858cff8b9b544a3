"""Arguments that several losses share: temperature, ids of pairs, weights, views."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megabatch.similarity.arguments import (
    as_number,
    check_features,
    check_integers,
    check_same_rows,
    check_scalar,
    check_two,
    check_vector,
    extremes,
)
from megabatch.similarity.distributed.means import pair_ids

#: Ids from here on are for pairs without an id of their own.
RESERVED = 1 << 62


def check_temperature(temperature: Any) -> float | Tensor:
    """Check a temperature: a positive, finite number, or a tensor of shape () or (1,) with one.

    The value of a tensor is looked at where that is free: see `extremes`.

    Raises:
        TypeError, ValueError: naming `temperature`.
    """
    values: tuple[float, float] | None
    if isinstance(temperature, Tensor):
        check_scalar("temperature", temperature, temperature)
        values = extremes(temperature)
    else:
        temperature = check_number("temperature", temperature)
        values = temperature, temperature
    if values is not None and not 0 < values[0] < math.inf:
        raise ValueError(f"temperature: expected a positive, finite number, got {values[0]}")
    return temperature


def check_number(name: str, value: Any) -> float:
    """`value` must be a finite number, not a tensor; returned as a float."""
    number = as_number(value)
    if number is None:
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {value}")
    return number


def check_factors(name: str, values: Any, number: int, what: str) -> tuple[float, ...]:
    """Check `number` non-negative factors, one for each `what`; by default all are 1."""
    factors = [1.0] * number if values is None else [check_number(name, v) for v in values]
    if len(factors) != number:
        raise ValueError(f"{name}: expected {number}, one for each {what}, got {len(factors)}")
    for factor in factors:
        if factor < 0:
            raise ValueError(f"{name}: expected a non-negative number, got {factor}")
    return tuple(factors)


def check_share(name: str, value: Any) -> float:
    """`value` must be a number from 0 to below 1; returned as a float."""
    share = check_number(name, value)
    if not 0 <= share < 1:
        raise ValueError(f"{name}: expected 0 to below 1, got {share}")
    return share


def check_flag(name: str, value: Any, *, optional: bool = False) -> None:
    """`value` must be True or False, or None if that is allowed."""
    if not (isinstance(value, bool) or (optional and value is None)):
        choices = "True, False or None" if optional else "True or False"
        raise TypeError(f"{name}: expected {choices}, got {value!r}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """`value` must be one of the names in `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def check_pairs(x: Any, y: Any, names: tuple[str, str]) -> None:
    """Check two feature matrices of equal length, whose rows i are a pair."""
    check_two(x, y, names)
    check_same_rows(x, y, names)


def check_weights(weights: Any, like: Tensor) -> Tensor | None:
    """Check weights: None, or one finite, non-negative number per row, without a gradient.

    Their values are looked at where that is free: see `extremes`.
    """
    if weights is None:
        return None
    weights = check_vector("weights", weights, like.shape[0], like)
    if weights.requires_grad:
        raise ValueError("weights: expected a tensor that needs no gradient, got one that does")
    values = extremes(weights)
    if values is not None and not 0 <= values[0] <= values[1] < math.inf:
        raise ValueError(
            f"weights: expected finite, non-negative numbers, got {values[0]:.6g} to "
            f"{values[1]:.6g}"
        )
    return weights


def own_ids(ids: Any, like: Tensor, group: object) -> Tensor:
    """The ids of pairs, with negative ones replaced by unique ids.

    Raises:
        TypeError, ValueError: naming `ids`; also where one reaches into the reserved range. That
            is seen on the CPU alone: a look at a GPU's numbers would stall it.
    """
    ids = check_integers("ids", ids, like.shape[0], like)
    values = extremes(ids)
    if values is not None and values[1] >= RESERVED:
        raise ValueError(f"ids: expected numbers below 2**62, got {values[1]}")
    alone = pair_ids(ids.shape[0], group, device=ids.device) + RESERVED
    return torch.where(ids < 0, alone, ids)


def check_labelled(
    embeddings: Any, labels: Any, references: Any, reference_labels: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Check embeddings (n, d) and labels, and references (m, d) and theirs if given; the ids."""
    check_features("embeddings", embeddings)
    labels = check_integers("labels", labels, embeddings.shape[0], embeddings)
    if (references is None) != (reference_labels is None):
        absent = "references" if references is None else "reference_labels"
        raise ValueError(f"{absent}: expected with the other of the two, got None")
    if references is None:
        return labels
    check_two(embeddings, references, ("embeddings", "references"))
    size = references.shape[0]
    return labels, check_integers("reference_labels", reference_labels, size, references)


def check_views(views: tuple[Any, ...]) -> None:
    """Check two or more feature matrices of equal length, whose rows i belong to instance i."""
    if len(views) < 2:
        raise TypeError(f"views: expected two or more, got {len(views)}")
    check_features("views[0]", views[0])
    for i, view in enumerate(views[1:], start=1):
        check_pairs(views[0], view, ("views[0]", f"views[{i}]"))


def stack_views(views: tuple[Tensor, ...], group: object) -> tuple[Tensor, Tensor]:
    """Views (b, d) of the same b instances as one matrix, and each row's instance."""
    ids = pair_ids(views[0].shape[0], group, device=views[0].device)
    return torch.cat(views), ids.repeat(len(views))
