"""Checks of a GradientCache's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megabatch.gradient_cache.by_length import Key
from megabatch.ranks import global_ranks


def check_options(encoders: Sequence[Any], loss: Any, group: Any, feature_dtype: Any) -> None:
    """Check the types of these arguments."""
    if not encoders:
        raise ValueError("encoders: expected at least one, got none")
    for name, function in (*(("encoders", encoder) for encoder in encoders), ("loss", loss)):
        if not callable(function):
            raise TypeError(f"{name}: expected a callable, got {type(function).__name__}")
    global_ranks(group)  # raises an error for anything else than a group
    if feature_dtype is not None and not getattr(feature_dtype, "is_floating_point", False):
        raise TypeError(
            f"feature_dtype: expected a floating point torch.dtype or None, got {feature_dtype!r}"
        )


# The functions below take the number of encoders, None for a single model that takes all batches.


def per_encoder(name: str, values: Sequence[Any], count: int | None) -> tuple[Any, ...]:
    """One value for each encoder, of which a single one is for all."""
    if len(values) not in (1, count or 1):
        raise ValueError(f"{name}: expected one, or one per encoder, {count}, got {len(values)}")
    return tuple(values) if len(values) > 1 else (*values,) * (count or 1)


def integers(name: str, value: Any, count: int | None, least: int) -> tuple[int, ...]:
    """One number for each encoder."""
    several = count is not None and isinstance(value, (tuple, list))
    numbers = per_encoder(name, value if several else (value,), count)
    for number in numbers:
        if not isinstance(number, int):
            raise TypeError(f"{name}: expected an int, got {type(number).__name__}")
        if number < least:
            raise ValueError(f"{name}: expected at least {least}, got {number}")
    return numbers


def checked_input_names(value: Any, count: int | None) -> tuple[str, ...]:
    """The keywords of a call that are batches."""
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"input_names: expected a sequence of strings, got {value!r}")
    if value and len(value) != (count or len(value)):
        raise ValueError(f"input_names: expected one per encoder, {count}, got {', '.join(value)}")
    return tuple(value)


def checked_outputs(value: Any, count: int | None) -> tuple[tuple[Key, ...] | None, ...]:
    """For each encoder, the keys of the outputs to be cached; None for all."""
    if value is None:
        return (None,) * (count or 1)
    keys = (value,) if isinstance(value, (int, str)) else tuple(value)
    if not keys:
        raise ValueError("outputs: expected keys or positions, got none")
    return (keys,) if count is None else tuple((k,) for k in per_encoder("outputs", keys, count))


def named_batches(
    batches: Sequence[Any], by_name: Mapping[str, Any], count: int | None
) -> list[dict[str, Any]]:
    """For each encoder, its batches by name."""
    given = {f"batch {i}": batch for i, batch in enumerate(batches)} | {**by_name}
    if not given:
        raise TypeError("batches: expected at least one, got none")
    if count is None:
        return [given]
    if batches and by_name:
        raise TypeError(
            f"batches: expected all by position or all by keyword, got {len(batches)} by position "
            f"and {', '.join(by_name)} by keyword"
        )
    if len(given) != count:
        raise TypeError(f"batches: expected one per encoder, {count}, got {len(given)}")
    return [{name: batch} for name, batch in given.items()]
