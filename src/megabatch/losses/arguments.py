"""Checks of arguments that several losses share: numbers, ids of pairs, weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megabatch.similarity import pair_ids
from megabatch.similarity.arguments import (
    as_number,
    check_integers,
    check_same_rows,
    check_scalar,
    check_two,
    check_vector,
    extremes,
)

#: Ids from here on are for pairs without an id.
RESERVED = 1 << 62

#: Conditions for a number, by the words that describe them in errors.
_CONDITIONS = {
    "a finite number": math.isfinite,
    "a positive, finite number": lambda number: 0 < number < math.inf,
    "a finite, non-negative number": lambda number: 0 <= number < math.inf,
    "0 to below 1": lambda number: 0 <= number < 1,
}


def check_number(name: str, value: Any, expected: str = "a finite number") -> float:
    """`value` must be a number, not a tensor, as `_CONDITIONS[expected]` says; a float."""
    number = as_number(value)
    if number is None:
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not _CONDITIONS[expected](number):
        raise ValueError(f"{name}: expected {expected}, got {value}")
    return number


def check_temperature(temperature: Any) -> float | Tensor:
    """A positive, finite number, or a tensor of shape () or (1,) with one; see `extremes`."""
    if not isinstance(temperature, Tensor):
        return check_number("temperature", temperature, "a positive, finite number")
    check_scalar("temperature", temperature, temperature)
    values = extremes(temperature)
    if values is not None:
        check_number("temperature", values[0], "a positive, finite number")
    return temperature


def check_factors(name: str, values: Any, number: int, what: str) -> tuple[float, ...]:
    """A non-negative factor for each of `number` `what`s; None: all are 1."""
    expected = "a finite, non-negative number"
    values = [1.0] * number if values is None else values
    factors = tuple(check_number(name, value, expected) for value in values)
    if len(factors) != number:
        raise ValueError(f"{name}: expected {number}, one for each {what}, got {len(factors)}")
    return factors


def check_flag(name: str, value: Any) -> bool:
    """`value`, which must be True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return value


def check_choice(name: str, value: Any, choices: tuple[str | None, ...]) -> Any:
    """`value`, which must be one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(str, choices))}, got {value!r}")
    return value


def check_pairs(x: Any, y: Any, names: tuple[str, str]) -> None:
    """Check two feature matrices of equal length, whose rows i are a pair."""
    check_two(x, y, names)
    check_same_rows(x, y, names)


def check_weights(weights: Any, like: Tensor) -> Tensor | None:
    """None, or one finite, non-negative number per row, without a gradient.

    The values are checked where that is free: see `extremes`.
    """
    if weights is None:
        return None
    weights = check_vector("weights", weights, like.shape[0], like)
    if weights.requires_grad:
        raise ValueError("weights: expected a tensor that needs no gradient, got one that does")
    values = extremes(weights)
    if values is not None and not 0 <= values[0] <= values[1] < math.inf:
        came = f"{values[0]:.6g} to {values[1]:.6g}"
        raise ValueError(f"weights: expected finite, non-negative numbers, got {came}")
    return weights


def check_ids(ids: Any, like: Tensor, group: object) -> Tensor | None:
    """Ids of pairs, or None; each negative one is replaced by an id that no other pair has.

    Only on the CPU are ids in the reserved range refused: a look at a GPU's would stall it.
    """
    if ids is None:
        return None
    ids = check_integers("ids", ids, like.shape[0], like)
    values = extremes(ids)
    if values is not None and values[1] >= RESERVED:
        raise ValueError(f"ids: expected numbers below 2**62, got {values[1]}")
    unique = pair_ids(ids.shape[0], group, device=ids.device) + RESERVED
    return torch.where(ids < 0, unique, ids)
